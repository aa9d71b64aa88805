"""A folder of this machine for a checkpoint: files with unique names, a manifest that is put in place last, what may go.

Savers hold a lock on each data file until their manifest is in place (or they die), and a lock on the folder while they make
files, commit and clean up. So what is neither in the manifest nor locked is left from a save that was killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.large_writes import LargeWrites
from speedtransfer.errors import InvalidValueError, ProcessGroupError, StorageError, format_bytes
from speedtransfer.system import create_file, fcntl
from speedtransfer.tables.aside import Scratch
from speedtransfer.untrusted import storage_error


class NewFiles(dict[str, Any]):
    """The files of `new_files` by role."""

    # Whether rank 0 may by now have made them part of a checkpoint: they stay, unless it says that it has not.
    reported = False

    def stay(self, error: BaseException) -> bool:
        """Tell whether they stay where `error` has ended the save."""
        return self.reported and not isinstance(error, ProcessGroupError)


class Folder:
    """A folder of this machine. A `Store` is the same in an object store."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def __str__(self) -> str:
        return str(self.path)

    def file(self, name: str) -> str:
        """Return the path of a file in it."""
        return str(self.path / name)

    def exists(self) -> bool:
        """Tell whether there is anything."""
        return self.path.exists()

    def check_target(self) -> None:
        """Raise `InvalidValueError` where it is a file, or a folder with other content than a checkpoint."""
        path = self.path
        if not os.path.lexists(path):
            return
        if not path.is_dir():
            raise InvalidValueError(
                f"path {str(path)!r} exists and is no folder; choose another path for the checkpoint"
            )
        with storage_error(f"cannot read {str(path)!r}", "choose a folder that you may read"):
            names = os.listdir(path)
        is_link = (path / manifest.NAME).is_symlink()
        manifest.check_target(self, names, lambda: b"" if is_link else self.read_manifest())

    def read_manifest(self) -> bytes:
        """Return the bytes of the manifest, unchecked. StorageError: there is none, or none of such a size."""
        path = self.path / manifest.NAME
        if not self.path.is_dir():
            raise StorageError(f"there is no checkpoint folder {str(self)!r}; check the path")
        with storage_error(f"cannot read {str(path)!r}", "use another checkpoint"):
            try:
                with os.fdopen(_open_plain(path), "rb") as file:
                    return manifest.limited(file.read(manifest.MAX_BYTES + 1), str(path))
            except FileNotFoundError:
                raise StorageError(
                    f"{str(self)!r} holds no {manifest.NAME}, so no finished checkpoint; check the path"
                ) from None

    def named(self) -> set[str] | None:
        """Return the data files that the manifest names, none without a manifest; None if it cannot be read."""
        if not os.path.lexists(self.path / manifest.NAME):
            return set()
        try:
            return manifest.names_in(self.read_manifest())
        except StorageError:
            return None

    def open(self, name: str) -> BinaryIO:
        """Open a file, to read what was there when it was opened. StorageError if that cannot be done."""
        with storage_error(f"cannot open {name!r} of checkpoint {str(self)!r}", "use another checkpoint"):
            return os.fdopen(_open_plain(self.path / name), "rb", buffering=0)

    def stamp(self, name: str, file: BinaryIO) -> object:
        """Return what is the same in processes that have opened the same file, in JSON."""
        found = os.fstat(file.fileno())
        return found.st_ino, found.st_ctime_ns

    def check_room(self, need_bytes: int) -> None:
        """Raise `StorageError` where the disk has less than `need_bytes` free."""
        free = _free_bytes(self.path)
        if need_bytes > free:
            raise StorageError(
                f"a checkpoint at {str(self)!r} needs {format_bytes(need_bytes)} but {format_bytes(free)} are free; free "
                "some space or choose another path (an older checkpoint stays until the new one is whole)"
            )

    def scratch(self) -> Scratch:
        """Return where there may be files for a while, on the same disk."""
        path = self.path.absolute()
        return Scratch(next(each for each in (path, *path.parents) if each.is_dir()))

    def check_sees(self, name: str) -> None:
        """Raise `StorageError` unless the file that rank 0 has made is there in this process too."""
        if not os.path.lexists(self.path / name):
            raise StorageError(
                f"rank 0 has made {name!r} in its folder, which is not in {str(self.path.absolute())!r} here; give all "
                "processes the same path, on a file system that they share"
            )

    @contextlib.contextmanager
    def new_files(self, names: dict[str, str], need_bytes: int, made: bool) -> Iterator[NewFiles]:
        """Make a file for each role, with the permissions of the manifest that is there.

        Where the block raises remove them again, and the folder too, if it is `made` by this save. An OSError, of the block
        too, becomes a StorageError that says that the checkpoint needs `need_bytes`.
        """
        files, path = NewFiles(), self.path
        with contextlib.ExitStack() as stack:
            try:
                path.mkdir(parents=True, exist_ok=True)
                if made:
                    with _exclusive(path.absolute().parent) as sync:
                        sync()
                with _exclusive(path):
                    for role, name in names.items():
                        files[role] = stack.enter_context(LargeWrites(create_file(path / name, path / manifest.NAME)))
                        _lock(files[role].fileno())
                yield files
            except BaseException as error:
                with contextlib.suppress(OSError), _exclusive(path):
                    current = self.named()  # names our files where the interruption came after the commit
                    for name in () if files.stay(error) or current is None else set(names.values()) - current:
                        (path / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # what a buffer still holds may find no room either
                    stack.close()
                if made:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                if isinstance(error, OSError) and not isinstance(error, StorageError):
                    raise StorageError(
                        f"cannot save to {str(path)!r} ({error.strerror}): it needs {format_bytes(need_bytes)} and "
                        f"{format_bytes(_free_bytes(path))} are free; free some space or choose another path"
                    ) from error
                raise

    def finish(self, file: Any) -> None:
        """Write what a file has been given to the disk itself."""
        file.flush()
        os.fsync(file.fileno())

    def commit(self, content: dict[str, Any]) -> None:
        """Put the manifest in place: from here on this is the checkpoint. Then remove what no manifest names."""
        path, text = self.path, manifest.to_bytes(content)
        temporary = path / f".manifest-{os.urandom(16).hex()}.json"
        with _exclusive(path) as sync:
            previous = self.named() or set()
            try:
                with create_file(temporary, path / manifest.NAME) as file:
                    file.write(text)
                    self.finish(file)
                sync()  # the data files are in it before the manifest names them
                os.replace(temporary, path / manifest.NAME)
            finally:
                temporary.unlink(missing_ok=True)
            sync()
            if current := self.named():
                for name in filter(manifest.is_ours, set(os.listdir(path)) - current):
                    if name in previous or _abandoned(path / name):
                        with contextlib.suppress(OSError):
                            (path / name).unlink()


def _open_plain(path: Path) -> int:
    """Return a descriptor of the file at `path`, which must be an ordinary one: no link, no pipe. OSError if it is not."""
    # A pipe would block for ever; a link may lead anywhere.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is no ordinary file")
    return handle


def _free_bytes(path: Path) -> int:
    """Return the room on the disk of `path`, which need not exist yet."""
    path = path.absolute()
    for place in (path, *path.parents):
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return shutil.disk_usage(place).free
    raise FileNotFoundError(str(path))


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[Callable[[], object]]:
    """Keep other savers out of the folder, and yield what writes its list of files to the disk."""
    # Without locks folders cannot be opened, either.
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
        with os.fdopen(_open_plain(path), "rb") as file:
            return _lock(file.fileno())
    except OSError:
        return False
