"""What the readers and writers of vector files share."""

from __future__ import annotations

import gzip
import string
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from speedtransfer.errors import InvalidValueError, StorageError

HEADER_BYTES = 100  # a header is shorter
ROWS_AT_ONCE = 4096
_MOST_PACKED = 1032  # deflate makes nothing smaller than this share of it
_MAX_DIM = 2**31


class Stored(NamedTuple):
    """What a file holds: words, their vectors (num_words, dim) and how often each occurred, where it says so."""

    words: list[str]
    matrix: np.ndarray
    counts: np.ndarray | None = None


def check_words(words: Sequence[str], path: Path) -> None:
    """Raise where a word is empty, or holds white space, which separates words in text and binary files, or is no UTF-8."""
    white = set(string.whitespace)
    for word in words:
        encode(word)
        if not word or not white.isdisjoint(word):
            raise InvalidValueError(
                f"word {word!r} is empty or holds white space, which separates words in {path.suffix} files; "
                "save to .safetensors"
            )


def encode(word: str) -> bytes:
    """Return `word` as UTF-8. Raises InvalidValueError where it holds half a character, which Python allows in a str."""
    try:
        return word.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"word {word!r} cannot be written as UTF-8 ({error.reason}); read the text as UTF-8, or leave it out"
        ) from None


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open `path`, unpacked where it ends in .gz; what fails while it is read is a StorageError."""
    try:
        with open(path, "rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except StorageError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StorageError(f"{str(path)!r} is no whole gzip file ({error}); get it again") from error
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror or error}); check the path") from error


def parse_header(line: bytes, path: Path) -> tuple[int, int]:
    """Return the number of words and of dimensions that the first line of a word2vec file promises."""
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise StorageError(
            f"line 1 of {str(path)!r} is no word2vec header ('words dim') but {line[:40]!r}; pass a file of vectors"
        )
    num_words, dim = map(int, parts)
    if dim >= _MAX_DIM:
        raise StorageError(
            f"line 1 of {str(path)!r} promises vectors of {dim} numbers, which no file has; get it again"
        )
    return num_words, dim


def check_room(path: Path, least_bytes: int, promise: str = "its header promises") -> None:
    """Raise where the file is too short for the vectors it promises, before memory is taken for them."""
    size = path.stat().st_size
    if size * (_MOST_PACKED if path.suffix == ".gz" else 1) < least_bytes:
        raise StorageError(
            f"{str(path)!r} is truncated: it has {size} bytes but {promise} at least {least_bytes}; get it again"
        )
