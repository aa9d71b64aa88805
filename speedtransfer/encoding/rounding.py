"""Random bits for stochastic rounding: a hash of what is rounded, and no generator whose state a run would have to carry.

The bits of a value depend on a seed, the number of writes before, the plane, the row and the column, and on nothing else: a
run can be repeated and resumed, and neither the order of the rows, nor the memory, nor the engine makes a difference. Integer
operations alone, which CPU and CUDA agree on to the bit.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
# The multipliers of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_FIRST, _MIX_SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # of a mix of 32-bit words (C. Wellons, "lowbias32")


def _signed(word: int) -> int:
    """Return a word of 64 bits as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    """Return SplitMix64's finalizer of a word."""
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31


def _hashed(ids: Tensor, key: int) -> Tensor:
    """Return 32 bits, as int32, for each of `ids` (n,) int64: the high half of the finalizer of ``key + id * golden``."""
    words = ids * _signed(_GOLDEN) + _signed(key)  # int64 wraps
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words = (words ^ (words >> shift & _WORD >> shift)) * _signed(factor)  # >> alone would copy the sign
    return (words ^ (words >> 31 & _WORD >> 31)).bitwise_right_shift(32).to(torch.int32)


def write_key(seed: int, count: int, plane: str) -> int:
    """Return the key of a write, 64 bits: planes are rounded independently.

    Parameters
    ----------
    seed : int
    count : int
        Of writes before this one.
    plane : str
        Whose rows are written.
    """
    return _mixed(_mixed((seed ^ zlib.crc32(plane.encode()) << 32) & _WORD) + count * _GOLDEN & _WORD)


@functools.lru_cache(maxsize=64)
def column_keys(width: int, device: torch.device) -> Tensor:
    """Return a key for each of `width` columns: ``(width,)`` int32."""
    with torch.inference_mode(False):
        # From the CPU, which is waited for once: other streams than the current one use them later.
        return _hashed(torch.arange(width, device="cpu"), _GOLDEN).to(device)


def random_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Return 32 bits for each pair of a row key (n, 1) and a column key (width,), ``(n, width)`` int32; use the high ones."""
    words = rows ^ columns
    words *= _MIX_FIRST
    words ^= (words >> 15).bitwise_and_((1 << 17) - 1)
    words *= _MIX_SECOND
    return words


class Keys(NamedTuple):
    """What random bits are made of: the key of a write and the ids (n,) of its rows."""

    write: int
    ids: Tensor

    @property
    def signed_write(self) -> int:
        """The key of the write as an int64."""
        return _signed(self.write)

    def rows(self, rows: slice) -> Tensor:
        """Return a key for each of some rows: ``(n, 1)`` int32."""
        return _hashed(self.ids[rows], self.write)[:, None]

    def bits(self, rows: slice, width: int) -> Tensor:
        """Return the bits of `width` columns of some rows, ``(n, width)``."""
        return random_bits(self.rows(rows), column_keys(width, self.ids.device))
