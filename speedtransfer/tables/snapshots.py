"""The rows of a table as they were at one moment, for a thread that reads them while others write."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.errors import StorageError
from speedtransfer.tables import clones
from speedtransfer.tables.aside import Aside, Scratch
from speedtransfer.tables.chunks import row_chunks
from speedtransfer.tables.unique import NOTHING, Known

# Longer than the rows of a step take to be written.
_STEP_S = 2.0


_made: weakref.WeakSet[Any] = weakref.WeakSet()


class Snapshot:
    """What a table held when this was made; `Planes.snapshot` makes it, `close` ends it.

    A row is copied aside before it is written for the first time. No lock is needed to read: whoever reads takes what is in
    the table first, and what has been copied aside, if anything, instead of it. Where there is no room aside any more, nor
    on the disk, the write waits for the end, as do changes of a plane as a whole.

    Parameters
    ----------
    table : Table
    most_bytes : int
        How much memory may be taken by what is copied aside.
    memory : dict of str to Tensor
        What rows of each plane are read into, one read after the other: others on the same thread may share it.
    scratch : Scratch, optional
        Where rows are copied to that have no room in memory.
    own : OwnRows, optional
        Of memory that processes share the rows that this one writes, which alone are read then.
    """

    # As `Table.writable`.
    writable = True

    def __init__(
        self, table: Any, most_bytes: int, memory: dict[str, Tensor], scratch: Scratch | None = None, own: Any = None
    ) -> None:
        self._table, self.device, self._memory, self._own = table, table.device, memory, own
        self._planes, self._version = dict(table._planes), table.version
        self._aside = Aside(self._planes, most_bytes, scratch)
        # Up to which row planes have been read, of those that are read once and in order.
        self._done = dict.fromkeys(self._planes, 0)
        # By row that is read, 1 + its place there; 0: it has not been written.
        size = table.num_rows if own is None else own.size
        self._places = np.zeros(size, np.int64 if size >= 2**30 else np.int32)
        self._whole, self._read, self._ended = True, threading.Event(), threading.Event()
        self._scratch, self._settled = scratch, False
        _made.add(self)

    @torch.no_grad()
    def keep(self, ids: Tensor, known: Known) -> None:
        """Copy those of the rows `ids` (n,), which are about to be written, aside that have not been written before."""
        check_not_capturing("a step while a checkpoint is saved in the background")
        self._whole &= self._table.version == self._version
        if self._read.is_set():
            return
        rows = (ids if known.host is None else known.host).cpu()
        needed = [name for name, done in self._done.items() if done < len(self._places)]
        # Without the padding.
        rows = rows[rows < self._table.num_rows]
        at = rows if self._own is None else self._own.places(rows)
        is_here = (at >= 0) & (at < len(self._places))
        # Another process, which reads the rows that are not, does not see this.
        self._whole &= bool(is_here.all())
        is_here &= at >= min(self._done.values())
        rows, at = rows[is_here], at[is_here]
        is_first = torch.from_numpy(self._places[at.numpy()] == 0)
        rows, at = rows[is_first], at[is_first]
        if not len(rows):
            return
        taken = self._aside.take(len(rows))
        if taken is None:
            self._read.wait()
        else:
            first, parts = taken
            stored = [self._planes[name] for name in needed]
            aside = [torch.from_numpy(parts[name]).view(self._planes[name].dtype) for name in needed]
            on_device = self.device.type != "cpu"
            out = [torch.empty_like(part, device=self.device) for part in aside] if on_device else aside
            self._table._engine.gather(stored, rows.to(self.device), out)
            if on_device:
                for part, values in zip(aside, out, strict=True):
                    part.copy_(values)
            # Last: from now on they are read there.
            self._places[at.numpy()] = np.arange(first + 1, first + 1 + len(rows))

    def written(self) -> None:
        """Note that the rows of the last `keep` have been written, and nothing else has changed."""
        self._version = self._table.version

    @property
    def planes(self) -> tuple[str, ...]:
        """The names of the planes that there were."""
        return tuple(self._planes)

    def discount(self, before: int, after: int, count: int) -> None:
        """Note that `count` changes, from version `before` to `after`, were none of the rows."""
        if self._version == before and after == before + count:
            self._version = after

    def read(self, ids: Tensor, planes: Sequence[str], known: Known = NOTHING) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), consecutive, on the host, of planes as they were stored, until the next read."""
        first = int(ids[0] if self._own is None else self._own.places(ids[:1])) if len(ids) else 0
        at = slice(first, first + len(ids))
        return {name: self._rows(name, at) for name in planes}

    def chunk(self, name: str, rows: slice) -> Tensor:
        """Return the rows ``rows.start`` to ``rows.stop`` of a plane as they were stored, on the host, for the last time.

        They are there until the next read. Of `own` rows these are their places.
        """
        values = self._rows(name, rows)
        self._done[name] = rows.stop
        return values

    def _rows(self, name: str, at: slice) -> Tensor:
        # NumPy has not all dtypes.
        plane = self._planes[name].view(torch.uint8)
        if plane.device.type == "cpu":
            # By NumPy, which leaves the other cores to those who train, and into memory that is there: new pages take as long.
            shape = (at.stop - at.start, plane.shape[1])
            if name not in self._memory or len(self._memory[name]) < shape[0] * shape[1]:
                self._memory[name] = torch.empty(shape[0] * shape[1], dtype=torch.uint8, device="cpu")
            values = self._memory[name][: shape[0] * shape[1]].view(shape)
            if self._own is None:
                np.copyto(values.numpy(), plane[at].numpy())
            else:
                torch.index_select(plane, 0, self._own.numbers(at.start, at.stop), out=values)
        else:
            values = plane[at].cpu()
        # After the table was read: a row that is written meanwhile is there by now. A copy, as others go on writing.
        places = self._places[at].copy()
        changed = places.nonzero()[0]
        if len(changed):
            values.numpy()[changed] = self._aside.get(name, places[changed] - 1)
        return values.view(self._planes[name].dtype)

    @torch.no_grad()
    def settle(self) -> None:
        """Have the rows in files of their own that share the bytes of the table's, so that nobody copies them aside, or waits.

        Where the file system has not that nothing changes.
        """
        if self._scratch is None or not clones.are_worth(sum(plane.nbytes for plane in self._planes.values())):
            return
        origins = {name: clones.origin_of(plane) for name, plane in self._planes.items()}
        found = {name: (self._planes[name], origin) for name, origin in origins.items() if origin is not None}
        if len(found) < len(origins):
            return
        with tempfile.TemporaryFile(dir=self._scratch.folder) as empty:
            if not all(clones.can_clone(empty.fileno(), origin) for _, origin in found.values()):
                return
        for _, (file, _) in found.values():
            # What has not reached the disk goes there first, while steps go on.
            os.fdatasync(file.number)
        # A step that waits for the end has the turn.
        if not self._table._turn.acquire(timeout=_STEP_S):
            return
        try:
            self.check()
            planes = clones.cloned(found, self._scratch.folder)
            if planes is None:
                return
            self.close()
        finally:
            self._table._turn.release()
        rows = self._places.nonzero()[0]
        for name, plane in planes.items():
            for part in row_chunks(len(rows), plane[:1].nbytes):
                values = self._aside.get(name, self._places[rows[part]] - 1)
                plane.view(torch.uint8).numpy()[rows[part]] = values
        self._planes, self._settled = planes, True
        self._places[:] = 0

    def settled(self, name: str) -> Tensor | None:
        """Return a plane as it was stored, in a file that does not change; None: `settle` could not do that."""
        return self._planes[name] if self._settled else None

    def let_go(self) -> None:
        """Copy nothing aside any more: all has been read."""
        self._read.set()

    def check(self) -> None:
        """Raise `StorageError` where a plane was changed, not by rows, since this was made: what was read is worth nothing."""
        if self._settled:
            return
        until = time.monotonic() + _STEP_S
        # Asked once: others go on writing, and at one moment none does.
        while (differs := self._table.version != self._version) and self._whole and time.monotonic() < until:
            time.sleep(0.001)
        same = all(self._table._planes.get(name) is plane for name, plane in self._planes.items())
        if differs or not (self._whole and same):
            raise StorageError(
                "the rows of a table were changed by other means than its methods and steps (a write to a view of all of "
                "them, state that an optimizer gave them first) while they were saved in the background; save again, without "
                "background=True where that is needed"
            )

    def wait(self) -> None:
        """Block until it is closed."""
        self._ended.wait()

    def close(self) -> None:
        """Let those go on who wait."""
        if self._table._snapshot is self:
            self._table._snapshot = None
        self._read.set()
        self._ended.set()


def _forget() -> None:
    # The thread that reads is one of the parent: a child would write what it copies aside to the same file, and wait for ever.
    for snapshot in list(_made):
        if snapshot._table._snapshot is snapshot:
            snapshot._table._snapshot = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
