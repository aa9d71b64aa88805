"""Read files that may come from a stranger: ordinary ones only, and bounded JSON."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NoReturn

from speedtransfer.errors import StorageError

# Lists, objects and commas of a text in JSON: each value takes tens of bytes of memory.
MAX_JSON_VALUES = 1 << 24
MAX_JSON_BYTES = 100_000_000  # of a header of safetensors, as in that library; an index of files has less

PathLike = str | os.PathLike[str]
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def check_file(path: PathLike, remedy: str = "copy what it gives to a file, and pass that") -> None:
    """Raise `StorageError` where `path` is a pipe, a device or a socket: reading may never end, and writing goes elsewhere."""
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except OSError:
        return  # whoever opens it says why
    if kind is not None:
        raise StorageError(f"{os.fspath(path)!r} is {kind}, not a file; {remedy}")


def open_file(path: PathLike, mode: Literal["rb", "r+b"] = "rb") -> BinaryIO:
    """Open a file that exists; raise `StorageError` where it is a pipe, a device or a socket, and OSError as `open` does."""
    check_file(path)
    return open(path, mode)


@contextlib.contextmanager
def storage_error(what: str, remedy: str) -> Iterator[None]:
    """Raise `StorageError` for another OSError: what cannot be done, why, and the remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what} ({error.strerror or error}); {remedy}") from error


@contextlib.contextmanager
def only_storage_errors(path: PathLike, what: str) -> Iterator[None]:
    """Raise `StorageError` for any error but those of memory: pickles and headers that are no `what` fail in many ways."""
    try:
        yield
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        # That of a damaged gzip file is an OSError of no system call.
        if isinstance(error, OSError) and error.strerror:
            raise StorageError(f"cannot read {os.fspath(path)!r} ({error.strerror}); check the path") from error
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        raise StorageError(f"{os.fspath(path)!r} is not {what} ({reason}); get the file again") from error


def parse_json(text: bytes, finite: bool = False) -> Any:
    """Return what a text in JSON holds; `finite`: without NaN and infinity, which JSON does not know.

    Raises
    ------
    ValueError
        It is no JSON, nests deeper than Python can follow, or holds more than `MAX_JSON_VALUES` values.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"over {MAX_JSON_VALUES} values")
    try:
        return json.loads(text, parse_constant=_no_constant if finite else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def is_plain_name(name: object) -> bool:
    """Tell whether `name` is that of a file in a folder, which leads nowhere else: no path, and not "..".

    The file may still be a link: caches of downloads make links to their files.
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
