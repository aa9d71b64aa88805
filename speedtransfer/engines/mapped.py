"""Rows moved by kernels that reach across the bus into page-locked planes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import (
    ARGUMENT_AT,
    WARM_UP,
    StreamOrder,
    argument_memory,
    check_not_capturing,
    keep_until_done,
    launch_kernel,
    load_kernel,
    pinned_empty,
    require_mapped,
    resolve_cuda,
    to_device,
)
from speedtransfer.engines.base import Queue, ascending, check_host_index, leaves_faults, out_of_range

MAX_PLANES = 16  # of one launch, as in move.cuh
# Below this an index is as well left as it is: an estimate, as `sort_rows` is.
_SORT_BYTES = 1 << 20
_SOURCES = {"rows": "rows.cu", "converted": "convert.cu"}

# struct Move, by the number of its planes: nine 64-bit words, and seven for each plane.
_PLANE_WORDS = 7
_MOVES = [struct.Struct(f"{9 + _PLANE_WORDS * planes}q") for planes in range(MAX_PLANES + 1)]
_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # enum Type; where nothing is converted, 0


class MappedEngine:
    """Kernels on the compute device read and write planes in page-locked host memory (or in device memory).

    Order: every call is one kernel on the current stream (several where there are more than 16 planes). Events order the
    calls between streams, on the device (see :class:`~speedtransfer.cuda.StreamOrder`). ``record_stream`` keeps the memory
    of `index` and `rows`, which torch's allocator could give away early when they come from another stream; page-locked
    planes are not freed before the device is idle (see :func:`speedtransfer.cuda.pinned_empty`), nor an engine before its
    calls are done.

    A row that does not exist is gathered as zeros and scattered nowhere, so that an index that has not been checked
    cannot reach other memory. With `check` the device reports it, and the next call raises.

    Rows that lie side by side in a large table share translations of addresses and pages of the bus: a large call that is
    `unsorted` sorts its index on the device first.

    Parameters
    ----------
    device : torch.device
        The compute device, on CUDA.
    max_blocks : int, optional
        The largest launch, in blocks of `threads`. Fewer leave more of the device to training. By default one for every four
        multiprocessors, and two for each where the planes are on the device.
    threads : int
        Threads of a block.
    sort_rows : int
        From how many rows on an `unsorted` call is sorted, if its planes are on the host and it moves a megabyte.

    Raises
    ------
    DeviceError
        There is no CUDA, or the device cannot address host memory.
    """

    name = "mapped"
    takes_padding = True
    runs_kernels = True

    def __init__(
        self, device: torch.device | str, max_blocks: int | None = None, threads: int = 256, sort_rows: int = 4096
    ) -> None:
        self.device = resolve_cuda(device, "the mapped engine")
        require_mapped(self.device)
        self.threads, self.sort_rows = threads, sort_rows
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        # A few fill the bus, and ask for rows of few pages at a time, which large tables need: more are slower there.
        self._host_blocks, self._device_blocks = max_blocks or max(8, processors // 4), max_blocks or 2 * processors
        self._kernels: dict[tuple[str, str], Any] = {}
        for direction in ("gather", "scatter"):  # now, so that what does not compile says so here
            self._kernel(direction, "rows")
        self._order = StreamOrder(self.device)
        self._order.wait_when_gone(self)
        # For every launch: the driver has copied it when that returns.
        self._argument = argument_memory()
        # What report_faults in move.cuh takes: a record that the host can look at, and the right to write to it.
        record = pinned_empty(4 * 8, self.device, wait=self._order.wait).view(torch.int64).zero_()
        self._fault, self._fault_pointer = record.numpy(), record.data_ptr()
        # The other streams wait for the zero; and an inference tensor could not be set to zero again.
        with self._order.writing(), torch.inference_mode(False):
            self._claimed = torch.zeros(1, dtype=torch.int32, device=self.device)

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        self._raise_fault()
        if index.device != self.device:
            check_not_capturing("a gather by an index on the host")
            if check is True:
                check_host_index(index, planes)
                check = False
            index = to_device(index, self.device)
        ids, places = self._sorted(planes, index) if unsorted else (index, None)
        named = ids if check is True else None if check is False else check
        with self._order.reading() as stream:
            self._move("gather", planes, ids, rows, stream, named, places)
            keep_until_done((index, *rows) if named is ids or named is None else (index, named, *rows), stream)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        self._raise_fault()
        if index.device != self.device:
            check_not_capturing("a scatter by an index on the host")
            index = to_device(index, self.device)
        ids, places = self._sorted(planes, index) if unsorted else (index, None)
        with self._order.writing() as stream:
            self._move("scatter", planes, ids, rows, stream, None, places)
            keep_until_done((index, *rows), stream)

    def update(self, planes: Sequence[Tensor], ids: Tensor, read: Sequence[bool], queue: Queue) -> None:
        """Let `queue` queue kernels that read and write planes; see `KernelEngine`."""
        self._raise_fault()
        with self._order.writing() as stream:
            keep_until_done(queue(None), stream)

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until every gather and scatter so far is done."""
        self._order.wait(writes_only)
        self._raise_fault()

    def _sorted(self, planes: Sequence[Tensor], index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `index` in ascending order and the places of its values, or as it is where sorting would not pay."""
        if len(index) < self.sort_rows or not planes or planes[0].is_cuda:
            return index, None
        if len(index) * sum(plane.shape[1] * plane.element_size() for plane in planes) < _SORT_BYTES:
            return index, None
        return ascending(index, len(planes[0]))

    def _move(
        self,
        direction: str,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        stream: Any,
        named: Tensor | None,
        places: Tensor | None = None,
    ) -> None:
        """Queue the launches of a call: as few as its planes fit into. `named` are checked."""
        num_rows = index.shape[0]
        if not planes or not num_rows:
            return
        words, kind = list[int](), "rows"
        for plane, dense in zip(planes, rows, strict=True):
            packed = pack_plane(plane, dense)
            _, _, _, num_lanes, _, stored_type, dense_type = packed
            if stored_type != dense_type:
                kind = "converted"
            if num_lanes or named is not None:
                words += packed
        table_rows, step = planes[0].shape[0], _PLANE_WORDS * MAX_PLANES
        faults, checked = (0, 0), (0, 0)
        if named is not None:
            faults, checked = (self._fault_pointer, self._claimed.data_ptr()), (named.data_ptr(), named.shape[0])
        there = 0 if places is None else places.data_ptr()
        max_blocks = self._device_blocks if planes[0].is_cuda else self._host_blocks
        blocks = min(max_blocks, -(-num_rows * 32 // self.threads))  # a warp has a row
        for start in range(0, len(words), step):
            some = words[start : start + step]
            count = len(some) // _PLANE_WORDS
            about = index.data_ptr(), num_rows, table_rows, count, *faults, there, *checked
            _MOVES[count].pack_into(self._argument, ARGUMENT_AT, *about, *some)
            launch_kernel(self._kernel(direction, kind), blocks, self.threads, self._argument, stream)

    def _kernel(self, direction: str, kind: str) -> Any:
        """Return a kernel, compiled on first use: "converted" takes seconds, and few tables need it."""
        found = self._kernels.get((direction, kind))
        if found is None:
            check_not_capturing(f"loading the kernel {direction}_{kind}", WARM_UP)
            found = load_kernel(_SOURCES[kind], f"{direction}_{kind}", self.device)
            self._kernels[direction, kind] = found
        return found

    def _raise_fault(self) -> None:
        """Raise for a row that an earlier gather did not find, if the device has said so, and forget it."""
        if not self._fault[0] or leaves_faults():
            return
        check_not_capturing("the first call after a gather that named a row out of range")
        with self._order.writing() as stream:  # which waits for all that was queued, and lets nobody queue meanwhile
            stream.synchronize()
            reported, position, value, num_rows = self._fault.tolist()
            with torch.inference_mode(False):
                self._claimed.zero_()
            self._fault[:] = 0
        if reported:  # another thread may have been faster
            raise out_of_range(f"index[{position}] of an earlier gather (its row is zeros)", value, num_rows)


def pack_plane(plane: Tensor, rows: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """Return the words of ``struct Plane`` for a plane (num_rows, width) and its rows (n, width)."""
    item, pointer, dense = plane.element_size(), plane.data_ptr(), rows.data_ptr()
    row_bytes, stride_bytes = plane.shape[1] * item, plane.stride()[0] * item  # stride(0) takes twice as long
    # The widest lane that divides every address: the lowest bit that any of them has.
    if plane.dtype == rows.dtype:
        bits = pointer | dense | row_bytes | stride_bytes | 16
        lane = bits & -bits
        return pointer, dense, stride_bytes, row_bytes // lane, lane, 0, 0
    # As many values take a lane of another width in the rows, whose address counts in proportion.
    bits = pointer | (dense * item // rows.element_size()) | row_bytes | stride_bytes | 16
    lane = bits & -bits
    return pointer, dense, stride_bytes, row_bytes // lane, lane, _TYPES[plane.dtype], _TYPES[rows.dtype]
