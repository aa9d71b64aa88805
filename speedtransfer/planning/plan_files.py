"""Files that a plan is written to: checked before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from speedtransfer.errors import StorageError
from speedtransfer.system import replace_file


def check_writable(path: Path | None) -> None:
    """Raise `StorageError` if no file can be written there; None: nothing is."""
    if path is None:
        return
    if path.is_dir():
        raise StorageError(f"cannot write {str(path)!r} (it is a folder); pass the name of a file")
    folder = path.parent
    if not folder.is_dir():
        raise StorageError(
            f"cannot write {str(path)!r} (there is no folder {str(folder)!r}); make it, or pass another path"
        )
    if not os.access(folder, os.W_OK):
        raise StorageError(f"cannot write {str(path)!r} (the folder is not writable); choose a folder you may write to")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    check_writable(path)
    with replace_file(path) as file:
        file.write(content)
