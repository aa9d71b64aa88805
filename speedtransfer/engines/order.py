"""Order between the streams that read and write the same planes: what keeps a race out without a synchronize."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class StreamOrder:
    """Reads wait for the last write; a write waits for the last write and for every read since.

    A read or write is what the body of ``with order.reading()`` or ``with order.writing()`` queues on the current
    stream of the device; it leaves an event behind, for which other streams wait on the device. The host does not wait
    there. A lock is held meanwhile, so that threads cannot queue between the wait and the event.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._written: torch.cuda.Event | None = None
        self._reads: dict[int, torch.cuda.Event] = {}  # by stream, since the last write

    @contextlib.contextmanager
    def reading(self) -> Iterator[torch.cuda.Stream]:
        """Queue a read of the planes on the current stream, which is given."""
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if self._written is not None:
                stream.wait_event(self._written)
            try:
                yield stream
            finally:
                event = self._reads.setdefault(stream.cuda_stream, torch.cuda.Event())
                event.record(stream)

    @contextlib.contextmanager
    def writing(self) -> Iterator[torch.cuda.Stream]:
        """Queue a write to the planes on the current stream, which is given."""
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if self._written is not None:
                stream.wait_event(self._written)
            for event in self._reads.values():
                stream.wait_event(event)
            self._reads.clear()
            try:
                yield stream
            finally:
                # A new one each time: `wait` of another thread may be blocked on the old one.
                self._written = torch.cuda.Event()
                self._written.record(stream)

    def wait(self) -> None:
        """Block the host until everything queued so far is done."""
        with self._lock:
            events = list(self._reads.values())
            if self._written is not None:
                events.append(self._written)
        for event in events:
            event.synchronize()


def keep_until_done(tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
    """Tell torch's allocator that `stream` uses `tensors`: they may come from another one and die too early."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
