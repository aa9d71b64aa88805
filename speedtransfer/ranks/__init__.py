"""Several processes, by torch.distributed: who has which row, messages between them, and what training beside tables needs."""

from speedtransfer.ranks.equal_steps import equal_steps
from speedtransfer.ranks.exchange import (
    DifferenceError,
    Exchange,
    Segment,
    as_int64,
    check_counts,
    exchange_of,
    from_words,
    is_first,
    to_words,
)
from speedtransfer.ranks.ids_ahead import IdsAhead
from speedtransfer.ranks.partition import Interleaved, Partition
from speedtransfer.ranks.shared_memory import SharedMemory
from speedtransfer.ranks.torchrun import group_of, joined, world

__all__ = [
    "DifferenceError",
    "Exchange",
    "IdsAhead",
    "Interleaved",
    "Partition",
    "Segment",
    "SharedMemory",
    "as_int64",
    "check_counts",
    "equal_steps",
    "exchange_of",
    "from_words",
    "group_of",
    "is_first",
    "joined",
    "to_words",
    "world",
]
