"""Rows moved through page-locked staging buffers: the host gathers, the copy engine crosses the bus."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing, keep_until_done, pinned_empty, resolve_cuda
from speedtransfer.engines.base import check_host_index
from speedtransfer.engines.behind import Behind
from speedtransfer.engines.host import gather_rows, scatter_rows
from speedtransfer.errors import InvalidValueError
from speedtransfer.once import fork_safe_lock

_ALIGN_BYTES = 256  # where each plane starts in a staging buffer
_CHUNK_BYTES = 1 << 20  # a call is moved in as many chunks as there are buffers, down to this size


class StagedEngine:
    """Host threads gather into a ring of page-locked buffers, and one asynchronous copy a plane crosses the bus.

    The planes are host tensors of any kind, also over a file. A call moves its rows in chunks, so that the ring stays
    small and the host gathers one chunk while the last one is still on the bus.

    Order: the planes are read and written by the host, inside the call, so when a call returns it is done with them and
    any later call, on any stream, sees them as they are. `gather` waits for `index` where that is on the device, hence for
    what the current stream was given before, and for the last copy of a buffer before it fills that again; its own copies
    run on. `scatter` queues copies of as many chunks as there are buffers, then waits for one after the other; `behind`, a
    thread does so, and the next call waits for it. Each wait is for one event, and none for what is done. ``record_stream``
    keeps the memory of `index` and `rows`. A lock makes the calls of several threads take turns.

    Parameters
    ----------
    device : torch.device
        The compute device, on CUDA.
    num_buffers : int
        Buffers of the ring, two at least.
    buffer_bytes : int
        The largest a buffer grows to, except where a single row needs more.

    Raises
    ------
    DeviceError
        There is no CUDA.
    HostMemoryError
        A staging buffer cannot be page-locked.
    InvalidValueError
        Fewer than two buffers.
    """

    name = "staged"
    runs_kernels = False
    takes_padding = False

    def __init__(self, device: torch.device | str, num_buffers: int = 8, buffer_bytes: int = 4 << 20) -> None:
        self.device = resolve_cuda(device, "the staged engine")
        if num_buffers < 2:
            raise InvalidValueError(
                f"num_buffers is {num_buffers} but one is filled while another crosses; pass 2 or more"
            )
        self.buffer_bytes = buffer_bytes
        self.num_buffers = num_buffers
        self._ring = itertools.cycle([_Buffer(self.device) for _ in range(num_buffers)])
        self._index = _Buffer(self.device)
        self._lock, self._behind = fork_safe_lock(), Behind()
        weakref.finalize(self, self._behind.finish)

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        check_not_capturing("a gather of rows that the host moves")
        self._behind.finish()
        with self._lock, torch.no_grad(), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            host_index = self._to_host(index, stream)
            self._index.wait()
            if check is not False:
                check_host_index(host_index if check is True else check.cpu(), planes)
            ids = _without_padding(host_index, planes)
            crossing = [_like(out, plane.dtype) for plane, out in zip(planes, rows, strict=True)]
            for part in self._chunks(crossing, len(ids)):
                on_device = [out[part] for out in crossing]
                buffer = next(self._ring)
                staging = buffer.take(on_device)
                gather_rows(planes, ids[part], staging)
                for out, staged in zip(on_device, staging, strict=True):
                    out.copy_(staged, non_blocking=True)
                buffer.in_use(stream)
            for out, crossed in zip(rows, crossing, strict=True):
                if out is not crossed:
                    out.copy_(crossed)
                if len(ids) < len(out):
                    out[len(ids) :] = 0
            keep_until_done((index, *rows), stream)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``; unless `behind`, before it returns."""
        check_not_capturing("a scatter of rows that the host moves")
        if behind:
            stream = torch.cuda.current_stream(self.device)
            self._behind.begin(functools.partial(self._scatter_on, stream, planes, index, rows))
        else:
            self._behind.finish()
            self._scatter(planes, index, rows)

    def _scatter_on(self, stream: torch.cuda.Stream, *given: Any) -> None:
        with torch.cuda.stream(stream):
            self._scatter(*given)

    def _scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        with self._lock, torch.no_grad(), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            crossing = [source.to(plane.dtype) for plane, source in zip(planes, rows, strict=True)]
            # It arrives before the first rows do, so that only those are waited for.
            host_index = self._to_host(index, stream)
            queued = deque[tuple[_Buffer, list[Tensor], slice]]()
            for part in self._chunks(crossing, len(index)):
                if len(queued) == self.num_buffers:
                    _put(planes, host_index, *queued.popleft())
                buffer = next(self._ring)
                staging = buffer.take([source[part] for source in crossing])
                for staged, source in zip(staging, crossing, strict=True):
                    staged.copy_(source[part], non_blocking=True)
                buffer.in_use(stream)
                queued.append((buffer, staging, part))
            while queued:  # the later ones cross the bus while the host puts the rows of the first
                _put(planes, host_index, *queued.popleft())
            keep_until_done((index, *rows), stream)

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until a write `behind` is made: else the planes are up to date whenever no call is running."""
        self._behind.finish()

    def _to_host(self, index: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Return `index` (n,) int64 on the host: where it came from the device, when `_index` has been waited for."""
        if index.device != self.device or not len(index):
            return index.cpu()
        (host_index,) = self._index.take([index])
        host_index.copy_(index, non_blocking=True)
        self._index.in_use(stream)
        return host_index

    def _chunks(self, rows: Sequence[Tensor], count: int) -> Iterator[slice]:
        """Yield slices of the first `count` rows such that all planes of a slice fit into one buffer."""
        row_bytes = sum(out.shape[1] * out.element_size() for out in rows)
        if row_bytes == 0:
            return
        # Several chunks even where one would do: the bus idles while the first is gathered, or the last one put.
        several = max(_CHUNK_BYTES // row_bytes, -(-count // self.num_buffers))
        step = max(1, min(several, (self.buffer_bytes - _ALIGN_BYTES * len(rows)) // row_bytes))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))


def _like(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where rows of `dtype` arrive: `rows` itself, or a buffer to convert them from on the device."""
    return rows if rows.dtype == dtype else torch.empty_like(rows, dtype=dtype)


def _without_padding(index: Tensor, planes: Sequence[Tensor]) -> Tensor:
    """Return `index` (n,) on the host without the entries at its end that are the number of rows."""
    if not planes or not len(index) or int(index[-1]) != planes[0].shape[0]:
        return index
    return index[: len(index) - int(np.count_nonzero(index.numpy() == planes[0].shape[0]))]


def _put(planes: Sequence[Tensor], host_index: Tensor, buffer: _Buffer, staging: Sequence[Tensor], part: slice) -> None:
    buffer.wait()
    ids = host_index[part]
    # Padding may stand anywhere: rows that are not to be written become it.
    named = torch.from_numpy(ids.numpy() != planes[0].shape[0])
    if not named.all():
        ids, staging = ids[named], [staged[named] for staged in staging]
    scatter_rows(planes, ids, staging)


class _Buffer:
    """A page-locked buffer that grows, and the event of the last copy that uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Page-locked memory is freed when the engine goes: CUDA waits for all that the device has to do.
        self._outgrown: list[Tensor] = []
        self._event = torch.cuda.Event()

    def take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return host tensors with the shapes and dtypes of `like`, once the last copy is done with the buffer."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        starts = [0, *itertools.accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)]
        self.wait()
        if starts[-1] > len(self._memory):
            # Twice as much: batches vary in size, and all that was outgrown is no more than what is there.
            size, outgrown = max(starts[-1], len(self._memory) * 2), self._memory
            remedy = "free host memory, or make the engine with fewer buffer_bytes"
            self._memory = pinned_empty(size, self._device, remedy, self._event.synchronize)
            self._outgrown.append(outgrown)
        return [
            self._memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts, sizes, like, strict=False)
        ]

    def in_use(self, stream: torch.cuda.Stream) -> None:
        """Note that copies just queued on `stream` use the buffer."""
        self._event.record(stream)

    def wait(self) -> None:
        """Block the host until the last copy is done."""
        if not self._event.query():
            self._event.synchronize()
