"""Threads that make calls for others; unlike those of `concurrent.futures` they outlive interrupts and the end of a script."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from typing_extensions import Self

from speedtransfer.once import once

T = TypeVar("T")


class Task(Generic[T]):
    """A call that a thread makes; `error` is what it has raised, or None."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._result: T | None = None
        self.error: BaseException | None = None
        # A lock of C: an interrupt as a Condition is entered would leave that locked, and its thread waiting.
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        call, self._call = self._call, None
        try:
            if call is not None:
                self._result = call()
        except BaseException as error:
            # Without this frame, by which it would keep itself.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._running.release()

    def cancel(self) -> None:
        """Have the call not made if it has not begun."""
        self._call = None

    def wait(self) -> None:
        """Block until the call has ended."""
        with self._running:
            pass

    def result(self) -> T:
        """Return what the call has returned, or raise what it has raised, once it has ended."""
        self.wait()
        if self.error is None:
            return cast(T, self._result)
        try:
            raise self.error
        finally:
            del self


def done_here(call: Callable[..., T], *args: Any) -> Task[T]:
    """Return the task of a call that this thread makes now; an interrupt is raised."""
    task = Task(functools.partial(call, *args))
    task.run()
    if not isinstance(task.error, Exception | None):
        raise task.error
    return task


class Workers:
    """At most `count` threads, which begin when they are first needed. Without any, callers make their calls themselves."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count
        self._tasks = queue.SimpleQueue[Task[Any] | None]()
        self._threads = list[threading.Thread]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, call: Callable[..., T], *args: Any) -> Task[T]:
        """Have a thread make a call."""
        if len(self._threads) < self._count:
            self._begin()
        if not self._threads:
            return done_here(call, *args)
        task = Task(functools.partial(call, *args))
        self._tasks.put(task)
        return task

    def _begin(self) -> None:
        # A daemon: Python has others wait for it before threads that still train have ended.
        thread = threading.Thread(target=_serve, args=(self._tasks,), name=f"speedtransfer-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is on its way out, or the system has no thread left
            return
        self._threads.append(thread)

    def close(self) -> None:
        """Wait for all calls; the callers make further ones themselves."""
        self._count, threads, self._threads = 0, self._threads, []
        self._tasks.put(None)
        for thread in threads:
            thread.join()


def _serve(tasks: queue.SimpleQueue[Task[Any] | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            # For the next one.
            tasks.put(None)
            return
        task.run()
        # It has what it returned.
        del task


@once
def workers(name: str, count: int) -> Workers:
    """Return the threads of this process for a purpose."""
    found = Workers(name, count)
    atexit.register(found.close)
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.cache_clear)  # type: ignore[attr-defined]
