"""The ids of a lookup and their rows, for the host: there, or on their way."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from speedtransfer.cuda import to_host


class NotedIds:
    """The ids of a lookup, which the host has or will have soon, and their rows.

    Parameters
    ----------
    ids : Tensor, optional
        ``(n,)`` int64, on any device; copied. None: only the rows are of interest.
    rows : ndarray, optional
        ``(n,)`` int64, -1 where there is none; by default `Vocabulary.noted_rows` finds them.
    clock : int
        That of the vocabulary then.
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
