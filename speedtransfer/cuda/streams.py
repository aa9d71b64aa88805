"""Order reads and writes of the same planes between CUDA streams by events, so that the host need not wait."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda.graphs import check_not_capturing, is_capturing, some_thread_captures
from speedtransfer.cuda.status import load_cupy, on_device
from speedtransfer.once import fork_safe_lock, once

_Step = Callable[[torch.cuda.Stream], None]


class StreamOrder:
    """Reads wait for the last write; a write waits for the last write and for every read since.

    A read or write is what the body of ``with order.reading()`` or ``with order.writing()`` queues on the current
    stream of the device; it leaves an event behind, for which other streams wait on the device (one stream is in order by
    itself). The host does not wait there. A lock is held meanwhile, so that threads cannot queue between the wait and the
    event; the body must not begin another.

    What is captured in a CUDA graph leaves no event and waits for none: nothing of before is under way when a capture begins,
    and a replay is ordered by the stream that it runs on. Since a replay may come at any time, :meth:`wait` then waits for the
    whole device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = fork_safe_lock()
        self._written: torch.cuda.Event | None = None
        self._writer = -1  # the stream of that event
        self._reads: dict[int, torch.cuda.Event] = {}  # by stream, since the last write
        self._captured = False
        # Made once and used again and again, by one thread at a time: this is on the path of every gather.
        self._reading = _Queueing(self, self._after_write, self._end_read)
        self._writing = _Queueing(self, self._begin_write, self._end_write)

    def reading(self) -> AbstractContextManager[torch.cuda.Stream]:
        """Queue a read of the planes on the current stream, which is given."""
        return self._reading

    def writing(self) -> AbstractContextManager[torch.cuda.Stream]:
        """Queue a write to the planes on the current stream, which is given."""
        return self._writing

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until everything queued so far is done, or every write."""
        check_not_capturing("waiting for rows on their way")
        with self._lock:
            events = [] if writes_only else list(self._reads.values())
            if self._written is not None:
                events.append(self._written)
        if self._captured:
            torch.cuda.synchronize(self.device)
        for event in events:
            if not event.query():
                event.synchronize()

    def wait_when_gone(self, owner: object) -> None:
        """Let the host wait for what is queued when `owner` goes: whose memory it uses may be given to somebody else then."""
        # Not at exit: the device may be gone, and nobody gives anything away.
        weakref.finalize(owner, _wait_quietly, self).atexit = False

    def _after_write(self, stream: torch.cuda.Stream) -> None:
        if self._written is not None and not (self._writer == stream.cuda_stream and _is_torchs(stream)):
            stream.wait_event(self._written)

    def _end_read(self, stream: torch.cuda.Stream) -> None:
        event = self._reads.get(stream.cuda_stream)
        if event is None:
            event = self._reads[stream.cuda_stream] = torch.cuda.Event()
        elif not _is_torchs(stream):
            stream.wait_event(event)  # so that recording it anew loses no read
        event.record(stream)

    def _begin_write(self, stream: torch.cuda.Stream) -> None:
        self._after_write(stream)
        for pointer, event in self._reads.items():
            if not (pointer == stream.cuda_stream and _is_torchs(stream)):
                stream.wait_event(event)
        self._reads.clear()

    def _end_write(self, stream: torch.cuda.Stream) -> None:
        # A new one each time: `wait` of another thread may be blocked on the old one.
        event = torch.cuda.Event()
        event.record(stream)
        self._written, self._writer = event, stream.cuda_stream


def _wait_quietly(order: StreamOrder) -> None:
    with contextlib.suppress(Exception):  # a forked child has no CUDA; other errors mean that it is being shut down
        # A capture of a CUDA graph by another thread would fail of it; freeing the memory waits once more.
        if not some_thread_captures():
            order.wait()


class _Queueing(AbstractContextManager[torch.cuda.Stream]):
    """Hold the lock of an order around what is queued on the current stream, and release it after an error as well."""

    def __init__(self, order: StreamOrder, begin: _Step, end: _Step) -> None:
        self._order, self._begin, self._end = order, begin, end
        self._stream: torch.cuda.Stream | None = None
        self._capturing = False

    def __enter__(self) -> torch.cuda.Stream:
        self._order._lock.acquire()
        try:
            self._stream = current_stream(self._order.device)
            self._capturing = is_capturing()
            if self._capturing:
                self._order._captured = True
            else:
                self._begin(self._stream)
        except BaseException:
            self._order._lock.release()
            raise
        return self._stream

    def __exit__(self, *error: object) -> None:
        try:
            assert self._stream is not None
            if not self._capturing:
                self._end(self._stream)
        finally:
            self._order._lock.release()


def keep_until_done(tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
    """Tell torch's allocator that `stream` uses `tensors`: they may come from another one and die too early.

    For what dies soon. When memory is freed the allocator asks each stream that used it, so none may have been destroyed by
    then: in place of another library's it asks one of torch's that follows it.
    """
    if not _is_torchs(stream):
        if is_capturing():
            return  # its replays use the memory, so that it must stay anyway
        follower = _follower(stream.device)
        follower.wait_stream(stream)
        stream = follower
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


@once
def _follower(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@once
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream of `device` for a purpose ("gather", "scatter"), always the same: rows cross both ways at once."""
    return torch.cuda.Stream(device)


def wait_until_filled(plane: Tensor) -> Tensor:
    """Return `plane` once the current stream has written it: engines on other streams know nothing of who did."""
    if plane.is_cuda:
        torch.cuda.current_stream(plane.device).synchronize()
    return plane


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; the host does not wait where it has it, and may change its own at once."""
    if tensor.device.type != "cpu" or device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    check_not_capturing("a copy of what the host has")
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Return a copy of a CUDA tensor in page-locked memory, and the event after which it is there; the host does not wait."""
    check_not_capturing("a copy for the host")
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
        tensor, non_blocking=True
    )
    return copied, current_stream(tensor.device).record_event()


def _is_torchs(stream: torch.cuda.Stream) -> bool:
    """Tell whether `stream` lives as long as the process; another may be destroyed, and its address reused.

    torch's own streams have odd ids, the default stream has 0, one from elsewhere has its (even) address.
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


# What torch's own compiler calls; torch.cuda.current_stream builds an object, which takes microseconds.
_current_pointer = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return torch's current stream on `device`, the same object for the same stream where that is known."""
    if _current_pointer is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _stream_at(device, _current_pointer(device.index))


@functools.lru_cache(maxsize=256)
def _stream_at(device: torch.device, pointer: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)  # asked for while it is the one at `pointer`


@contextlib.contextmanager
def torch_stream(device: torch.device) -> Iterator[None]:
    """Make `device` current, and torch's current stream on it the current stream of CuPy as well."""
    stream = cupy_stream(torch.cuda.current_stream(device).cuda_stream, device.index)
    with on_device(device.index), stream:
        yield


@functools.lru_cache(maxsize=256)
def cupy_stream(pointer: int, index: int) -> Any:
    """Return CuPy's object for a stream of torch; it is nothing but the pointer, so it may outlive the stream."""
    cuda = load_cupy().cuda
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_StreamHandle(pointer))
    return cuda.ExternalStream(pointer, index)  # CuPy 13


class _StreamHandle:
    """A stream pointer under CUDA's stream protocol, which not every supported torch speaks itself."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
