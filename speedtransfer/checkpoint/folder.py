"""The folder of a checkpoint: files with unique names, a manifest that is put in place last, and what may be removed.

Savers hold a lock on each data file until their manifest is in place (or they die), and a lock on the folder while they make
files, commit and clean up. So what is neither in the manifest nor locked is left from a save that was killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.tensors import open_plain
from speedtransfer.errors import InvalidValueError, ProcessGroupError, StorageError, format_bytes
from speedtransfer.system import create_file

try:
    import fcntl
except ImportError:  # Windows: no locks, folders cannot be opened, and open files cannot be removed there
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.manifest-[0-9a-f]{32}\.json")


def check_target(path: Path) -> None:
    """Raise `InvalidValueError` where `path` is a file, or a folder with other content than a checkpoint."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise InvalidValueError(f"path {str(path)!r} exists and is no folder; choose another path for the checkpoint")
    try:
        foreign = sorted(name for name in os.listdir(path) if not _ours(name))
    except OSError as error:
        raise StorageError(
            f"cannot read {str(path)!r} ({error.strerror}); choose a folder that you may read"
        ) from error
    if os.path.lexists(path / manifest.NAME):
        if (path / manifest.NAME).is_symlink() or manifest.peek(path).get("format") != manifest.FORMAT:
            raise InvalidValueError(
                f"path {str(path)!r} holds a {manifest.NAME} that is none of a checkpoint; choose another path, or remove it"
            )
    elif foreign:
        raise InvalidValueError(
            f"path {str(path)!r} holds {foreign[0]!r} and no checkpoint; choose an empty or new folder"
        )


def _ours(name: str) -> bool:
    return bool(manifest.FILE_NAME.fullmatch(name) or _TEMPORARY.fullmatch(name))


def free_bytes(path: Path) -> int:
    """Return the room on the disk of `path`, which need not exist yet."""
    path = path.absolute()
    for place in (path, *path.parents):
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return shutil.disk_usage(place).free
    raise FileNotFoundError(str(path))


def check_room(path: Path, need_bytes: int) -> None:
    """Raise `StorageError` where the disk of `path` has less than `need_bytes` free."""
    free = free_bytes(path)
    if need_bytes > free:
        raise StorageError(
            f"a checkpoint at {str(path)!r} needs {format_bytes(need_bytes)} but {format_bytes(free)} are free; free some "
            "space or choose another path (an older checkpoint stays until the new one is whole)"
        )


class NewFiles(dict[str, BinaryIO]):
    """The files of `new_files` by role."""

    # Whether rank 0 may by now have made them part of a checkpoint: they stay, unless it says that it has not.
    reported = False


@contextlib.contextmanager
def new_files(path: Path, names: dict[str, str], need_bytes: int, made: bool) -> Iterator[NewFiles]:
    """Make a file for each role in the folder `path`, with the permissions of the manifest that is there.

    Where the block raises remove them again, and the folder too, if it is `made` by this save. An OSError, of the block too,
    becomes a StorageError that says that the checkpoint needs `need_bytes`.
    """
    files = NewFiles()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if made:
                with _exclusive(path.absolute().parent) as sync:
                    sync()
            with _exclusive(path):
                for role, name in names.items():
                    files[role] = stack.enter_context(create_file(path / name, path / manifest.NAME))
                    _lock(files[role].fileno())
            yield files
        except BaseException as error:
            removed = not files.reported or isinstance(error, ProcessGroupError)
            with contextlib.suppress(OSError), _exclusive(path):
                current = manifest.names_in(path)  # names our files where the interruption came after the commit
                for name in set(names.values()) - current if removed and current is not None else ():
                    (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what a buffer still holds may find no room either
                stack.close()
            if made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(
                    f"cannot save to {str(path)!r} ({error.strerror}): it needs {format_bytes(need_bytes)} and "
                    f"{format_bytes(free_bytes(path))} are free; free some space or choose another path"
                ) from error
            raise


def commit(path: Path, text: bytes) -> None:
    """Put the manifest `text` in place: from here on this is the checkpoint. Then remove what no manifest names."""
    temporary = path / f".manifest-{os.urandom(16).hex()}.json"
    with _exclusive(path) as sync:
        previous = manifest.names_in(path) or set()
        try:
            with create_file(temporary, path / manifest.NAME) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            sync()  # the data files are in it before the manifest names them
            os.replace(temporary, path / manifest.NAME)
        finally:
            temporary.unlink(missing_ok=True)
        sync()
        if current := manifest.names_in(path):
            for name in filter(_ours, set(os.listdir(path)) - current):
                if name in previous or _abandoned(path / name):
                    with contextlib.suppress(OSError):
                        (path / name).unlink()


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[Callable[[], object]]:
    """Keep other savers out of the folder, and yield what writes its list of files to the disk."""
    if fcntl is None:
        yield lambda: None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, wait=True)
        yield functools.partial(os.fsync, handle)
    finally:
        os.close(handle)


def _lock(handle: int, wait: bool = False) -> bool:
    """Lock a file until it is closed and tell whether that worked: not on a filesystem without locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _abandoned(path: Path) -> bool:
    """Tell whether no saver holds the file any more; not where it cannot be known."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return _lock(file.fileno())
    except OSError:
        return False
