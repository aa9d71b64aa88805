"""Words out of text: files, folders of files, standard input; in blocks, never a whole file nor a whole line in memory."""

from __future__ import annotations

import codecs
import gzip
import itertools
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Protocol, TypeAlias

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError

CHUNK_BYTES = 1 << 20
SUFFIXES = (".txt", ".gz", ".xz")


class Readable(Protocol):
    """An open binary file, as far as it is needed here."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes at most, none at the end."""
        ...


Source: TypeAlias = str | os.PathLike[str] | Readable


def name_of(source: Source) -> str:
    """Return how messages call `source`."""
    if isinstance(source, str | os.PathLike):
        return "standard input" if os.fspath(source) == "-" else repr(os.fspath(source))
    return repr(str(getattr(source, "name", "the given file")))


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Return the files that `source` (a file or a folder) stands for, in reading order.

    Raises
    ------
    StorageError
        There is no such file or folder.
    InvalidValueError
        A folder without any .txt, .gz or .xz file.
    """
    path = Path(source)
    if not path.is_dir():
        if not path.exists():
            raise StorageError(
                f"{str(path)!r} does not exist; pass a text file, a folder of them, or - for standard input"
            )
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise InvalidValueError(f"folder {str(path)!r} holds no {', '.join(SUFFIXES)} file; pass the files' own folder")
    return files


def iter_words(source: Source, chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[str]]:
    """Yield the words of `source`, in order, as lists of those that end in one block of `chunk_bytes` bytes.

    Raises
    ------
    StorageError, InvalidValueError
        As :class:`Corpus`; the message names the file and the byte.
    InvalidTypeError
        `source` is no path and no binary file.
    """
    if isinstance(source, str | os.PathLike):
        if os.fspath(source) == "-":
            yield from _split(sys.stdin.buffer, name_of(source), chunk_bytes)
            return
        for path in find_files(source):
            try:
                with _open(path) as file:
                    yield from _split(file, repr(str(path)), chunk_bytes)
            except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
                raise StorageError(
                    f"{str(path)!r} is damaged or no {path.suffix} file ({error}); fetch it again"
                ) from error
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(
                    f"cannot read {str(path)!r} ({error.strerror or error}); check its permissions"
                ) from error
    elif hasattr(source, "read"):
        yield from _split(source, name_of(source), chunk_bytes)
    else:
        raise InvalidTypeError(
            f"corpus is a {type(source).__name__} but must be a path, '-' or a binary file; pass a path"
        )


def _open(path: Path) -> gzip.GzipFile | lzma.LZMAFile | BufferedReader:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _split(file: Readable, name: str, chunk_bytes: int) -> Iterator[list[str]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no part of the first word
    begun = ""  # a word may go on in the next block
    position = 0
    for block in itertools.chain(iter(lambda: file.read(chunk_bytes), b""), [b""]):
        if not isinstance(block, bytes):
            raise InvalidTypeError(f"{name} gives {type(block).__name__} but a corpus is bytes; open it in mode 'rb'")
        if b"\0" in block:
            at = position + block.index(b"\0")
            raise InvalidValueError(
                f"{name} is no text: byte {at} is NUL; pass UTF-8 text (decompress it, or use iconv)"
            )
        pending = len(decoder.getstate()[0])
        try:
            text = begun + decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = max(position - pending + error.start, 0)
            raise InvalidValueError(
                f"{name} is no UTF-8 text: {error.reason} at byte {at}; convert it with iconv"
            ) from None
        position += len(block)
        words = text.split()
        begun = words.pop() if block and words and not text[-1].isspace() else ""
        if len(begun) > chunk_bytes:
            raise InvalidValueError(
                f"{name} holds a word of over {chunk_bytes} characters; put white space between the words"
            )
        if words:
            yield words
