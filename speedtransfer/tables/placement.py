"""Which rows of a table the rows of a saved one become, where the two need not have as many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speedtransfer.tables.chunks import row_chunks


class Placement:
    """Where the rows of a saved table go.

    Parameters
    ----------
    num_saved : int
        Rows of the saved table.
    sources, targets : Tensor, optional
        ``(n,)`` int64 on the CPU: some saved rows, ascending, and the row that each becomes, distinct. None: every row keeps
        its number.
    """

    def __init__(self, num_saved: int, sources: Tensor | None = None, targets: Tensor | None = None) -> None:
        self.num_saved, self._sources, self._targets = num_saved, sources, targets

    @property
    def is_whole(self) -> bool:
        """Whether every saved row keeps its number."""
        return self._sources is None

    def of_rows(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the saved `rows` go somewhere, by their places among these, and where; not if `is_whole`."""
        assert self._sources is not None
        assert self._targets is not None
        if isinstance(rows, slice):
            ends = torch.tensor([rows.start, rows.stop], device="cpu")
            first, last = torch.searchsorted(self._sources, ends).tolist()
            return self._sources[first:last] - rows.start, self._targets[first:last]
        places = torch.searchsorted(self._sources, rows).clamp(max=max(len(self._sources) - 1, 0))
        found = (self._sources[places] == rows).nonzero().flatten() if len(self._sources) else rows[:0]
        return found, self._targets[places[found]]

    def pairs(self, row_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield saved rows and what they become, for about 16 MB of rows each; not if it `is_whole`."""
        assert self._sources is not None
        assert self._targets is not None
        for part in row_chunks(len(self._sources), row_bytes):
            yield self._sources[part], self._targets[part]
