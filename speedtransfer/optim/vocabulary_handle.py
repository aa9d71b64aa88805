"""Where pickles of earlier versions look for what makes the handle of a table with a vocabulary."""

from speedtransfer.optim.vocabulary_ids import unpickle_with_ids as _unpickle

__all__ = ["_unpickle"]
