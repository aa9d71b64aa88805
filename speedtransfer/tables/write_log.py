"""Which rows of a table were written since, and with what: for rows that were read ahead of their use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from speedtransfer.cuda import current_stream

_MOST_WRITES = 1 << 10  # after so many a log forgets: the rows of a ticket not used by then are read again
_MOST_KEPT = 8  # writes whose values a log keeps


class Write(NamedTuple):
    """A write of rows.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, in any order, maybe padded.
    rows : dict of str to Tensor, optional
        What was written by plane, ``(n, width)``, where somebody keeps it.
    """

    ids: Tensor
    rows: dict[str, Tensor] | None = None


class WriteLog:
    """The rows of a table that were written since it was made; `Table.watch` makes it.

    The table tells it of each write of rows. Whatever else changes a plane (a write to a tensor over its memory, new planes)
    changes `Table.version` or the planes themselves, and then nothing is known of the rows.
    """

    __slots__ = ("__weakref__", "_known", "_planes", "_stream", "_version", "_views", "_writes")

    def __init__(self, planes: Mapping[str, Tensor], version: int, views: int | None) -> None:
        self._planes, self._version, self._known = dict(planes), version, views is not None
        self._writes, self._views = list[Write](), views
        # That the writes of ids on a CUDA device come from, in the order of which they may be read.
        self._stream: int | None = None

    def note(self, write: Write, before: int, after: int) -> None:
        """Note a write, and the version of the table before and after it."""
        if before != self._version or len(self._writes) == _MOST_WRITES:
            self.forget()
        if self._known:
            self._writes.append(write)
            if len(self._writes) > _MOST_KEPT:
                old = len(self._writes) - 1 - _MOST_KEPT
                self._writes[old] = Write(self._writes[old].ids)
            if self._is_elsewhere(write):
                self.forget()
        self._version = after

    def discount(self, before: int, after: int, count: int) -> None:
        """Note that `count` changes, from version `before` to `after`, were none of the rows."""
        if self._version == before and after == before + count:
            self._version = after

    def forget(self) -> None:
        """Note that any row may have been written."""
        self._known, self._writes = False, []

    def _is_elsewhere(self, write: Write) -> bool:
        """Tell whether the current stream is not that of the writes; that of the first it is."""
        on_device = [part for part in (write.ids, *(write.rows or {}).values()) if part.is_cuda]
        if not on_device:
            return False
        stream = current_stream(on_device[0].device).cuda_stream
        self._stream = stream if self._stream is None else self._stream
        return stream != self._stream

    def written(self, planes: Mapping[str, Tensor], version: int, views: int | None) -> list[Write] | None:
        """Return the writes so far, in their order; None: any row may have been written.

        Parameters
        ----------
        planes, version, views
            Those of the table now; `OpenViews.sign`.
        """
        same = planes.keys() == self._planes.keys() and all(
            planes[name] is plane for name, plane in self._planes.items()
        )
        if not (self._known and same and version == self._version) or views is None or views != self._views:
            return None
        return None if any(map(self._is_elsewhere, self._writes)) else self._writes
