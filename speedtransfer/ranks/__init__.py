"""Several processes, by torch.distributed: who has which row, and messages between them."""

from speedtransfer.ranks.exchange import Exchange, Segment, Traffic, exchange_of, is_first
from speedtransfer.ranks.partition import Partition
from speedtransfer.ranks.shared_memory import SharedMemory

__all__ = ["Exchange", "Partition", "Segment", "SharedMemory", "Traffic", "exchange_of", "is_first"]
