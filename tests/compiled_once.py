"""Have one process compile what several need at once: the others wait, and read from the disk what it has compiled.

In a new clone three workers, and each of their ranks, would compile the same functions, which takes up to six seconds each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from numba.core.dispatcher import Dispatcher

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_compile = Dispatcher.compile
_mine = threading.local()


def install() -> None:
    Dispatcher.compile = _compile_once


def _compile_once(self: Any, signature: Any) -> Any:
    with _locked(self.py_func.__code__.co_filename):
        return _compile(self, signature)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lock the file of a function, unless it is one that this thread compiles as a part of another one."""
    if fcntl is None or getattr(_mine, "locked", False) or "speedtransfer" not in path:
        yield
        return
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _mine.locked = True
        try:
            yield
        finally:
            _mine.locked = False
