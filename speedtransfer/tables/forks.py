"""Tell the child of a fork which memory it shares with its parent, and when the parent is writing rows there."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from typing import Any

import numpy as np

# How long a child waits for a write that makes no progress: the parent may have been killed in it.
_PATIENCE_S = 1.0


class Turns:
    """Counts the writes that a process has begun and those that it has ended, for its children to see."""

    def __init__(self) -> None:
        # An anonymous map, which a child shares.
        self._counts = np.frombuffer(mmap.mmap(-1, 16), dtype=np.int64)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Note that a write begins."""
        with self._lock:
            self._counts[0] += 1

    def end(self) -> None:
        """Note that a write ends."""
        with self._lock:
            self._counts[1] += 1

    def wait(self) -> None:
        """Wait, in a child, until no write is under way."""
        seen, since = -1, time.monotonic()
        while (begun := int(self._counts[0])) != int(self._counts[1]):
            if begun != seen:
                seen, since = begun, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                return
            time.sleep(1e-4)


# Of this process, once it has forked with such memory.
turns: Turns | None = None
# Memory that a child has itself, and no copy of it.
_shared: weakref.WeakSet[Any] = weakref.WeakSet()


def share(memory: Any) -> None:
    """Have `memory` refuse writes in children of this process, by `refuses_writes`, and give it the `turns` of the parent."""
    _shared.add(memory)


def _before_fork() -> None:
    global turns
    if turns is None and len(_shared):
        turns = Turns()


def _in_child() -> None:
    global turns
    for memory in list(_shared):
        memory.refuses_writes = True
        # That of a parent further up has them already.
        memory.turns = memory.turns or turns
    turns = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
