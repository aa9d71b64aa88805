"""Former names of `methods`, which notebooks/transfer.ipynb uses."""

from speedtransfer.benchmark.methods import as_case, roofs
from speedtransfer.benchmark.methods import our_methods as our_ways

__all__ = ["as_case", "our_ways", "roofs"]
