"""Folders that a run writes: checked before any work, filled at the end in one go; those of tables at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from speedtransfer.errors import InvalidValueError, StorageError, check_no_url
from speedtransfer.system import keep_mode
from speedtransfer.word2vec.formats import FORMATS, NGRAMS, VECTORS

VOCABULARY = "vocab.txt"
SETTINGS = "settings.json"
PICTURE = "words.png"
OWN_FILES = frozenset({VOCABULARY, SETTINGS, PICTURE, NGRAMS, *(VECTORS + suffix for suffix in FORMATS)})
# Folders within that of a run: its state, the files of memory "mmap", TensorBoard's.
CHECKPOINT, TABLES, BOARD = "checkpoint", "tables", "tensorboard"
TABLE_NAMES = ("input", "output")
OWN_FOLDERS = frozenset({CHECKPOINT, TABLES, BOARD})


class OutputFolder:
    """A new folder, or one of an earlier run that is replaced. Making it checks that it can be written, and changes nothing.

    Parameters
    ----------
    path : path-like
        Folders above it are made as needed.
    overwrite : bool
        Replace the files of an earlier run if `path` exists.
    remedy : str
        What to do where `path` exists and `overwrite` is False, for the message.
    only_own : bool
        Refuse a folder that holds anything but the files of an earlier run. False: leave the rest as it is.
    within : iterable of path-like
        Other files of this run; those in `path` are no strangers there.

    Raises
    ------
    InvalidValueError
        `path` exists and may not be overwritten.
    StorageError
        The folder cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        overwrite: bool = False,
        remedy: str = "",
        only_own: bool = False,
        within: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        check_no_url(path, "output")
        self.path, self._overwrite = Path(path), overwrite
        exists = self.path.exists()
        if exists and not self.path.is_dir():
            raise InvalidValueError(f"output folder {str(path)!r} exists and is a file; choose another folder")
        if exists and not overwrite:
            raise InvalidValueError(f"output folder {str(path)!r} exists; choose another folder{remedy}")
        if only_own and exists:
            below = [Path(os.path.relpath(folder, self.path)).parts[:1] for folder in within]
            own = (OWN_FILES | OWN_FOLDERS).union(*below)
            others = sorted(set(os.listdir(self.path)) - own)
            if others:
                raise InvalidValueError(
                    f"output folder {str(path)!r} holds {others[0]!r}, not created by speedtransfer; choose another folder"
                )
        if exists and not os.access(self.path, os.W_OK | os.X_OK):
            raise self._cannot_make("Permission denied")
        self._make_staging().rmdir()  # a run that is killed meanwhile leaves nothing behind

    @property
    def holds_a_run(self) -> bool:
        """Whether files of a run are in `path` already."""
        return any((self.path / name).exists() for name in OWN_FILES)

    def _make_staging(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=_existing(self.path.parent), prefix=f".{self.path.name}."))
        except OSError as error:
            raise self._cannot_make(error.strerror) from error

    def _cannot_make(self, why: str | None) -> StorageError:
        return StorageError(f"cannot make output folder {str(self.path)!r} ({why}); choose a place you may write to")

    def fill(self, save: Callable[[Path], None]) -> None:
        """Have `save` write files to a folder beside it, and move them into place, where those of an earlier run go.

        Where `save` fails nothing is changed. Where another run has filled the folder meanwhile, and may not be overwritten,
        `path` becomes a new one beside it.
        """
        staging = self._make_staging()
        try:
            save(staging)
            self._move(staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _move(self, staging: Path) -> None:
        wanted, number = self.path, 1
        while not self._overwrite and self.holds_a_run:
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            written = os.listdir(staging)
            for name in written:
                keep_mode(staging / name, self.path / name)
                os.replace(staging / name, self.path / name)
            for name in OWN_FILES.difference(written):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write to {str(self.path)!r} ({error.strerror}); choose a place you may write to"
            ) from error


def _existing(path: Path) -> Path:
    """Return the folder `path`, or the nearest above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_writable(path: Path, what: str) -> None:
    """Raise `StorageError` unless the folder `path` can be written, or made; nothing is."""
    above = _existing(path)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {what} to {str(path)!r}; choose a folder you may write to")


class TableFiles:
    """The files of a model's two tables with memory "mmap", there or not, in the folder `path`; None: there are none."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._folder = None if path is None else Path(path)
        self.paths = {} if path is None else {name: Path(path, f"{name}.safetensors") for name in TABLE_NAMES}
        self.made: list[Path] = []
        self._folders: list[Path] = []  # that were missing, the innermost first

    def check_none(self) -> None:
        """Raise `StorageError` where one exists: before a long corpus is read, not after it."""
        for file in self.paths.values():
            if file.exists():
                raise StorageError(
                    f"table {str(file)!r} of another run exists and would be overwritten; delete it, or choose another path"
                )

    def remove(self) -> None:
        """Remove those that exist; raise `StorageError` where that fails."""
        for file in self.paths.values():
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(
                    f"cannot replace table {str(file)!r} ({error.strerror}); check the permissions of its folder"
                ) from error

    def make_folder(self) -> None:
        """Make the folder where it is missing, or raise `StorageError`. A file belongs into `made` once it is."""
        if self._folder is None:
            return
        self._folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.discard()
            raise StorageError(
                f"cannot make folder {str(self._folder)!r} ({error.strerror}); choose another path"
            ) from error

    def discard(self) -> None:
        """Remove the files that were made, and the folders that were made for them where nothing else is in them."""
        for path in self.made:
            path.unlink(missing_ok=True)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        self.made, self._folders = [], []
