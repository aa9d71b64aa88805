"""Scramble 64-bit integers: every bit of the result depends on every bit of the number, the same in NumPy and in numba."""

from __future__ import annotations

from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: multiples of it are spread evenly
_FIRST, _SECOND = np.uint64(0x3C79AC492BA7B653), np.uint64(0x1C69B3F74AC4AE35)  # Pelle Evensen's "moremur"
_27, _33 = np.uint64(27), np.uint64(33)


def mix64(x: Any) -> Any:
    """Return a permutation of the 64-bit integers, applied to each of `x`: a uint64 array of one dimension or more.

    numba compiles it for scalars. Not for secrets: who knows the function can choose numbers with results of any pattern.
    """
    x = x ^ (x >> _27)
    x = x * _FIRST
    x = x ^ (x >> _33)
    x = x * _SECOND
    return x ^ (x >> _27)


def owners_of(ids: np.ndarray, ranks: int) -> np.ndarray:
    """Return which of `ranks` processes has each id, (n,) int64 for (n,) int64: for good, checkpoints rely on it."""
    return (mix64(np.ascontiguousarray(ids).view(np.uint64)) % np.uint64(ranks)).astype(np.int64)
