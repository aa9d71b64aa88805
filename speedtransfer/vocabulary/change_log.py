"""Which ids were taken off, and when: for copies that follow a vocabulary."""

from __future__ import annotations

import os
from collections import deque

import numpy as np

# Ids that were taken off are remembered up to so many for each row of the table.
_LOGGED = 1.0


class ChangeLog:
    """The ids that were taken off, from a time of the clock on.

    Parameters
    ----------
    clock : int
        The time now; what was before is not known.

    Attributes
    ----------
    origin : int
        What tells this vocabulary from others whose changes a copy may follow.
    begins : int
        The first time of which all is known.
    gone : deque of (int, ndarray)
        Times and ids.
    """

    def __init__(self, clock: int) -> None:
        self.origin = int.from_bytes(os.urandom(7), "little")
        self.begins = clock + 1 if clock else 0
        self.gone: deque[tuple[int, np.ndarray]] = deque()
        self._num_gone = 0

    def add(self, ids: np.ndarray, clock: int, num_rows: int) -> None:
        """Note that `ids` (n,) were taken off now, and forget the first ones where these are too many for `num_rows`."""
        self.gone.append((clock, ids))
        self._num_gone += len(ids)
        while self._num_gone > max(_LOGGED * num_rows, len(ids)):
            at, dropped = self.gone.popleft()
            self._num_gone -= len(dropped)
            self.begins = at + 1
