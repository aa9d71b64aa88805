"""Rows on their way through a cache by two kernels: where the inner engine lets kernels reach its planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, launch_over
from speedtransfer.engines.base import KernelEngine
from speedtransfer.engines.cache_slots import Slots

COUNTERS = 256  # as in cache.cu
_MAX_PLANES = 12
# struct Cached of cache.cu
_CACHED = KernelArgument(f"{12 + 8 * _MAX_PLANES}q")
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
    parts = [slots.of(plane) for plane in planes]
    places = None
    if unsorted and len(ids) >= _SORT_ROWS:
        ids, places = ids.sort()
    found, (cached, own) = torch.empty_like(ids), slots.map
    words, lanes = list[int](), 0
    for plane, part, dense in zip(planes, parts, rows, strict=True):
        part.used, part.written = True, part.written or direction == "scatter"
        item, pointers = plane.element_size(), (plane.data_ptr(), dense.data_ptr(), part.values.data_ptr())
        row_bytes, stride = plane.shape[1] * item, plane.stride()[0] * item
        # The widest lane that divides every address: the lowest bit that any of them has.
        bits = pointers[0] | pointers[1] | pointers[2] | row_bytes | stride | 16
        lane = bits & -bits
        lanes = max(lanes, row_bytes // lane)
        words += *pointers, part.valid.data_ptr(), part.dirty.data_ptr(), stride, row_bytes // lane, lane
    row_bytes = sum(plane.shape[1] * plane.element_size() for plane in planes)
    others = [0 if tensor is None else tensor.data_ptr() for tensor in (places, seen, counts)]
    argument = _CACHED.pack(
        *(ids.data_ptr(), len(ids), len(planes[0]), cached.data_ptr(), own.data_ptr(), len(cached), found.data_ptr()),
        *(*others, row_bytes, len(planes), *words, *[0] * (8 * (_MAX_PLANES - len(planes)))),
    )

    def queue() -> list[Tensor]:
        launch_over(len(ids), "cache.cu", "find_slots", slots.device, argument)
        name, count, on_host = f"{direction}_cached", len(ids) * lanes, not planes[0].is_cuda
        launch_over(count, "cache.cu", name, slots.device, argument, on_host)
        return [ids, found, *rows, *([] if places is None else [places])]

    cast(KernelEngine, slots.inner).update(queue)
