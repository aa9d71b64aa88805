"""This machine: its memory, its processor, the folder for caches, and files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

from speedtransfer.errors import StorageError


def physical_bytes() -> int:
    """Return the bytes of memory this machine, or the container it runs in, has (0 where the system does not say).

    SPEEDTRANSFER_HOST_BYTES in the environment overrides it, for a machine whose memory grows as it is used.
    """
    override = os.environ.get("SPEEDTRANSFER_HOST_BYTES", "")
    if override:
        with contextlib.suppress(ValueError, OverflowError):
            return int(float(override))
    try:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups of version 2 and 1
        with contextlib.suppress(OSError):
            limit = Path("/sys/fs/cgroup", name).read_text().strip()
            have = min(have, int(limit)) if limit.isdigit() else have
    return have


def available_bytes() -> int:
    """Return the bytes of memory that may be taken without swapping, as the system estimates it."""
    have = physical_bytes()
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(have, int(line.split()[1]) * 1024)
    return have // 2


def cpu_model() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return $SPEEDTRANSFER_CACHE, or `speedtransfer` in the user's cache folder; RuntimeError for a user without a home."""
    folder = os.environ.get("SPEEDTRANSFER_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "speedtransfer")


@contextlib.contextmanager
def replace_file(path: Path, remedy: str = "") -> Iterator[BufferedWriter]:
    """Open a temporary file beside `path` for writing; rename it into place once all of it is on the disk.

    Raises
    ------
    StorageError
        It cannot be written; the message ends with `remedy`. The old file, if there is one, is still there.
    """
    advice = remedy or "choose a folder you may write to"
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        advice = remedy or "free some space or choose another path"
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner reads
        os.replace(name, path)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r} ({error.strerror}); {advice}") from error
    finally:
        if name is not None and os.path.exists(name):
            os.unlink(name)
