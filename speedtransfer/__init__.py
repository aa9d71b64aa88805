"""Embedding tables larger than GPU memory, trained with any row-by-row ``torch.optim`` optimizer."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from speedtransfer import errors, ranks
from speedtransfer.checkpoint import load_checkpoint, save_checkpoint
from speedtransfer.ngrams import NgramEmbedding, NgramHash, NgramStatistics, PerLayerEmbedding
from speedtransfer.nn import (
    ActiveRows,
    Embedding,
    EmbeddingBag,
    MultiEmbedding,
    clip_grad_norm_,
    full_state_dict,
    prefetch,
    replace_embeddings,
    summary,
    table_parameters,
    to_dense,
)
from speedtransfer.ranks import equal_steps
from speedtransfer.tables import Table, TableStats
from speedtransfer.version import __version__
from speedtransfer.vocabulary import Changes, Vocabulary, VocabularyStats, hash_ids

if TYPE_CHECKING:
    from speedtransfer import speedtorch, word2vec
    from speedtransfer.ranks.averaging import BlockMomentumAverager
    from speedtransfer.ranks.comm_hooks import OneBitState, one_bit_hook

__all__ = [
    "ActiveRows",
    "BlockMomentumAverager",
    "Changes",
    "Embedding",
    "EmbeddingBag",
    "MultiEmbedding",
    "NgramEmbedding",
    "NgramHash",
    "NgramStatistics",
    "OneBitState",
    "PerLayerEmbedding",
    "Table",
    "TableStats",
    "Vocabulary",
    "VocabularyStats",
    "__version__",
    "clip_grad_norm_",
    "equal_steps",
    "errors",
    "full_state_dict",
    "hash_ids",
    "load_checkpoint",
    "one_bit_hook",
    "prefetch",
    "replace_embeddings",
    "save_checkpoint",
    "speedtorch",
    "summary",
    "table_parameters",
    "to_dense",
    "word2vec",
]


def __getattr__(name: str) -> Any:
    if name in ("speedtorch", "word2vec"):  # larger than all the rest, and few programs use them
        return importlib.import_module(f"{__name__}.{name}")
    if name in ("BlockMomentumAverager", "OneBitState", "one_bit_hook"):
        return getattr(ranks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return __all__
