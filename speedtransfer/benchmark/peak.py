"""The most memory that something takes, in a process of its own: memory that was freed before would hide it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from speedtransfer.benchmark.world import process_context
from speedtransfer.errors import HostMemoryError

LEAST = 0.95  # times its planes is the least that a table can take of which every row has been touched


def in_process(function: Callable[..., dict[str, int]], *arguments: Any, cuda: bool = False) -> dict[str, int]:
    """Return ``function(*arguments)``, called in a process of its own.

    Parameters
    ----------
    function : callable
        Of a module, as the process imports it; it trains a table.
    arguments
    cuda : bool
        The process is to use CUDA, which must not be a fork of any other.

    Raises
    ------
    HostMemoryError
        That process did not succeed: it has no room, or the system has killed it for what it took.
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
    os.environ["SPEEDTRANSFER_CALIBRATE"] = "0"  # which takes buffers of its own
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):  # of the process that started this one
        try:
            answer: dict[str, int] | str = function(*arguments)
        except Exception as error:
            answer = " ".join(str(error).split()) or type(error).__name__
        pipe.send(answer)


def with_page_locked(seen_bytes: int, locked_bytes: int) -> int:
    """Return what a process holds that was seen to take `seen_bytes` and has a table of `locked_bytes` of page-locked memory.

    Such pages belong to the driver, which may or may not have them counted as this process's.
    """
    return seen_bytes if seen_bytes >= LEAST * locked_bytes else seen_bytes + locked_bytes


def reset_peak() -> int:
    """Make the peak what this process holds now, and return it. What has been freed goes back to the system first."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # of the C library of Linux
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # elsewhere the peak so far is the base
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process has held.

    Linux's own record comes first: what `getrusage` says may be that of the process which started this one.
    """
    try:
        return _kilobytes("/proc/self/status", "VmHWM:")
    except (OSError, LookupError):
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kilobytes(path: str, name: str) -> int:
    fields = dict(line.split()[:2] for line in Path(path).read_text().splitlines() if len(line.split()) > 1)
    return int(fields[name]) * 1024
