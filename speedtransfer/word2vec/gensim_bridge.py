"""Words and vectors to and from gensim's `KeyedVectors`."""

from __future__ import annotations

from typing import Any

import numpy as np

from speedtransfer.errors import InvalidTypeError
from speedtransfer.word2vec.extras import import_extra


def import_gensim() -> Any:
    """Return gensim's module of `KeyedVectors`. Raises MissingPackageError where gensim is not installed."""
    return import_extra("gensim.models.keyedvectors", "KeyedVectors and .kv files", "gensim")


def to_keyed_vectors(words: list[str], matrix: np.ndarray, counts: np.ndarray | None) -> Any:
    """Return `KeyedVectors` over the same memory as `matrix` (float32); counts are its attribute "count"."""
    keyed = import_gensim().KeyedVectors(matrix.shape[1])
    # Set at once: `add_vectors` copies the matrix and goes through the words one by one.
    keyed.index_to_key = list(words)
    keyed.key_to_index = {word: row for row, word in enumerate(words)}
    keyed.vectors = matrix
    keyed.next_index = len(words)
    if counts is not None:
        keyed.expandos["count"] = counts.copy()
    return keyed


def from_keyed_vectors(keyed: Any) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Return words, vectors and counts (None without) of `KeyedVectors`, or of a model that has them as `wv`.

    Raises
    ------
    InvalidTypeError
        It is neither, or its keys are no words (vectors of numbered documents).
    """
    keyed = getattr(keyed, "wv", keyed)
    if not isinstance(keyed, import_gensim().KeyedVectors):
        raise InvalidTypeError(
            f"{type(keyed).__name__} is no gensim KeyedVectors and has none as `wv`; pass gensim's model.wv"
        )
    words = list(keyed.index_to_key)
    odd = next((word for word in words if not isinstance(word, str)), None)
    if odd is not None:
        raise InvalidTypeError(f"key {odd!r} is no word (str) but {type(odd).__name__}; pass KeyedVectors of words")
    counts = keyed.expandos.get("count")
    return words, keyed.vectors, None if counts is None else np.asarray(counts)
