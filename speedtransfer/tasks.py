"""Have threads make calls, also in functions of ``atexit``, when those of `concurrent.futures` take none any more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


def submit(threads: Executor, call: Callable[..., T], *args: Any) -> Future[T]:
    """Have a thread make a call, or this one where Python is on its way out, or the system has no thread left."""
    try:
        return threads.submit(call, *args)
    except RuntimeError:
        return call_here(call, *args)


def call_here(call: Callable[..., T], *args: Any) -> Future[T]:
    """Make a call on this thread."""
    future = Future[T]()
    try:
        future.set_result(call(*args))
    except Exception as error:
        future.set_exception(error)
    return future
