"""Former names of `rival_methods`, which notebooks/transfer.ipynb uses."""

from speedtransfer.benchmark.rival_methods import other_methods as other_ways

__all__ = ["other_ways"]
