"""Which rows a cache has slots for, and what the planes of the table lack of them."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from speedtransfer.cuda import StreamOrder, current_stream, keep_until_done
from speedtransfer.engines.base import Engine, leaves_faults
from speedtransfer.engines.cache_planes import PlaneSlots, new_values
from speedtransfer.errors import InvalidValueError

_CHUNK_BYTES = 1 << 24  # written back at a time: a cache gives memory back when there is little left

Ahead = Callable[[Sequence[Tensor], Tensor], None]


class Slots:
    """Slots for some rows of all planes of a table.

    Parameters
    ----------
    inner : Engine
        Moves rows to and from the planes.
    ids : Tensor
        ``(capacity,)`` int64 on the compute device, sorted: the rows that have a slot.
    ahead : callable, optional
        Has the pages of rows of planes read at once; it takes planes and ids on the host.
    """

    def __init__(self, inner: Engine, ids: Tensor, ahead: Ahead | None = None) -> None:
        self.inner, self.device, self.ahead = inner, inner.device, ahead
        self.order = StreamOrder(self.device) if self.device.type == "cuda" else None
        # Grows with everything that makes rows old which were read from the planes before.
        self.epoch = 0
        self.process = os.getpid()
        # What others than threads that read ahead have still to be told.
        self.untold = ""
        self._lock = threading.Lock()
        self._parts: dict[tuple[object, ...], PlaneSlots] = {}
        # The rows, sorted, and their slots.
        self.map = ids, torch.arange(len(ids), device=self.device)
        _live.add(self)

    @property
    def capacity(self) -> int:
        """Number of rows that have a slot."""
        return len(self.map[0])

    def turn(self) -> AbstractContextManager[object]:
        """Keep other threads, and other streams of the device, from the slots."""
        # No generator: what is interrupted between it and the block would keep the lock until its traceback goes.
        return self._lock if self.order is None else self.order.writing()

    @torch.no_grad()
    def wait(self, writes_only: bool = False) -> None:
        """Block the host until the planes have all rows, and are done with; forget the rows unless `writes_only`."""
        with self.turn():
            self.notice()
            self.write_back()
            if not writes_only:
                self.forget()
        if self.order is not None:
            self.order.wait(writes_only)
        self.inner.wait(writes_only)

    # All of the following, only in a turn.

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of `ids` (n,), and which have one; for others the slot that may be written to."""
        cached, slots = self.map
        at = torch.searchsorted(cached, ids).clamp_(max=len(cached) - 1)
        known = cached[at] == ids
        return torch.where(known, slots[at], len(cached)), known

    def may_have(self, ids: Tensor) -> bool:
        """Tell whether any of `ids` (n,) may have a slot: on the host, whether one has."""
        if not self.capacity:
            return False
        return ids.device.type != "cpu" or bool(self.find(ids)[1].any())

    def of(self, plane: Tensor) -> PlaneSlots:
        """Return the slots of `plane`, which are made when it is first asked for; OutOfMemoryError: there is no room."""
        key = plane.data_ptr(), plane.stride(0), tuple(plane.shape), plane.dtype
        part = self._parts.get(key)
        if part is None:
            # An inference tensor could not be written to later.
            with torch.inference_mode(False):
                part = PlaneSlots(plane, new_values(self.capacity + 2, plane, self.device))
            self._parts[key] = part
        return part

    def notice(self) -> None:
        """Forget rows of planes that were written to since.

        Raises
        ------
        InvalidValueError
            There were rows that the planes lacked; they have been written back. If a thread finds out that reads ahead, and
            reports to nobody, the next call of another raises it as well.
        """
        changed = [part for part in self._parts.values() if part.plane._version != part.version]
        if changed:
            lost = max(int((part.dirty & part.valid).sum()) if part.written else 0 for part in changed)
            self.write_back()
            self.forget()
            for part in self._parts.values():
                part.version = part.plane._version
            if lost:
                self.untold = (
                    f"a view of the table was written to while its cache held {lost} newer rows, which have now replaced what "
                    "was written to them there; call table.wait() before writing to a view, or write by table[ids] = rows"
                )
        if self.untold:
            message = self.untold
            if not leaves_faults():
                self.untold = ""
            elif not changed:
                return
            raise InvalidValueError(message)

    def loses_changes(self) -> bool:
        """Tell whether `notice` would raise."""
        return any(part.written and part.plane._version != part.version for part in self._parts.values())

    def write_back(self, only: Tensor | None = None) -> None:
        """Write rows that the planes lack to them: all, or those of slots where `only` (capacity + 2,) says so."""
        for part in self._parts.values():
            if part.written:
                named = part.dirty & part.valid & (True if only is None else only)
                self._write_back(part, named)
                part.written = only is not None

    def _write_back(self, part: PlaneSlots, named: Tensor) -> None:
        ids, slots = self.map
        rows = named[slots].nonzero().flatten()
        row_bytes = part.plane.shape[1] * part.plane.element_size()
        for chunk in rows.split(max(1, _CHUNK_BYTES // row_bytes)) if len(rows) else ():
            there, places = ids[chunk], slots[chunk]
            if self.ahead is not None:
                self.ahead([part.plane], there.cpu())
            values = torch.empty((len(chunk), part.plane.shape[1]), dtype=part.plane.dtype, device=self.device)
            part.read(places, values)
            # By a tensor that counts changes by itself: what is written back was no change of the table.
            self.inner.scatter([part.plane.data], there, [values])
            part.dirty.index_fill_(0, places, False)

    def forget(self) -> None:
        """Forget all rows: somebody may write to the planes. What they lack must have been written back."""
        self.epoch += 1
        for part in self._parts.values():
            if part.used:
                part.valid.zero_()
                part.used = False

    def place(self, ids: Tensor) -> None:
        """Give slots to the rows `ids`, (capacity,) sorted. Rows that have one keep it, others leave."""
        before, slots = self.map
        if torch.equal(before, ids):
            return
        at = torch.searchsorted(before, ids).clamp_(max=len(before) - 1)
        # Where there are fewer rows than slots several have no row, NO_ROW, the last of all numbers.
        stay = (before[at] == ids) & (ids != torch.iinfo(torch.int64).max)
        free = torch.ones(len(ids) + 2, dtype=torch.bool, device=self.device)
        free[-2:] = False
        free[slots[at[stay]]] = False
        chosen = slots[at]
        chosen[~stay] = free.nonzero().flatten()
        self.write_back(free)
        self.epoch += 1
        for part in self._parts.values():
            part.valid &= ~free
        if self.order is not None:
            # Of a turn on another stream, perhaps.
            keep_until_done(self.map, current_stream(self.device))
        self.map = ids, chosen

    def reset(self, ids: Tensor | None) -> None:
        """Give slots to the rows `ids`, any number or none, and the memory of the slots so far back."""
        self.write_back()
        self._done()
        self._parts = {}
        ids = self.map[0][:0] if ids is None else ids
        self.map = ids, torch.arange(len(ids), device=self.device)

    def release(self, plane: Tensor) -> None:
        """Give the slots of `plane` back, which has all rows."""
        self._done()
        self._parts = {key: part for key, part in self._parts.items() if part.plane is not plane}

    def _done(self) -> None:
        """Wait until nothing uses the memory of slots any more, on any stream: this one waits for the others in its turn."""
        if self.order is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def abandon(self) -> None:
        """Have no slots, in a forked process: its parent writes their rows back, and threads of it may have held the lock."""
        # Kept: it may be memory of a CUDA device, which only the parent has.
        self._of_parent, self._parts = self._parts, dict[tuple[object, ...], PlaneSlots]()
        self._lock = threading.Lock()
        self.map = self.map[0][:0], self.map[1][:0]


_live: weakref.WeakSet[Slots] = weakref.WeakSet()


def close(slots: Slots) -> None:
    """Write back what the slots of a cache that goes still have."""
    # In a forked child its parent does; other errors mean that the process is being shut down.
    if slots.process == os.getpid():
        with contextlib.suppress(Exception), torch.no_grad():
            with slots.turn():
                lost = slots.loses_changes()
                slots.reset(None)
            slots.inner.wait()
            if lost:
                warnings.warn(
                    "a view of a table was written to while its cache held newer rows, which replaced what was written there "
                    "when the table went; call table.wait() before writing to a view",
                    stacklevel=2,
                )


def _before_fork() -> None:
    """Write all rows back: the child sees the planes only."""
    for slots in list(_live):
        try:
            slots.wait(writes_only=True)
        except Exception as error:
            slots.untold = str(error) if isinstance(error, InvalidValueError) else ""


def _in_child() -> None:
    for slots in list(_live):
        slots.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
