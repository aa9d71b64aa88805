"""An engine around an engine: the rows used most stay on the compute device, and go to their planes when these are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing, current_stream, keep_until_done, to_device
from speedtransfer.engines.base import Engine, KernelEngine, Queue, check_apart, check_host_index
from speedtransfer.engines.cache_kernels import COUNTERS, are_suitable, move, update
from speedtransfer.engines.cache_moves import Reading, existing, write_through
from speedtransfer.engines.cache_policy import NO_ROW, CachePolicy
from speedtransfer.engines.cache_slots import Ahead, Slots, close


class CachedEngine:
    """Keeps some rows on the compute device, as they are stored, and has another engine move the others.

    A row is kept when it is first gathered or scattered, in the slots of each plane by itself, and written to the planes
    when it leaves or when somebody waits: `wait` means that the host may read and write the planes, so that all rows are
    written back and forgotten. Rows are the same bits as without a cache.

    Writes to planes by torch are noticed by their versions. What NumPy or another library writes to the memory is not: call
    `shrink` before it gets that.

    On a CUDA device events order all calls between streams, and the host waits for none of them, except for what the inner
    engine or the policy waits for. In a CUDA graph nothing can be captured. On the CPU rows are read from the planes without
    the lock, so that threads which read ahead wait for pages of files at the same time.

    Parameters
    ----------
    inner : Engine
    policy : CachePolicy
        Chooses the rows.
    capacity : int
        How many rows; there are fewer where their memory cannot be had.
    ahead : callable, optional
        Has the pages of rows of planes read at once; it takes planes and ids on the host.
    at_exit : bool
        Write rows back when the process ends as well: the planes are a file.
    """

    name = "cached"

    def __init__(
        self, inner: Engine, policy: CachePolicy, capacity: int, ahead: Ahead | None = None, at_exit: bool = False
    ) -> None:
        self.device, self.takes_padding, self._policy = inner.device, inner.takes_padding, policy
        with torch.inference_mode(False), torch.no_grad():
            self.slots = Slots(inner, policy.choose(capacity), ahead)
            # Hits, their bytes, misses and their bytes.
            self._counts = torch.zeros((COUNTERS, 4), dtype=torch.int64, device=self.device)
            # The first turn on another stream waits for what was queued here.
            with self.slots.turn():
                pass
        weakref.finalize(self, close, self.slots).atexit = at_exit

    @property
    def inner(self) -> Engine:
        """The engine that moves the other rows; another may take its place after `wait`."""
        return self.slots.inner

    @inner.setter
    def inner(self, inner: Engine) -> None:
        self.slots.inner, self.takes_padding = inner, inner.takes_padding

    @property
    def capacity(self) -> int:
        """Number of rows that can be kept."""
        return self.slots.capacity

    @torch.no_grad()
    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        self._check_not_capturing()
        if check is True and index.device.type == "cpu":
            check_host_index(index, planes)
            check = False
        wide = [number for number, plane in enumerate(planes) if plane.shape[1]]
        if not wide or not len(index) or not len(planes[0]):
            self.inner.gather(planes, index, rows, check, unsorted)
            return
        ids = to_device(index, self.device)
        if check is not False:
            # The index as it is, so that the error says where in it a row is out of range.
            check_apart(self.inner, planes, ids if check is True else check)
        some, found = [planes[number] for number in wide], [rows[number] for number in wide]
        self._with_less_memory(lambda: self._gather(some, ids, found, unsorted))
        self._keep((index, *rows))

    @torch.no_grad()
    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``, or to their slots."""
        self._check_not_capturing()
        wide = [number for number, plane in enumerate(planes) if plane.shape[1]]
        if not wide or not len(index) or not len(planes[0]):
            # Not by the inner engine: it might change the version of a plane, without changing anything.
            return
        ids = to_device(index, self.device)
        some, given = [planes[number] for number in wide], [rows[number].detach() for number in wide]

        def write() -> None:
            with self.slots.turn():
                write_through(self.slots, some, ids, given, unsorted)

        self._with_less_memory(write)
        self._keep((index, *rows))

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels can read and write the rows, in their slots and in the planes."""
        return self.slots.inner.runs_kernels

    @torch.no_grad()
    def update(self, planes: Sequence[Tensor], ids: Tensor, read: Sequence[bool], queue: Queue) -> None:
        """Let `queue` queue kernels that read and write rows; see `KernelEngine`."""
        self._check_not_capturing()
        slots = self.slots

        def change() -> None:
            with slots.turn():
                slots.notice()
                slots.epoch += 1
                if are_suitable(slots, planes, planes):
                    update(slots, planes, ids, read, queue, self._counts)
                else:
                    cast(KernelEngine, slots.inner).update(planes, ids, read, queue)

        self._with_less_memory(change)

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until the planes are up to date, and done with; see `Engine`."""
        self._check_not_capturing()
        self.slots.wait(writes_only)

    @torch.no_grad()
    def shrink(self, capacity: int) -> None:
        """Keep no more than `capacity` rows from now on, and give the memory of the others back."""
        with self.slots.turn():
            self.slots.notice()
            if capacity < self.capacity:
                with torch.inference_mode(False):
                    self.slots.reset(self._policy.choose(capacity))

    @torch.no_grad()
    def release(self, plane: Tensor) -> None:
        """Give the slots of `plane` back, after `wait`: nothing will ask for it again."""
        with self.slots.turn():
            self.slots.release(plane)

    def counts(self) -> dict[str, int]:
        """Return what was gathered so far, by its name in `TableStats`: hits and misses are all rows gathered."""
        with self.slots.turn():
            hits, hit_bytes, misses, miss_bytes = self._counts.sum(0).tolist()
        names = "cache_hits", "cache_misses", "cache_hit_bytes", "cache_miss_bytes"
        return dict(zip(names, (hits, misses, hit_bytes, miss_bytes), strict=True))

    def reset_counts(self) -> None:
        """Count anew."""
        with self.slots.turn():
            self._counts.zero_()

    def _gather(self, planes: list[Tensor], ids: Tensor, rows: list[Tensor], unsorted: bool) -> None:
        slots = self.slots
        with slots.turn():
            slots.notice()
            if are_suitable(slots, planes, rows):
                seen = torch.empty_like(ids)
                move(slots, "gather", planes, ids, rows, unsorted, seen, self._counts)
                self._choose(seen)
                return
            reading = Reading(slots, planes, ids, rows) if slots.may_have(ids) else None
            if slots.order is not None and reading is not None:
                reading.fetch(unsorted)
                self._finish(reading)
        if reading is None:
            if slots.ahead is not None and ids.device.type == "cpu":
                slots.ahead(planes, ids)
            self.inner.gather(planes, ids, rows, unsorted=unsorted)
            with slots.turn():
                exists = existing(ids, planes[0])
                self._count(torch.zeros_like(exists), exists, planes)
                self._choose(torch.where(exists, ids, NO_ROW))
        elif slots.order is None:
            reading.fetch(unsorted)
            with slots.turn():
                self._finish(reading)

    def _finish(self, reading: Reading) -> None:
        reading.keep()
        self._count(reading.exists & ~reading.missing, reading.missing, reading.planes)
        self._choose(torch.where(reading.exists, reading.ids, NO_ROW))

    def _count(self, hit: Tensor, missing: Tensor, planes: list[Tensor]) -> None:
        row_bytes = sum(plane.shape[1] * plane.element_size() for plane in planes)
        rows = torch.stack((hit.sum(), missing.sum()))
        self._counts[0, ::2].add_(rows)
        self._counts[0, 1::2].add_(rows, alpha=row_bytes)

    def _choose(self, seen: Tensor) -> None:
        """Let the policy see the rows (n,) that were gathered, and choose the rows anew where it is time."""
        if self.capacity and self._policy.saw(seen):
            with torch.inference_mode(False):
                self.slots.notice()
                self.slots.place(self._policy.choose(self.capacity))

    def _with_less_memory(self, call: Callable[[], None]) -> None:
        """Make a call that may be made again, with half of the slots as often as the device has no memory for it."""
        while True:
            try:
                call()
                return
            except torch.OutOfMemoryError:
                if not self.capacity:
                    raise
            # Here, where the call and its tensors are gone.
            self.shrink(self.capacity // 2)

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        if self.slots.order is not None:
            keep_until_done(tensors, current_stream(self.device))

    def _check_not_capturing(self) -> None:
        if self.slots.order is not None:
            check_not_capturing("moving rows of a table with a cache", "make it without cache_rows")
