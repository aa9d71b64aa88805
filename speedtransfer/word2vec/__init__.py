"""word2vec on tables of rows: skip-gram or CBOW with negative sampling, by any optimizer that works row by row.

``train`` takes a corpus to ``Vectors``; the other names are its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedtransfer.lazy import MissingPackageError, lazy_names

if TYPE_CHECKING:
    from speedtransfer.word2vec.corpus import Corpus
    from speedtransfer.word2vec.evaluation import Analogies, Similarity, evaluate, load_set
    from speedtransfer.word2vec.model import Word2Vec
    from speedtransfer.word2vec.places import Block
    from speedtransfer.word2vec.run import train
    from speedtransfer.word2vec.sampler import Sampler
    from speedtransfer.word2vec.settings import Settings
    from speedtransfer.word2vec.subwords import NgramVectors
    from speedtransfer.word2vec.trainer import Trainer
    from speedtransfer.word2vec.vectors import UnknownWordError, Vectors
    from speedtransfer.word2vec.vocabulary import Vocabulary

__all__ = [
    "Analogies",
    "Block",
    "Corpus",
    "MissingPackageError",
    "NgramVectors",
    "Sampler",
    "Settings",
    "Similarity",
    "Trainer",
    "UnknownWordError",
    "Vectors",
    "Vocabulary",
    "Word2Vec",
    "evaluate",
    "load_set",
    "train",
]

_MODULES = "corpus evaluation model places run sampler settings subwords trainer vectors vocabulary"
__getattr__ = lazy_names(__name__, __all__, _MODULES.split())


def __dir__() -> list[str]:
    return __all__
