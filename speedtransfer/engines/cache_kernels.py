"""Rows on their way through a cache by kernels: where the inner engine lets these reach its planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, launch_over
from speedtransfer.engines.base import CachedRows, KernelEngine, Queue, ascending
from speedtransfer.engines.cache_slots import Slots

COUNTERS = 256  # as in cache.cu
_MAX_PLANES = 12
# struct Cached of cache.cu
_CACHED = KernelArgument(f"{13 + 8 * _MAX_PLANES}q")
_SORT_ROWS = 4096  # from as many on, the order of the table is worth a sort


def are_suitable(slots: Slots, planes: Sequence[Tensor], rows: Sequence[Tensor]) -> bool:
    """Tell whether `move` can move such rows: as many bits as they have in the planes."""
    suits = slots.capacity > 0 and slots.inner.runs_kernels and len(planes) <= _MAX_PLANES
    return suits and all(plane.dtype == part.dtype for plane, part in zip(planes, rows, strict=True))


def move(
    slots: Slots,
    direction: str,
    planes: Sequence[Tensor],
    ids: Tensor,
    rows: Sequence[Tensor],
    unsorted: bool,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Gather or scatter the rows `ids` (n,) of `planes`; all in a turn of the slots.

    Parameters
    ----------
    slots : Slots
    direction : {"gather", "scatter"}
    planes, rows : sequence of Tensor
        ``(num_rows, width_i)`` and ``(n, width_i)``, with columns.
    ids : Tensor
        ``(n,)`` on the compute device; some may be of no row.
    unsorted : bool
        Whether they may be in any order.
    seen : Tensor, optional
        ``(n,)`` int64: becomes those of `ids` that are rows, in any order, and NO_ROW in place of others.
    counts : Tensor, optional
        ``(COUNTERS, 4)`` int64: hits, their bytes, misses and their bytes are added to it.
    """
    places = None
    if unsorted and len(ids) >= _SORT_ROWS:
        ids, places = ascending(ids, len(planes[0]))
    found, lanes, argument = _argument(slots, planes, ids, rows, direction == "scatter", places, seen, counts)

    def queue(_: CachedRows | None) -> list[Tensor]:
        launch_over(len(ids), "cache.cu", "find_slots", slots.device, argument)
        name, count, on_host = f"{direction}_cached", len(ids) * lanes, not planes[0].is_cuda
        launch_over(count, "cache.cu", name, slots.device, argument, on_host)
        return [ids, found, *rows, *([] if places is None else [places])]

    cast(KernelEngine, slots.inner).update(planes, ids, (), queue)


def update(
    slots: Slots, planes: Sequence[Tensor], ids: Tensor, read: Sequence[bool], queue: Queue, counts: Tensor
) -> None:
    """Let `queue` change the rows `ids` (n,) of `planes` where they are; as `KernelEngine.update`, in a turn of the slots.

    `counts` is as for `move`, of the planes that are `read`.
    """
    found, _, argument = _argument(slots, planes, ids, None, True, counts=counts if any(read) else None, counted=read)
    parts = [slots.of(plane) for plane in planes]
    pointers = [(part.values.data_ptr(), part.valid.data_ptr(), part.dirty.data_ptr()) for part in parts]

    def find_and_queue(_: CachedRows | None) -> list[Tensor]:
        launch_over(len(ids), "cache.cu", "find_slots", slots.device, argument)
        return [ids, found, *queue(CachedRows(found, pointers))]

    cast(KernelEngine, slots.inner).update(planes, ids, read, find_and_queue)


def _argument(
    slots: Slots,
    planes: Sequence[Tensor],
    ids: Tensor,
    rows: Sequence[Tensor] | None,
    written: bool,
    places: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    counted: Sequence[bool] | None = None,
) -> tuple[Tensor, int, np.ndarray]:
    """Return memory for what find_slots finds, the lanes of the widest row, and the argument of the kernels."""
    parts = [slots.of(plane) for plane in planes]
    found, (cached, own) = torch.empty_like(ids), slots.map
    words, lanes = list[int](), 0
    for number, (plane, part) in enumerate(zip(planes, parts, strict=True)):
        part.used, part.written = True, part.written or written
        item, dense = plane.element_size(), 0 if rows is None else rows[number].data_ptr()
        row_bytes, stride = plane.shape[1] * item, plane.stride()[0] * item
        # The widest lane that divides every address: the lowest bit that any of them has.
        bits = plane.data_ptr() | dense | part.values.data_ptr() | row_bytes | stride | 16
        lane = bits & -bits
        lanes = max(lanes, row_bytes // lane)
        words += plane.data_ptr(), dense, part.values.data_ptr(), part.valid.data_ptr(), part.dirty.data_ptr()
        words += stride, row_bytes // lane, lane
    some = [number for number in range(len(planes)) if counted is None or counted[number]]
    row_bytes = sum(planes[number].shape[1] * planes[number].element_size() for number in some)
    others = [0 if tensor is None else tensor.data_ptr() for tensor in (places, seen, counts)]
    argument = _CACHED.pack(
        *(ids.data_ptr(), len(ids), len(planes[0]), cached.data_ptr(), own.data_ptr(), len(cached), found.data_ptr()),
        *(*others, sum(1 << number for number in some), row_bytes, len(planes), *words),
        *[0] * (8 * (_MAX_PLANES - len(planes))),
    )
    return found, lanes, argument
