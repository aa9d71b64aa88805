"""Hashes of the rows of a table, by which rows that differ are found, and sums of them, by which tables do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import INTEGER_OF_SIZE
from speedtransfer.jit import compiled_module, run_on_threads
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.mixing import GOLDEN, mix64

_COMPILED = "speedtransfer.checkpoint.numba_row_hash"


class Content(NamedTuple):
    """The hashes of the rows of a table, (n,) uint64, by their number; or in the order of `ids`, sorted."""

    hashes: np.ndarray
    ids: np.ndarray | None = None
    # The sum of the hashes of rows that belong to no id.
    reserved: int = 0

    @property
    def total(self) -> int:
        """What stands for all rows: a row that changes adds the difference of its hashes to it."""
        return (int(self.hashes.sum(dtype=np.uint64)) + self.reserved) % 2**64

    @property
    def keys(self) -> np.ndarray:
        """The ids, or the numbers of rows."""
        return np.arange(len(self.hashes)) if self.ids is None else self.ids

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Return the hashes of rows by key, 0 where there is no row."""
        if not len(self.hashes):
            return np.zeros(len(keys), np.uint64)
        at = np.minimum(keys if self.ids is None else np.searchsorted(self.ids, keys), len(self.hashes) - 1)
        return np.where((at if self.ids is None else self.ids[at]) == keys, self.hashes[at], np.uint64(0))


def reserved_sum(parts: Mapping[str, Tensor], fills: Mapping[str, float | None]) -> int:
    """Return the sum of the hashes of rows that belong to no id, all of them, as `hashes_of`: ``(n, width)`` by plane."""
    return total_of(hashes_of(np.arange(len(parts["weight"])), parts, fills))


def total_of(hashes: np.ndarray) -> int:
    """Return the sum of hashes, below 2**64."""
    return int(hashes.sum(dtype=np.uint64))


def hashes_of(keys: np.ndarray, parts: Mapping[str, Tensor], fills: Mapping[str, float | None]) -> np.ndarray:
    """Return a hash of each row, (n,) uint64, by its key and its bytes: ``(n, width)`` for each plane of `parts`.

    Those of a plane that are all its value in `fills` do not count: state may be made later, or in a copy only.
    """
    begun, total = mix64(keys.astype(np.uint64) + GOLDEN), np.zeros(len(keys), np.uint64)
    for rows in row_chunks(len(keys), sum(part[:1].nbytes for part in parts.values())):
        for name, part in parts.items():
            values, fill = part[rows].detach().cpu().contiguous(), fills[name]
            hashes = begun[rows] ^ np.uint64(zlib.crc32(name.encode()))
            _go_on(hashes, values)
            hashes = mix64(hashes)
            if fill is not None:
                new = torch.full((1, 1), fill, dtype=values.dtype, device="cpu")
                bits = INTEGER_OF_SIZE[values.dtype.itemsize]
                hashes[(values.view(bits) == new.view(bits)).all(1).numpy()] = 0
            total[rows] += hashes
    return total


def _go_on(hashes: np.ndarray, part: Tensor) -> None:
    """Go on with the hashes (n,) of rows by more of their values, ``(n, width)``."""
    values: Any = part.view(torch.uint8).numpy()
    whole = values.shape[1] // 8 * 8
    # Of rows that are not a multiple of 8 bytes long they are not aligned.
    words = np.ascontiguousarray(values[:, :whole]).view(np.uint64)
    for each in (words, values[:, whole:]):
        if each.shape[1]:
            run_on_threads([(compiled_module(_COMPILED).fold, (hashes, each))], len(hashes), each.nbytes, ())
