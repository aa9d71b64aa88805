"""Tables of n-grams and per-layer tables of language models."""

from speedtransfer.ngrams.hashing import NgramHash
from speedtransfer.ngrams.ngram_embedding import NgramEmbedding
from speedtransfer.ngrams.per_layer import PerLayerEmbedding
from speedtransfer.ngrams.statistics import NgramStatistics

__all__ = ["NgramEmbedding", "NgramHash", "NgramStatistics", "PerLayerEmbedding"]
