"""gensim's own files of `KeyedVectors`, written and read by gensim: a pickle, so read only files that you trust."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speedtransfer.errors import StorageError
from speedtransfer.system import replace_file
from speedtransfer.word2vec import gensim_bridge
from speedtransfer.word2vec.formats.common import Stored

check = gensim_bridge.import_gensim


def write(path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None = None) -> None:
    """Write one file, without the .npy files that gensim puts beside large ones when it is given a name."""
    keyed = gensim_bridge.to_keyed_vectors(list(words), matrix, counts)
    with replace_file(path) as file:
        keyed.save(file)


def read(path: Path, max_words: int | None = None) -> Stored:
    """Read what gensim saved: `KeyedVectors`, or a model that has them as `wv`. Raises StorageError where it cannot."""
    keyedvectors = gensim_bridge.import_gensim()
    try:
        loaded = keyedvectors.utils.SaveLoad.load(str(path))
        words, matrix, counts = gensim_bridge.from_keyed_vectors(loaded)
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror or error}); check the path") from error
    except Exception as error:  # a damaged pickle raises anything
        what = " ".join(str(error).split()) or type(error).__name__
        raise StorageError(f"{str(path)!r} holds no gensim KeyedVectors ({what}); get the file again") from error
    return Stored(words[:max_words], matrix[:max_words], None if counts is None else counts[:max_words])
