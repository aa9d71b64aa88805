"""Idle rows that end where dense training takes them: `rules` by optimizer, a `History` of steps, which rows catch up with.

Knows rows as tensors by name; tables, optimizers' hooks and storage are no business of it.
"""

from __future__ import annotations

from torch import Tensor

from speedtransfer.idle.history import History
from speedtransfer.idle.replay import Replay
from speedtransfer.idle.rule import IdleStep, Numbers, Rule
from speedtransfer.idle.rules import choose_rule, has_rule, rule_for

__all__ = ["History", "IdleStep", "Numbers", "Replay", "Rule", "catch_up", "choose_rule", "has_rule", "rule_for"]


def catch_up(history: History, rows: dict[str, Tensor], last: Tensor) -> None:
    """Call `History.catch_up`."""
    history.catch_up(rows, last)
