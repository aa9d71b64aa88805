"""word2vec on tables of rows: skip-gram with negative sampling, by any optimizer that works row by row.

``train`` takes a corpus to ``Vectors``; the other names are its parts.
"""

from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.model import SkipGram
from speedtransfer.word2vec.run import train
from speedtransfer.word2vec.sampler import Block, Sampler
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.trainer import Trainer
from speedtransfer.word2vec.vectors import UnknownWordError, Vectors
from speedtransfer.word2vec.vocabulary import Vocabulary

__all__ = [
    "Block",
    "Corpus",
    "Sampler",
    "Settings",
    "SkipGram",
    "Trainer",
    "UnknownWordError",
    "Vectors",
    "Vocabulary",
    "train",
]
