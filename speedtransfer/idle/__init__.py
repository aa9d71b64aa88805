"""Idle rows that end where dense training takes them: `rules` by optimizer, `history` of steps, `catch_up` of rows."""

from speedtransfer.idle.catch_up import catch_up
from speedtransfer.idle.history import History
from speedtransfer.idle.replay import Replay
from speedtransfer.idle.rule import IdleStep, Rule
from speedtransfer.idle.rules import choose_rule, has_rule, rule_for

__all__ = ["History", "IdleStep", "Replay", "Rule", "catch_up", "choose_rule", "has_rule", "rule_for"]
