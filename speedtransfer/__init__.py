"""Embedding tables larger than GPU memory, trained with any row-by-row ``torch.optim`` optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedtransfer.lazy import lazy_names
from speedtransfer.version import __version__

if TYPE_CHECKING:
    from speedtransfer import errors, speedtorch, word2vec
    from speedtransfer.checkpoint import (
        BackgroundSave,
        Mark,
        apply_delta,
        load_checkpoint,
        mark,
        merge,
        save_checkpoint,
        save_delta,
    )
    from speedtransfer.memory_layers import MemoryLayer
    from speedtransfer.ngrams import NgramEmbedding, NgramHash, NgramStatistics, PerLayerEmbedding
    from speedtransfer.nn import (
        ActiveRows,
        Embedding,
        EmbeddingBag,
        MultiEmbedding,
        MultiEmbeddingBag,
        clip_grad_norm_,
        full_state_dict,
        prefetch,
        replace_embeddings,
        summary,
        table_parameters,
        to_dense,
    )
    from speedtransfer.planning.planner import plan
    from speedtransfer.ranks.equal_steps import equal_steps
    from speedtransfer.tables import Table, TableStats
    from speedtransfer.vocabulary import Changes, Vocabulary, VocabularyStats, hash_ids

__all__ = [
    "ActiveRows",
    "BackgroundSave",
    "Changes",
    "Embedding",
    "EmbeddingBag",
    "Mark",
    "MemoryLayer",
    "MultiEmbedding",
    "MultiEmbeddingBag",
    "NgramEmbedding",
    "NgramHash",
    "NgramStatistics",
    "PerLayerEmbedding",
    "Table",
    "TableStats",
    "Vocabulary",
    "VocabularyStats",
    "__version__",
    "apply_delta",
    "clip_grad_norm_",
    "equal_steps",
    "errors",
    "full_state_dict",
    "hash_ids",
    "load_checkpoint",
    "mark",
    "merge",
    "plan",
    "prefetch",
    "replace_embeddings",
    "save_checkpoint",
    "save_delta",
    "speedtorch",
    "summary",
    "table_parameters",
    "to_dense",
    "word2vec",
]


__getattr__ = lazy_names(
    __name__,
    __all__,
    ["tables", "nn", "ngrams", "memory_layers", "vocabulary", "checkpoint", "ranks", "planning.planner"],
    dict.fromkeys(("BlockMomentumAverager", "OneBitState", "one_bit_hook"), "examples/compressed_exchange.py"),
)


def __dir__() -> list[str]:
    return __all__
