"""What a process does once, whichever of its threads come first; and locks that a forked process finds free."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# How long a fork waits, for all locks together: a thread may hold one for long, or want one while it has another.
_PATIENCE_S = 1.0
# A plain set: to copy it is one operation, in which no thread can add to it.
_locks: set[weakref.ref[Any]] = set()
_taken: list[Any] = []


def fork_safe_lock() -> Any:
    """Return an RLock that a forked process finds free.

    A fork waits until the threads that hold such locks are done, so that the child has what they write whole; a second at
    most, after which the child gets what there is.
    """
    lock = threading.RLock()
    _locks.add(weakref.ref(lock, _locks.discard))
    return lock


def _before_fork() -> None:
    until = time.monotonic() + _PATIENCE_S
    for reference in list(_locks):
        lock = reference()
        if lock is not None and lock.acquire(timeout=max(until - time.monotonic(), 0)):
            _taken.append(lock)


def _after_fork() -> None:
    while _taken:
        _taken.pop().release()


def _in_child() -> None:
    _after_fork()
    for reference in list(_locks):
        lock = reference()
        # Unless the thread that has forked holds it, as Python's own locks are made free.
        if lock is not None and not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def once(function: F) -> F:
    """Call `function` once for the same arguments, as ``functools.cache``, but have other threads wait for the first call."""
    found: dict[Any, Any] = {}
    lock = fork_safe_lock()

    @functools.cache
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with lock:
            if args not in found:
                found[args] = function(*args)
            return found[args]

    clear = call.cache_clear

    def forget() -> None:
        clear()
        found.clear()

    call.cache_clear, call.__wrapped__ = forget, function  # type: ignore[method-assign]
    return call  # type: ignore[return-value]
