"""Peak memory of a function in its own process, where memory freed earlier cannot hide it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from speedtransfer.benchmark.world import process_context
from speedtransfer.errors import HostMemoryError

LEAST = 0.95  # a table whose rows have all been touched takes at least this many times its planes


def in_process(function: Callable[..., dict[str, int]], *arguments: Any, cuda: bool = False) -> dict[str, int]:
    """Return ``function(*arguments)``, called in its own process; with `cuda` a new one, as CUDA does not survive a fork.

    Raises
    ------
    HostMemoryError
        The process failed, or the system has killed it for its memory.
    """
    context: Any = multiprocessing.get_context("spawn") if cuda else process_context(function.__module__)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise HostMemoryError(f"the process that trains it ended with code {process.exitcode}") from None
    finally:
        ours.close()
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise HostMemoryError(f"the process that trains it failed: {answer}")
    found: dict[str, int] = answer
    return found


def _answer(pipe: Connection, function: Callable[..., dict[str, int]], arguments: tuple[Any, ...]) -> None:
    # The parent process handles Ctrl-C.
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):
        try:
            answer: dict[str, int] | str = function(*arguments)
        except Exception as error:
            answer = " ".join(str(error).split()) or type(error).__name__
        pipe.send(answer)


def with_page_locked(seen_bytes: int, locked_bytes: int) -> int:
    """Return the memory of a process, given `seen_bytes`, with a page-locked table of `locked_bytes`.

    Page-locked memory belongs to the driver and may or may not count as the process's.
    """
    return seen_bytes if seen_bytes >= LEAST * locked_bytes else seen_bytes + locked_bytes


def reset_peak() -> int:
    """Free unused memory, reset the peak to the current memory of this process (on Linux), and return it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Not on Linux, where this may be the peak of the parent process.
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
