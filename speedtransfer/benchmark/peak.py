"""The most memory that something takes, in a process of its own: memory that was freed before would hide it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from speedtransfer.errors import HostMemoryError

LEAST = 0.95  # times its planes is the least that a table can take of which every row has been touched


def from_process(module: str, arguments: Sequence[str], what: str) -> dict[str, int]:
    """Run ``python -m MODULE ARGUMENTS`` and return the JSON that its last line is.

    Parameters
    ----------
    module : str
    arguments : sequence of str
    what : str
        What the process does, for the error: "the process that trains it".

    Raises
    ------
    HostMemoryError
        That process did not succeed: it has no room, or the system has killed it for what it took.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "SPEEDTRANSFER_CALIBRATE": "0"}  # which takes buffers of its own
    argv = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HostMemoryError(f"{what} ended with code {done.returncode}: {last}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


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
