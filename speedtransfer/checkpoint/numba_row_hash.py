"""Compile with numba a hash of the bytes of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from speedtransfer.jit import compile_function

# An odd number, so that a product with it loses nothing: rows that differ in one word have other hashes for certain.
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_32 = np.uint64(32)


@compile_function
def fold(hashes: Any, words: Any, start: int, stop: int) -> None:
    """Go on with the hashes (n,) uint64 of rows by more of their words, ``(n, width)`` of any unsigned integers."""
    for row in range(start, stop):
        found = hashes[row]
        for column in range(words.shape[1]):
            found = (found ^ np.uint64(words[row, column])) * _FACTOR
            found ^= found >> _32
        hashes[row] = found
