"""Keep other processes from writing to the file of a table: two that make it longer would cut off each other's rows."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from speedtransfer.errors import StorageError
from speedtransfer.once import fork_safe_lock
from speedtransfer.system import fcntl


class WriteLock:
    """The lock on an open file, until this object is gone; children of fork share it."""

    def __init__(self, handle: int) -> None:
        weakref.finalize(self, _release, handle, os.getpid()).atexit = False


# By device and number of a file: the tables of one process share its lock.
_held: weakref.WeakValueDictionary[tuple[int, int], WriteLock] = weakref.WeakValueDictionary()
_lock = fork_safe_lock()


def lock_for_writing(path: Path) -> WriteLock | None:
    """Lock the file at `path` until the result is gone; None where it cannot be opened, or has no locks.

    Raises
    ------
    StorageError
        Another process has locked it.
    """
    if fcntl is None:
        return None
    with _lock:
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return None  # whoever maps it says why
        found = os.fstat(handle)
        held = _held.get((found.st_dev, found.st_ino))
        if held is not None:
            os.close(handle)
            return held
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise StorageError(
                f"{str(path)!r} is open for writing in another process, whose rows this one would overwrite or cut off; open "
                "it with writable=False, close it there, or share one table (memory='shared')"
            ) from None
        except OSError:  # a file system without locks
            os.close(handle)
            return None
        made = _held[found.st_dev, found.st_ino] = WriteLock(handle)
        return made


def _release(handle: int, process: int) -> None:
    # Children of fork have the same lock, which closing it here would leave to them.
    if os.getpid() == process:
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
