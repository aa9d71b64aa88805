"""Embedding tables larger than GPU memory, trained with any row-by-row ``torch.optim`` optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedtransfer.lazy import lazy_names
from speedtransfer.version import __version__

if TYPE_CHECKING:
    from speedtransfer import errors, speedtorch, word2vec
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
    from speedtransfer.planning.planner import plan
    from speedtransfer.ranks.averaging import BlockMomentumAverager
    from speedtransfer.ranks.comm_hooks import OneBitState, one_bit_hook
    from speedtransfer.ranks.equal_steps import equal_steps
    from speedtransfer.tables import Table, TableStats
    from speedtransfer.vocabulary import Changes, Vocabulary, VocabularyStats, hash_ids

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
    "plan",
    "prefetch",
    "replace_embeddings",
    "save_checkpoint",
    "speedtorch",
    "summary",
    "table_parameters",
    "to_dense",
    "word2vec",
]


__getattr__ = lazy_names(
    __name__, __all__, ["tables", "nn", "ngrams", "vocabulary", "checkpoint", "ranks", "planning.planner"]
)


def __dir__() -> list[str]:
    return __all__
