"""Several processes, by torch.distributed: who has which row, and messages between them."""

from speedtransfer.ranks.exchange import Exchange, Segment, Traffic, exchange_of
from speedtransfer.ranks.partition import Partition

__all__ = ["Exchange", "Partition", "Segment", "Traffic", "exchange_of"]
