"""Bring gradients of rows together that several processes have: collect them in backward, exchange them when it has ended.

At the end of backward and not in the step, because clipping, unscaling and hooks come between. One message for all tables of a
group. The same on every process: which tables take part depends only on the calls that all have made.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from speedtransfer.once import fork_safe_lock
from speedtransfer.ranks import DifferenceError, Exchange, Segment


class Reducer(ABC):
    """The other processes, as the handle of a table sees them.

    Parameters
    ----------
    handle : Handle
    exchange : Exchange
        To the other processes.
    """

    def __init__(self, handle: Any, exchange: Exchange) -> None:
        self._handle, self.exchange = weakref.ref(handle), exchange
        # Steps made, and backwards that failed: those of all processes.
        self.steps = self.failures = 0
        made.append(weakref.ref(self))

    @property
    def handle(self) -> Any:
        """The handle of the table."""
        handle = self._handle()
        assert handle is not None
        return handle

    @property
    def so_far(self) -> str:
        """The table, and how many steps it has made: an interrupt may have come into one in some processes."""
        return f"{self.handle} after {self.steps} steps"

    def is_alive(self) -> bool:
        """Tell whether the table still has this one."""
        handle = self._handle()
        return handle is not None and handle.reducer is self

    @abstractmethod
    def is_open(self, at_step: bool = False) -> bool:
        """Tell whether gradients may have come since the last exchange, on this process or another.

        `at_step`: by hand, and not in a backward.
        """

    @abstractmethod
    def take(self, ids: Tensor, grad: Tensor, whole: bool, lookup: Any) -> None:
        """Keep the gradient of the rows `ids` (n,), each ``(n, dim)``, for the next exchange."""

    @abstractmethod
    def has_left(self) -> bool:
        """Tell whether this process has a gradient for the next exchange."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the gradients taken since the last exchange: backward has failed, or they were set to None."""

    @abstractmethod
    def announce(self) -> int:
        """Return a number from which the others see what this process has."""

    def requests(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return how many ids go to each rank, ``(ranks,)``, for each list of ids that has to be sent before gradients."""
        return []

    def send_ids(self, counts: Sequence[Sequence[int]]) -> list[Segment]:
        """Return those ids; `counts` of them come from each rank."""
        return []

    def receive_ids(self, received: Sequence[Tensor]) -> None:
        """Take the ids that others have sent."""
        return None

    @abstractmethod
    def send(self, numbers: Sequence[int]) -> list[Segment]:
        """Return the gradients to send, where the ranks have announced `numbers`."""

    @abstractmethod
    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:
        """Deposit the gradients received for the next step."""

    def before_step(self) -> None:
        """Make ready for a step of the table, which all processes make."""
        return None

    def after_step(self) -> None:
        """End a step of the table, which all processes have made."""
        return None


# In the order in which they were made, which is the same on every process. Empty: no table has other processes.
made: list[weakref.ref[Reducer]] = []
# Threads run backward one after the other: messages of two exchanges at once would be mixed up.
turn = fork_safe_lock()
# The frame of the exchange that runs; after an interrupt maybe of one that does not run any more.
_running: FrameType | None = None


def _alive() -> list[Reducer]:
    found = [(reference, reference()) for reference in made]
    made[:] = [reference for reference, reducer in found if reducer is not None and reducer.is_alive()]
    return [reducer for _, reducer in found if reducer is not None and reducer.is_alive()]


def _forget(reducer: Reducer) -> None:
    reducer.forget()
    # None: gone by now.
    handle = reducer._handle()
    if handle is not None and handle.features is not None:
        handle.features.left = 0


def forget() -> None:
    """Forget the gradients of a backward that has failed."""
    for reducer in _alive():
        # Who catches this error and goes on is told by the others.
        reducer.failures += reducer.is_open()
        _forget(reducer)


def beside_others() -> bool:
    """Tell whether `DistributedDataParallel` has messages of its own in backward, beside those of tables."""
    return any(reducer.exchange.is_apart for reducer in _alive())


@torch.no_grad()
def exchange_gradients(only: Iterable[Reducer] | None = None) -> None:
    """Exchange what backward has left, of all tables or some. Every process must call it at the same point."""
    global _running
    # In a backward, which has the turn, perhaps on another thread.
    with contextlib.nullcontext() if torch._C._current_graph_task_id() >= 0 else turn:
        # Within an exchange hooks may step: those gradients are on their way.
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not _running:
            frame = frame.f_back
        if frame is not None:
            return
        _running = sys._getframe()
        try:
            _exchange_all(only)
        finally:
            _running = None


def _exchange_all(only: Iterable[Reducer] | None) -> None:
    chosen = None if only is None else set(only)
    groups: dict[Exchange, list[Reducer]] = {}
    for reducer in _alive():
        # A model of a group that was destroyed may still be there, but is not trained.
        is_past = reducer.exchange.is_destroyed() and not reducer.has_left()
        if not is_past and (chosen is None or reducer in chosen) and reducer.is_open(chosen is not None):
            groups.setdefault(reducer.exchange, []).append(reducer)
    for exchange, reducers in groups.items():
        # Else a process that left a backward out would bring none there, and go on while others wait in that backward.
        point = "brings gradients at a step" if exchange.is_apart and chosen is not None else "brings gradients"
        try:
            try:
                numbers = _announced(exchange, reducers, point)
            except DifferenceError:
                # In all processes. Some may not have collected the tables of a model that is gone.
                gc.collect()
                reducers = [reducer for reducer in reducers if reducer.is_alive()]
                numbers = _announced(exchange, reducers, point)
            _exchange(exchange, reducers, numbers, point)
        except BaseException:
            for reducer in reducers:
                _forget(reducer)
            raise


def _announced(exchange: Exchange, reducers: list[Reducer], point: str) -> list[list[int]]:
    """Return what each process announces, for each table."""
    found = [reducer.handle.features for reducer in reducers]
    announced = [[r.announce(), *(f.announce() if f is not None else ())] for r, f in zip(reducers, found, strict=True)]
    about = ", ".join(described(reducer.handle) for reducer in reducers)
    told = iter(exchange.agree(point, [number for some in announced for number in some], about).T.tolist())
    numbers = []
    for features, some in zip(found, announced, strict=True):
        number, *rest = [next(told) for _ in some]
        numbers.append(number)
        if features is not None:
            features.arrive(rest)
    return numbers


def _exchange(exchange: Exchange, reducers: list[Reducer], numbers: list[list[int]], point: str) -> None:
    requests = [reducer.requests(told) for reducer, told in zip(reducers, numbers, strict=True)]
    if any(requests):
        counts = iter(exchange.agree(point, torch.stack([n for some in requests for n in some], 1)).T.tolist())
        ids = [r.send_ids([next(counts) for _ in some]) for r, some in zip(reducers, requests, strict=True)]
        for reducer, parts in _moved(exchange, "ids", reducers, ids):
            reducer.receive_ids(parts)
    told_by = dict(zip(reducers, numbers, strict=True))
    segments = [reducer.send(told_by[reducer]) for reducer in reducers]
    for reducer, parts in _moved(exchange, "gradients", reducers, segments):
        reducer.receive(told_by[reducer], parts)


def _moved(
    exchange: Exchange, kind: str, reducers: list[Reducer], segments: list[list[Segment]]
) -> list[tuple[Reducer, list[Tensor]]]:
    received = iter(exchange.move(kind, [segment for some in segments for segment in some]))
    return [(reducer, [next(received) for _ in some]) for reducer, some in zip(reducers, segments, strict=True)]


def described(handle: Any) -> str:
    """Name the table, and what its optimizer makes of gradients: processes that differ in it would drift apart."""
    reducer, optimizer = handle.reducer, None if handle.state is None else handle.state.optimizer()
    text: str = reducer.so_far
    if handle.grad is not None:
        text += " with a gradient"
    if reducer.failures:
        text += f", {reducer.failures} failed backwards"
    if optimizer is None:
        return text
    group: dict[str, Any] = next((g for g in optimizer.param_groups if any(p is handle.param for p in g["params"])), {})
    group = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 and v.is_cpu else v for k, v in group.items()}
    numbers = {k: v for k, v in group.items() if isinstance(v, bool | int | float | str | tuple)}
    return f"{text} by {type(optimizer).__name__} {numbers}"
