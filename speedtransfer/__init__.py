"""Embedding tables larger than GPU memory, trained with any row-by-row ``torch.optim`` optimizer."""

from speedtransfer import word2vec
from speedtransfer.checkpoint import load_checkpoint, save_checkpoint
from speedtransfer.nn import ActiveRows, Embedding, EmbeddingBag, replace_embeddings, summary, to_dense
from speedtransfer.tables import Table, TableStats
from speedtransfer.version import __version__

__all__ = [
    "ActiveRows",
    "Embedding",
    "EmbeddingBag",
    "Table",
    "TableStats",
    "__version__",
    "load_checkpoint",
    "replace_embeddings",
    "save_checkpoint",
    "summary",
    "to_dense",
    "word2vec",
]
