"""Ids of several features as ids of one vocabulary: the feature in the highest bits, its id in the others."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class FeatureKeys:
    """The ids of a vocabulary, here called keys, for those of features that are numbered from 1 on.

    With 64 - b bits for an id, where b are enough for the number, the key of an id of feature n is ``(n << 64 - b) + id``
    modulo 2**64. Number 0 is that of no feature: of padding, and of rows without an id. Ids from ``-(1 << bits - 1)`` on and
    below ``1 << bits - 1`` have keys, where `bits` are those of an id.
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
        if ids.device.type == "cpu":
            # Negative ids are the largest unsigned ones.
            beyond = (ids.numpy() + np.int64(self.limit)).view(np.uint64) >= np.uint64(2 * self.limit)
            return int(beyond.argmax()) if beyond.any() else None
        over = (ids < -self.limit) | (ids >= self.limit)
        return int(over.reshape(-1).nonzero()[0]) if bool(over.any()) else None

    def split(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the features of keys (int64), and their ids there."""
        numbers = (keys + self.limit >> self.bits) & (1 << 64 - self.bits) - 1
        return numbers, keys - (numbers << self.bits)
