"""Write rows in a thread, while the caller goes on."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

from speedtransfer.once import fork_safe_lock
from speedtransfer.workers import Task, workers


class Behind:
    """One write at a time that a thread makes. Nothing is lost: a write that failed is made again until it succeeds."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._write: Callable[[], None] | None = None
        self._task: Task[None] | None = None
        _all.add(self)

    def begin(self, write: Callable[[], None]) -> None:
        """Have `write` called by the thread, once the last one is finished."""
        with self._lock:
            self._finish()
            self._write = write
            self._task = workers("write", 1).submit(self._make, write)

    def _make(self, write: Callable[[], None]) -> None:
        write()
        # What it holds is freed at once, not at the next call.
        self._write = None

    def finish(self) -> None:
        """Block until the write is made; if the thread failed, make it here, or raise what is the matter."""
        if self._write is not None:
            with self._lock:
                self._finish()

    def _finish(self) -> None:
        if self._write is not None and self._task is not None:
            self._task.wait()
            if self._task.error is not None:
                self._write()
            self._write = self._task = None


_all: weakref.WeakSet[Behind] = weakref.WeakSet()


def _finish_all() -> None:
    for one in list(_all):
        # The next call raises it.
        with contextlib.suppress(Exception):
            one.finish()


if hasattr(os, "register_at_fork"):
    # A forked process has the memory as it is then, and not the thread.
    os.register_at_fork(before=_finish_all)
