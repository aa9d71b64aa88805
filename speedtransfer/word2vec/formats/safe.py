"""Vectors as safetensors: the only format that holds any word at all, and that is mapped instead of read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors
import torch

from speedtransfer.errors import StorageError
from speedtransfer.safetensors_io import header_bytes, make_header
from speedtransfer.system import replace_file
from speedtransfer.tables import files
from speedtransfer.word2vec.formats.common import ROWS_AT_ONCE, Stored, encode


def write(path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None = None) -> None:
    """Write the tensors `vectors`, `word_ends`, `words` and, where there are counts, `counts`."""
    encoded = [encode(word) for word in words]
    ends = np.cumsum([len(word) for word in encoded], dtype="<i8")
    parts = [("vectors", torch.float32, matrix.shape), ("word_ends", torch.int64, ends.shape)]
    if counts is not None:
        parts.append(("counts", torch.int64, counts.shape))
    parts.append(("words", torch.uint8, (sum(map(len, encoded)),)))
    with replace_file(path) as file:
        file.write(header_bytes(make_header(parts, {"format": "speedtransfer word vectors 1"})))
        for start in range(0, len(words), ROWS_AT_ONCE):
            file.write(matrix[start : start + ROWS_AT_ONCE].astype("<f4", copy=False).tobytes())
        file.write(ends.tobytes())
        if counts is not None:
            file.write(counts.astype("<i8").tobytes())
        file.write(b"".join(encoded))


def read(path: Path, max_words: int | None = None) -> Stored:
    """Read what `write` wrote; the matrix is mapped, not read. Raises StorageError where it is damaged."""
    matrix, _ = files.open_mapped(path, writable=False, key="vectors")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            ends = file.get_tensor("word_ends")
            data = file.get_tensor("words").tobytes()
            counts = file.get_tensor("counts") if "counts" in file.keys() else None  # noqa: SIM118 (no mapping)
        if ends.ndim != 1 or ends.dtype != np.int64 or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError("word_ends are no rising positions")
        if len(data) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"the words take {len(data)} bytes but end elsewhere")
        words = [data[start:end].decode() for start, end in itertools.pairwise([0, *ends.tolist()])]
    except Exception as error:  # a damaged header makes the library raise whatever its parts do
        what = " ".join(str(error).split())
        raise StorageError(f"{str(path)!r} holds no words ({what}); get the file again") from error
    if len(words) != len(matrix):
        raise StorageError(f"{str(path)!r} holds {len(words)} words but {len(matrix)} vectors; get the file again")
    return Stored(words[:max_words], matrix.numpy()[:max_words], None if counts is None else counts[:max_words])
