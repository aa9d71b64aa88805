"""Ids of 64 bits: any integers, as int64 with the same bits; those of a lookup, for the host; those of several features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_host
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import refuse_layout
from speedtransfer.tables.index import INTEGERS, ints_of


def as_ids(ids: Any) -> Tensor:
    """Return ids as a contiguous int64 tensor of their shape, on their device; anything but a tensor becomes one on the CPU.

    An id of uint64 from 2**63 on is the negative id of the same 64 bits. InvalidTypeError: they are not integers (bool does
    not count as one). InvalidValueError: one has more than 64 bits, or they are ragged.
    """
    tensor = ids.detach() if isinstance(ids, Tensor) else torch.from_numpy(_array_of(ids))
    if tensor.dtype not in INTEGERS:
        raise InvalidTypeError(
            f"ids has dtype {tensor.dtype} but ids are integers of 64 bits; pass ids.long(), or st.hash_ids(strings)"
        )
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        refuse_layout(tensor, "ids")
    tensor = tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)
    return tensor.contiguous()


def _array_of(ids: Any) -> np.ndarray:
    """Return a sequence of ints as an int64 array, with the bits of those from 2**63 on."""
    array = ints_of(ids, "ids", "ids are integers of 64 bits; pass integers, or st.hash_ids(strings)")
    if array.dtype.kind != "O":
        return array.astype(np.int64, order="C")
    for value in array.flat:
        if not -(2**63) <= value < 2**64:
            raise InvalidValueError(f"ids holds {value} but ids have 64 bits; pass values from -2**63 to 2**64 - 1")
    bits = [int(value) & (2**64 - 1) for value in array.flat]
    return np.array(bits, dtype=np.uint64).view(np.int64).reshape(array.shape)


class NotedIds:
    """The ids of a lookup, (n,) int64, which the host has or will have soon, and their rows, -1 where there is none.

    The ids are copied from any device; None: only the rows are of interest. Rows that are not given `Vocabulary.noted_rows`
    finds. The clock is that of the vocabulary then.
    """

    def __init__(self, ids: Tensor | None, rows: np.ndarray | None = None, clock: int = 0) -> None:
        self._ids, self._there, self.rows, self.clock = ids, None, rows, clock
        if ids is not None:
            self._ids, self._there = to_host(ids) if ids.is_cuda else (ids.clone(), None)

    @property
    def ids(self) -> np.ndarray:
        """On the host, which waits for them if they are on their way."""
        if self._there is not None:
            self._there.synchronize()
            self._there = None
        assert self._ids is not None
        return self._ids.numpy()


class FeatureKeys:
    """The ids of a vocabulary, here called keys, for those of features that are numbered from 1 on.

    The feature is in the highest bits: with 64 - b bits for an id, where b are enough for the number, the key of an id of
    feature n is ``(n << 64 - b) + id`` modulo 2**64. Number 0 is that of no feature: of padding, and of rows without an id.
    Ids from ``-(1 << bits - 1)`` on and below ``1 << bits - 1`` have keys, where `bits` are those of an id.
    """

    # Of the padding of all features.
    PADDING = 0

    def __init__(self, count: int) -> None:
        self.bits = 64 - max(count, 1).bit_length()

    @property
    def limit(self) -> int:
        """The first id that has no key."""
        return 1 << self.bits - 1

    def start(self, number: int) -> int:
        """Return the key of id 0 of a feature."""
        start = number << self.bits
        return start if start < 1 << 63 else start - (1 << 64)

    def first_beyond(self, ids: Tensor) -> int | None:
        """Return the first flat position of ids (int64) that have no key; the host waits for those on a device."""
        over = (ids < -self.limit) | (ids >= self.limit)
        return int(over.reshape(-1).nonzero()[0]) if bool(over.any()) else None

    def split(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the features of keys (int64), and their ids there."""
        numbers = (keys + self.limit >> self.bits) & (1 << 64 - self.bits) - 1
        return numbers, keys - (numbers << self.bits)
