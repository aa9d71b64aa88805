"""Rows moved through page-locked staging buffers: the host gathers, the copy engine crosses the bus."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speedtransfer.cuda import keep_until_done, pinned_empty, resolve_cuda
from speedtransfer.engines.base import check_host_index
from speedtransfer.engines.host import gather_rows, scatter_rows
from speedtransfer.errors import InvalidValueError

_ALIGN_BYTES = 256  # where each plane starts in a staging buffer
_CHUNKS = 8  # of a call at least, down to chunks of
_CHUNK_BYTES = 1 << 20


class StagedEngine:
    """Host threads gather into a ring of page-locked buffers, and one asynchronous copy a plane crosses the bus.

    The planes are host tensors of any kind, also over a file. A call moves its rows in chunks, so that the ring stays
    small and the host gathers one chunk while the last one is still on the bus.

    Order: the planes are read and written by the host, inside the call, so when a call returns it is done with them and
    any later call, on any stream, sees them as they are. Where `index` is on the device the host waits for it, hence for
    what the current stream was given before. `gather` waits for the last copy of a buffer before it fills that again; its
    own copies run on. `scatter` waits, chunk by chunk, for the copies that it has queued. Each wait is for one event.
    ``record_stream`` keeps the memory of `index` and `rows`. A lock makes the calls of several threads take turns.

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
    takes_padding = False

    def __init__(self, device: torch.device | str, num_buffers: int = 3, buffer_bytes: int = 16 << 20) -> None:
        self.device = resolve_cuda(device, "the staged engine")
        if num_buffers < 2:
            raise InvalidValueError(
                f"num_buffers is {num_buffers} but one is filled while another crosses; pass 2 or more"
            )
        self.buffer_bytes = buffer_bytes
        self._ring = itertools.cycle([_Buffer(self.device) for _ in range(num_buffers)])
        self._index = _Buffer(self.device)
        self._lock = threading.Lock()

    def gather(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], check: bool = False) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        with self._lock, torch.no_grad(), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            host_index = self._to_host(index, stream)
            if check:
                check_host_index(host_index, planes)
            crossing = [_like(out, plane.dtype) for plane, out in zip(planes, rows, strict=True)]
            for part in self._chunks(crossing):
                on_device = [out[part] for out in crossing]
                buffer = next(self._ring)
                staging = buffer.take(on_device)
                gather_rows(planes, host_index[part], staging)
                for out, staged in zip(on_device, staging, strict=True):
                    out.copy_(staged, non_blocking=True)
                buffer.in_use(stream)
            for out, crossed in zip(rows, crossing, strict=True):
                if out is not crossed:
                    out.copy_(crossed)
            keep_until_done((index, *rows), stream)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``; they are there on return."""
        with self._lock, torch.no_grad(), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            crossing = [source.to(plane.dtype) for plane, source in zip(planes, rows, strict=True)]
            host_index = self._to_host(index, stream)
            queued: tuple[_Buffer, list[Tensor], slice] | None = None
            for part in self._chunks(crossing):
                buffer = next(self._ring)
                staging = buffer.take([source[part] for source in crossing])
                for staged, source in zip(staging, crossing, strict=True):
                    staged.copy_(source[part], non_blocking=True)
                buffer.in_use(stream)
                if queued is not None:  # this copy crosses the bus while the host puts the rows of the last one
                    _put(planes, host_index, *queued)
                queued = buffer, staging, part
            if queued is not None:
                _put(planes, host_index, *queued)
            keep_until_done((index, *rows), stream)

    def wait(self) -> None:
        """Return at once: the planes are up to date whenever no call is running."""

    def _to_host(self, index: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Return `index` (n,) int64 on the host, as soon as it is there."""
        if index.device != self.device or not len(index):
            return index.cpu()
        (host_index,) = self._index.take([index])
        host_index.copy_(index, non_blocking=True)
        self._index.in_use(stream)
        self._index.wait()
        return host_index

    def _chunks(self, rows: Sequence[Tensor]) -> Iterator[slice]:
        """Yield slices of the rows such that all planes of a slice fit into one buffer."""
        row_bytes = sum(out.shape[1] * out.element_size() for out in rows)
        if row_bytes == 0:
            return
        # Several chunks even where one would do: the bus idles while the first is gathered, or the last one put.
        room = min(self.buffer_bytes, max(_CHUNK_BYTES, len(rows[0]) * row_bytes // _CHUNKS)) - _ALIGN_BYTES * len(rows)
        step = max(1, room // row_bytes)
        for start in range(0, len(rows[0]), step):
            yield slice(start, start + step)


def _like(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where rows of `dtype` arrive: `rows` itself, or a buffer to convert them from on the device."""
    return rows if rows.dtype == dtype else torch.empty_like(rows, dtype=dtype)


def _put(planes: Sequence[Tensor], host_index: Tensor, buffer: _Buffer, staging: Sequence[Tensor], part: slice) -> None:
    buffer.wait()
    scatter_rows(planes, host_index[part], staging)


class _Buffer:
    """A page-locked buffer that grows, and the event of the last copy that uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._event: torch.cuda.Event | None = None

    def take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return host tensors with the shapes and dtypes of `like`, once the last copy is done with the buffer."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        starts = [0, *itertools.accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)]
        self.wait()
        if starts[-1] > len(self._memory):
            # Half as much again: freeing page-locked memory waits for the device, and batches vary in size.
            size = max(starts[-1], len(self._memory) * 3 // 2)
            self._memory = pinned_empty(
                size, self._device, "free host memory, or make the engine with fewer buffer_bytes"
            )
        return [
            self._memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts, sizes, like, strict=False)
        ]

    def in_use(self, stream: torch.cuda.Stream) -> None:
        """Note that copies just queued on `stream` use the buffer."""
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Block the host until the last copy is done."""
        if self._event is not None:
            self._event.synchronize()
