"""Several processes, by torch.distributed: who has which row, messages between them, and what training beside tables needs."""

import importlib
from typing import Any

from speedtransfer.ranks.equal_steps import EqualSteps, equal_steps
from speedtransfer.ranks.exchange import DifferenceError, Exchange, Segment, Traffic, as_int64, exchange_of, is_first
from speedtransfer.ranks.interleaved import Interleaved
from speedtransfer.ranks.partition import Partition
from speedtransfer.ranks.shared_memory import SharedMemory
from speedtransfer.ranks.torchrun import joined, world

# What few programs use, and what imports parts of torch that are slow to import.
_LATER = {"BlockMomentumAverager": "averaging", "OneBitState": "comm_hooks", "one_bit_hook": "comm_hooks"}

__all__ = [
    "DifferenceError",
    "EqualSteps",
    "Exchange",
    "Interleaved",
    "Partition",
    "Segment",
    "SharedMemory",
    "Traffic",
    "as_int64",
    "equal_steps",
    "exchange_of",
    "is_first",
    "joined",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
