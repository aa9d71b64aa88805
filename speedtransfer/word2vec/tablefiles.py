"""The files and folders that a model's tables make, so that a model which comes to nothing leaves none of them behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from speedtransfer.errors import InvalidValueError, StorageError

NAMES = ("input", "output")


def table_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the files of a model's tables, there or not, with memory "mmap" and `folder`."""
    return [] if folder is None else [Path(folder) / f"{name}.safetensors" for name in NAMES]


def check_no_tables(folder: str | os.PathLike[str]) -> None:
    """Raise `StorageError` where there are tables in `folder`: before a long corpus is read, not after it."""
    for file in table_files(folder):
        if file.exists():
            raise StorageError(
                f"table {str(file)!r} of another run exists and would be overwritten; delete it, or choose another path"
            )


def remove_tables(folder: str | os.PathLike[str] | None) -> None:
    """Remove the tables in `folder`, if any; raise `StorageError` where that fails."""
    for table in table_files(folder):
        try:
            table.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot replace table {str(table)!r} ({error.strerror}); check the permissions of its folder"
            ) from error


class TableFiles:
    """Where the tables of a model have their files; makes the folder for them.

    Parameters
    ----------
    memory : str
        Of the tables; only "mmap" has files.
    path : path-like, optional
        The folder.

    Raises
    ------
    InvalidValueError
        `memory` is "mmap" and `path` is missing.
    StorageError
        The folder cannot be made.
    """

    def __init__(self, memory: str, path: str | os.PathLike[str] | None) -> None:
        self._folder = None if path is None else Path(path)
        self._files: list[Path] = []
        self._folders: list[Path] = []  # that were missing, the innermost first
        if memory != "mmap":
            return
        if self._folder is None:
            raise InvalidValueError("memory='mmap' needs path, the folder for the table files; pass path='tables'")
        self._folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.discard()
            raise StorageError(
                f"cannot make folder {str(self._folder)!r} ({error.strerror}); choose another path"
            ) from error

    def path_of(self, name: str) -> Path | None:
        """Return the path for the file of table `name`; None where there is no folder."""
        return None if self._folder is None else self._folder / f"{name}.safetensors"

    def made(self, path: Path | None) -> None:
        """Note that the file at `path` is one of ours."""
        if path is not None:
            self._files.append(path)

    def discard(self) -> None:
        """Remove the files that were noted, and the folders that were made for them where nothing else is in them."""
        for path in self._files:
            path.unlink(missing_ok=True)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._files, self._folders = [], []
