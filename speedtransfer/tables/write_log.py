"""Which rows of a table were written since: for rows that were read ahead of their use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MOST_WRITES = 1 << 10  # after so many a log forgets: the rows of a ticket that nobody has used by then are read anew


class WriteLog:
    """The rows of a table that were written since it was made; `Table.watch` makes it.

    The table tells it of each write of rows. Whatever else changes a plane (a write to a tensor over its memory, new planes)
    changes `Table.version` or the planes themselves, and then nothing is known of the rows.
    """

    __slots__ = ("__weakref__", "_ids", "_known", "_planes", "_version")

    def __init__(self, planes: Mapping[str, Tensor], version: int) -> None:
        self._planes, self._version, self._known, self._ids = dict(planes), version, True, list[Tensor]()

    def note(self, ids: Tensor, before: int, after: int) -> None:
        """Note a write of the rows `ids` (n,), and the version of the table before and after it."""
        if before != self._version or len(self._ids) == _MOST_WRITES:
            self.forget()
        if self._known:
            self._ids.append(ids)
        self._version = after

    def discount(self, before: int, after: int, count: int) -> None:
        """Note that `count` changes, from version `before` to `after`, were none of the rows."""
        if self._version == before and after == before + count:
            self._version = after

    def forget(self) -> None:
        """Note that any row may have been written."""
        self._known, self._ids = False, []

    def written(self, planes: Mapping[str, Tensor], version: int) -> Tensor | None:
        """Return the rows written, in any order, some maybe twice; None: any row may have been.

        Parameters
        ----------
        planes, version
            Those of the table now.
        """
        same = planes.keys() == self._planes.keys() and all(
            planes[name] is plane for name, plane in self._planes.items()
        )
        if not (self._known and same and version == self._version):
            return None
        return torch.cat(self._ids) if self._ids else torch.empty(0, dtype=torch.int64, device="cpu")
