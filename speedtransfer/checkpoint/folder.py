"""The folder of a checkpoint: files with unique names, a manifest that is put in place last, and what may be removed.

Savers hold a lock on each data file until their manifest is in place (or they die), and a lock on the folder while they make
files, commit and clean up. So what is neither in the manifest nor locked is left from a save that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.reading import open_plain
from speedtransfer.errors import InvalidValueError, StorageError, format_bytes

try:
    import fcntl
except ImportError:  # Windows: no locks, and open files cannot be removed there
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.manifest-[0-9a-f]{32}\.json")


def check_target(path: Path) -> None:
    """Raise where a checkpoint at `path` would replace something that is none, or `path` cannot be a folder.

    Raises
    ------
    InvalidValueError
        `path` is a file, or a folder with other content.
    """
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
        if (path / manifest.NAME).is_symlink() or not manifest.is_one(path):
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
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class Saving:
    """One save into the folder `path`, which is made if need be. Leaving without `commit` removes what it has written.

    Raises
    ------
    StorageError
        The folder cannot be made or written.
    """

    def __init__(self, path: Path, roles: list[str], need_bytes: int) -> None:
        self.path, self._need = path, need_bytes
        self._names = {role: f"{role}-{secrets.token_hex(16)}.safetensors" for role in roles}
        self._made = False
        self._stack = contextlib.ExitStack()
        self.files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Saving:
        try:
            with self._storage_errors():
                self._made = not self.path.exists()
                self.path.mkdir(parents=True, exist_ok=True)
                with _exclusive(self.path):
                    for role, name in self._names.items():
                        self.files[role] = self._stack.enter_context(open(self.path / name, "xb"))
                        _lock(self.files[role].fileno())
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._undo()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                with self._storage_errors():
                    raise error
        self._stack.close()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            free = format_bytes(free_bytes(self.path))
            raise StorageError(
                f"cannot save to {str(self.path)!r} ({error.strerror}): it needs {format_bytes(self._need)} and {free} are "
                "free; free some space or choose another path"
            ) from error

    def name(self, role: str) -> str:
        """Return the name of the file of `role`."""
        return self._names[role]

    def commit(self, text: bytes) -> None:
        """Put the manifest `text` in place: from here on this is the checkpoint. Then remove what no manifest names."""
        temporary = self.path / f".manifest-{secrets.token_hex(16)}.json"
        with _exclusive(self.path):
            previous = manifest.names_in(self.path) or set()
            try:
                with open(temporary, "xb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                _sync_folder(self.path)  # the data files are in it before the manifest names them
                os.replace(temporary, self.path / manifest.NAME)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(self.path)
            if self._made:
                _sync_folder(self.path.absolute().parent)
            self._clean(previous)

    def _clean(self, previous: set[str]) -> None:
        current = manifest.names_in(self.path)
        if not current:
            return
        for name in os.listdir(self.path):
            if _ours(name) and name not in current and (name in previous or _abandoned(self.path / name)):
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()

    def _undo(self) -> None:
        with contextlib.suppress(OSError), _exclusive(self.path):
            current = manifest.names_in(self.path)  # names our files where the interruption came after the commit
            for name in () if current is None else set(self._names.values()) - current:
                (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what a buffer still holds may find no room either
            self._stack.close()
        if self._made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Keep other savers out of the folder."""
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _abandoned(path: Path) -> bool:
    """Tell whether no saver holds the file any more; not where it cannot be known."""
    if fcntl is None:
        return True
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(path: Path) -> None:
    if fcntl is None:  # nothing to synchronise a folder by
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
