"""What a model sees: the drop-in modules and their active rows."""

from speedtransfer.nn.active import ActiveRows
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.replace import replace_embeddings

__all__ = ["ActiveRows", "Embedding", "EmbeddingBag", "replace_embeddings"]
