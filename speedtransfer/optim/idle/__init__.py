"""Idle rows that end where dense training takes them: `rules` by optimizer, `history` of steps, `catch_up` of rows."""

from speedtransfer.optim.idle.catch_up import catch_up
from speedtransfer.optim.idle.history import History
from speedtransfer.optim.idle.rules import IdleStep, Rule, rule_for

__all__ = ["History", "IdleStep", "Rule", "catch_up", "rule_for"]
