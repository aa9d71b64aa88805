"""This machine (memory, processor, caches), how this program was started, and files replaced whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.units import parse_bytes
from speedtransfer.untrusted import PathLike, check_file

try:
    import fcntl as fcntl
except ImportError:  # Windows: no such locks, and open files can be neither removed nor made longer or shorter
    fcntl = None  # type: ignore[assignment]


def program() -> str:
    """Return what starts this command line again from this folder: ``speedtransfer``, or with the path it was started by."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("speedtransfer", "__main__.py"):
        return f"{_as_typed(Path(sys.executable))} -m speedtransfer"
    return _as_typed(path) if path.name == "speedtransfer" else "speedtransfer"


def _as_typed(path: Path) -> str:
    """Return the name of a program on PATH, else its path, from this folder where it is below it."""
    if shutil.which(path.name) == str(path):
        return path.name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def physical_bytes() -> int:
    """Return the bytes of memory this machine, or the container it runs in, has (0 where the system does not say).

    SPEEDTRANSFER_HOST_BYTES in the environment overrides it, for a machine whose memory grows as it is used;
    InvalidValueError: it is no size.
    """
    override = os.environ.get("SPEEDTRANSFER_HOST_BYTES", "")
    return _bytes_given(override) if override else _physical_bytes(int(time.monotonic()))


@functools.lru_cache(maxsize=4)
def _bytes_given(size: str) -> int:
    try:
        return max(1, int(parse_bytes(size)))
    except InvalidValueError as error:
        raise InvalidValueError(f"SPEEDTRANSFER_HOST_BYTES in the environment is {error}") from None


@functools.lru_cache(maxsize=1)
def _physical_bytes(second: int) -> int:
    """Return what the system says, read once in each `second`: a tenth of a millisecond, and every table asks."""
    try:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    return min([have, *(group.limit for group in _limits())])


def available_bytes() -> int:
    """Return the bytes of memory that this process may take without swapping, as the system estimates it.

    What others hold is not in it, and neither is what the control groups of this process hold of their limits.
    """
    have = physical_bytes()
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min([have, int(line.split()[1]) * 1024, *map(_left, _limits())])
    return have // 2


class _Group(NamedTuple):
    """A control group of this process that limits its memory: what it may hold, its folder, and what its files are called."""

    limit: int
    folder: Path
    held: str
    droppable: str


# Control groups of version 2 and 1: where they are, and what their files of a limit and of what is held are called, and the
# line that says how much of that is pages of files which can be let go of.
_GROUPS = {
    "/sys/fs/cgroup": ("memory.max", "memory.current", "inactive_file"),
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _limits() -> Iterator[_Group]:
    """Yield the control groups of this process that limit its memory, those around it among them."""
    for root, (limit_file, held, droppable) in _GROUPS.items():
        for parts in [(), *_own_groups("" if root == "/sys/fs/cgroup" else "memory")]:
            folder = Path(root, *parts)
            with contextlib.suppress(OSError):
                limit = Path(folder, limit_file).read_text().strip()
                if limit.isdigit():
                    yield _Group(int(limit), folder, held, droppable)


def _own_groups(controller: str) -> list[tuple[str, ...]]:
    """Return the path of this process's group and of those around it, below the root; version 2 has no controller's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                parts = Path(path).parts[1:]
                return [parts[: depth + 1] for depth in range(len(parts))]
    return []


def _left(group: _Group) -> int:
    """Return what is left of a group's limit, with pages of files that it can let go of."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        held = int(Path(group.folder, group.held).read_text())
        lines = Path(group.folder, "memory.stat").read_text().splitlines()
        files = next(int(line.split()[1]) for line in lines if line.startswith(f"{group.droppable} "))
        return max(0, group.limit - held + files)
    return group.limit


def cpu_model() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Return the extensions that the system lists of the processor, such as "avx512f"; none where it lists none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    # x86 calls them flags, Arm features.
    listed = [line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features"))]
    return frozenset(listed[0]) if listed else frozenset()


def cache_folder() -> Path:
    """Return $SPEEDTRANSFER_CACHE, or `speedtransfer` in the user's cache folder; RuntimeError for a user without a home."""
    folder = os.environ.get("SPEEDTRANSFER_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "speedtransfer")


def create_file(path: Path, replaced: PathLike) -> BufferedWriter:
    """Create the file at `path`, which must not exist, with the permissions of `replaced`, if there is such a file."""
    mode = _mode_of(replaced)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    # The umask is that of all threads: it is neither changed nor asked for.
    file = open(path, "xb", opener=opener)  # noqa: SIM115
    keep_mode(path, replaced)
    return file


def keep_mode(path: PathLike, replaced: PathLike) -> None:
    """Give the file at `path` the permissions of `replaced`, if there is such a file."""
    mode = _mode_of(replaced)
    if mode is not None:
        # Not all file systems have permissions.
        with contextlib.suppress(OSError):
            os.chmod(path, mode)


def _mode_of(path: PathLike) -> int | None:
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    except OSError:
        return None


def check_writable(path: Path, remedy: str = "choose a folder you may write to") -> Path:
    """Return `path` once its folder is there and can be written to; raises StorageError, with `remedy`, where it cannot."""
    if path.is_dir():
        raise StorageError(f"cannot write {str(path)!r} (it is a folder); name the file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r} ({error.strerror}); {remedy}") from error


@contextlib.contextmanager
def replace_file(path: Path, remedy: str = "") -> Iterator[BufferedWriter]:
    """Open a temporary file beside `path` for writing; rename it into place once all of it is on the disk.

    It gets the permissions of the file that it replaces.

    Raises
    ------
    StorageError
        It cannot be written; the message ends with `remedy`. The old file, if there is one, is still there.
    """
    advice = remedy or "choose a folder you may write to"
    check_file(path, "choose another path")
    name = path.with_name(f".{path.name}.{secrets.token_urlsafe(6)}") if path.name else path
    made = False
    try:
        with create_file(name, path) as file:
            made, advice = True, remedy or "free some space or choose another path"
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r} ({error.strerror}); {advice}") from error
    finally:
        if made and os.path.exists(name):
            os.unlink(name)
