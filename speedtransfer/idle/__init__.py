"""What optimizer steps do to rows that no batch has touched: the rules, the steps to remember, and rows that catch up.

Knows rows as tensors by name, and no table.
"""

from speedtransfer.idle.feature_lag import FeatureLag
from speedtransfer.idle.history import History
from speedtransfer.idle.lag import Lag
from speedtransfer.idle.replay import Replay
from speedtransfer.idle.rule import IdleStep, Numbers, Rule
from speedtransfer.idle.rules import choose_rule, has_rule, rule_for

__all__ = [
    "FeatureLag",
    "History",
    "IdleStep",
    "Lag",
    "Numbers",
    "Replay",
    "Rule",
    "choose_rule",
    "has_rule",
    "rule_for",
]
