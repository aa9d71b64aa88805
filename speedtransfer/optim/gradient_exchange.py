"""Bring gradients of rows together that several processes have: collect them in backward, exchange them when it has ended.

At the end of backward and not in the step, because clipping, unscaling and hooks come between. One message for all tables of a
group. The same on every process: which tables take part depends only on the calls that all have made.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from speedtransfer.once import fork_safe_lock
from speedtransfer.optim.owners import Owners, all_owners
from speedtransfer.ranks import DifferenceError, Exchange, from_words

# Threads run backward one after the other: messages of two exchanges at once would be mixed up.
backward_lock = fork_safe_lock()
# The frame of the exchange that runs; after an interrupt maybe of one that does not run any more.
_running: FrameType | None = None


def _alive() -> dict[Owners, Any]:
    """Return those whose tables still have them, with the handles, which the garbage collector leaves for as long."""
    found = {}
    for reference in all_owners:
        owners = reference()
        handle = None if owners is None else owners._handle()
        if owners is not None and handle is not None and handle.owners is owners:
            found[owners] = handle
    all_owners[:] = [weakref.ref(owners) for owners in found]
    return found


def _forget(owners: Owners) -> None:
    owners.forget()
    # None: gone by now.
    handle = owners._handle()
    if handle is not None and handle.features is not None:
        handle.features.left = 0


def forget() -> None:
    """Forget the gradients of a backward that has failed."""
    for owners in _alive():
        # Who catches this error and goes on is told by the others.
        owners.failures += owners.is_open()
        _forget(owners)


def beside_others() -> bool:
    """Tell whether `DistributedDataParallel` has messages of its own in backward, beside those of tables."""
    # Not those of a group that was destroyed: one process may have collected its models, and another not.
    return any(owners.exchange.is_apart and not owners.exchange.is_destroyed() for owners in _alive())


@torch.no_grad()
def exchange_gradients(only: Iterable[Owners] | None = None) -> None:
    """Exchange what backward has left, of all tables or some. Every process must call it at the same point."""
    global _running
    # In a backward, which has the lock, perhaps on another thread.
    with contextlib.nullcontext() if torch._C._current_graph_task_id() >= 0 else backward_lock:
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


def _exchange_all(only: Iterable[Owners] | None) -> None:
    chosen = None if only is None else set(only)
    groups: dict[Exchange, list[Owners]] = {}
    alive = _alive()
    for owners in alive:
        # A model of a group that was destroyed may still be there, but is not trained.
        is_past = owners.exchange.is_destroyed() and not owners.has_left()
        if not is_past and (chosen is None or owners in chosen) and owners.is_open(chosen is not None):
            groups.setdefault(owners.exchange, []).append(owners)
    for exchange, several in groups.items():
        # Else a process that left a backward out would bring none there, and go on while others wait in that backward.
        point = "brings gradients at a step" if exchange.is_apart and chosen is not None else "brings gradients"
        try:
            try:
                numbers = _announced(exchange, several, point)
            except DifferenceError:
                # In all processes. Some may not have collected the tables of a model that is gone.
                alive.clear()
                gc.collect()
                alive = _alive()
                several = [owners for owners in several if owners in alive]
                numbers = _announced(exchange, several, point)
            _exchange(exchange, several, numbers, point)
        except BaseException:
            for owners in several:
                _forget(owners)
            raise


def _announced(exchange: Exchange, several: list[Owners], point: str) -> list[list[int]]:
    """Return what each process announces, for each table."""
    found = [owners.handle.features for owners in several]
    those = [each for pair in zip(several, found, strict=True) for each in pair if each is not None]
    words = [each.announce() for each in those]
    about = ", ".join(described(owners.handle) for owners in several)
    told = iter(exchange.agree(point, [word for some in words for word in some], about).T.tolist())
    # Of each, by process.
    numbers = iter([[from_words(parts) for parts in zip(*(next(told) for _ in some), strict=True)] for some in words])
    announced = []
    for features in found:
        announced.append(next(numbers))
        if features is not None:
            features.arrive(next(numbers))
    return announced


def _exchange(exchange: Exchange, several: list[Owners], numbers: list[list[int]], point: str) -> None:
    asked = [(owners, owners.ask(told)) for owners, told in zip(several, numbers, strict=True)]
    asking = {owners: counts for owners, counts in asked if counts is not None}
    if asking:
        counts = exchange.agree(point, torch.stack(list(asking.values()), 1)).T.tolist()
        ids = [owners.send_ids(come) for owners, come in zip(asking, counts, strict=True)]
        for owners, received in zip(asking, exchange.move("ids", ids), strict=True):
            owners.receive_ids(received)
    segments = [owners.send(told) for owners, told in zip(several, numbers, strict=True)]
    parts = iter(exchange.move("gradients", [segment for some in segments for segment in some]))
    for owners, told, sent in zip(several, numbers, segments, strict=True):
        owners.receive(told, [next(parts) for _ in sent])


def described(handle: Any) -> str:
    """Name the table, and what its optimizer makes of gradients: processes that differ in it would drift apart."""
    owners, optimizer = handle.owners, None if handle.state is None else handle.state.optimizer()
    text: str = owners.looked_up
    if handle.pending.grad is not None and not owners.has_local_gradient:
        text += " with a gradient"
    if owners.failures:
        text += f", {owners.failures} failed backwards"
    if optimizer is None:
        return text
    group: dict[str, Any] = next((g for g in optimizer.param_groups if any(p is handle.param for p in g["params"])), {})
    group = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 and v.is_cpu else v for k, v in group.items()}
    numbers = {k: v for k, v in group.items() if isinstance(v, bool | int | float | str | tuple)}
    return f"{text} by {type(optimizer).__name__} {numbers}"
