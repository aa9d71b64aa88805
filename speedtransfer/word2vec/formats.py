"""The files that hold word vectors: word2vec text and binary, and safetensors. All of them are written in a stream."""

from __future__ import annotations

import itertools
import json
import mmap
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import safetensors

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.tables import files

_ROWS_AT_ONCE = 4096
_HEADER_BYTES = 100
_WORD_BYTES = 100_000  # a longer "word" in a binary file means that the reader is lost


class Format(NamedTuple):
    """How to write and read one kind of file."""

    write: Callable[[Path, Sequence[str], np.ndarray], None]
    read: Callable[[Path], tuple[list[str], np.ndarray]]


def find_format(path: Path) -> Format:
    """Return the format that the suffix of `path` names.

    Raises
    ------
    InvalidValueError
        The suffix names none.
    """
    if path.suffix not in FORMATS:
        raise InvalidValueError(
            f"{str(path)!r} ends in {path.suffix!r} but vectors are {', '.join(FORMATS)}; use one of these endings"
        )
    return FORMATS[path.suffix]


def _check_words(words: Sequence[str], path: Path) -> None:
    white = set(string.whitespace)
    for word in words:
        if not word or not white.isdisjoint(word):
            raise InvalidValueError(
                f"word {word!r} is empty or holds white space, which separates words in {path.suffix} files; "
                "save to .safetensors"
            )


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); check the path") from error


def _parse_header(line: bytes, path: Path) -> tuple[int, int]:
    """Return the number of words and of dimensions that the first line of a word2vec file promises."""
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise StorageError(
            f"line 1 of {str(path)!r} is no word2vec header ('words dim') but {line[:40]!r}; pass a file of vectors"
        )
    return int(parts[0]), int(parts[1])


def _check_size(path: Path, least_bytes: int) -> None:
    """Raise where the file is too short for what its header promises, before memory is taken for it."""
    size = path.stat().st_size
    if size < least_bytes:
        raise StorageError(
            f"{str(path)!r} is truncated: it has {size} bytes but its header promises at least {least_bytes}; get it again"
        )


# --- word2vec text ----------------------------------------------------------------------------------------------------


def write_text(path: Path, words: Sequence[str], matrix: np.ndarray) -> None:
    """Write `matrix` in nine digits, enough to read the same float32 numbers back."""
    _check_words(words, path)
    line = "%s" + " %.9g" * matrix.shape[1] + "\n"
    with files.atomic(path) as file:
        file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for start in range(0, len(words), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            rows = zip(words[some], matrix[some].tolist(), strict=True)
            file.write("".join(line % (word, *row) for word, row in rows).encode())


def read_text(path: Path) -> tuple[list[str], np.ndarray]:
    """Read word2vec text. Raises StorageError, which names the line, where the file is damaged."""
    words: list[str] = []
    with _reading(path) as file:
        num_words, dim = _parse_header(file.readline(_HEADER_BYTES), path)
        _check_size(path, num_words * (2 * dim + 2))
        matrix = np.empty((num_words, dim), dtype=np.float32)
        for number, line in enumerate(itertools.islice(file, num_words), start=2):
            word, *values = line.rstrip(b"\r\n ").split(b" ")
            try:
                if len(values) != dim:
                    raise ValueError(f"{len(values)} numbers, not {dim}")
                matrix[number - 2] = list(map(float, values))
                words.append(word.decode())
            except ValueError as error:
                raise StorageError(
                    f"line {number} of {str(path)!r} is no word and vector ({error}); get it again"
                ) from None
        if len(words) < num_words or file.readline().strip():
            more = "more" if len(words) == num_words else f"only {len(words)}"
            raise StorageError(
                f"{str(path)!r} promises {num_words} words in its first line but holds {more}; get it again"
            )
    return words, matrix


# --- word2vec binary --------------------------------------------------------------------------------------------------


def write_binary(path: Path, words: Sequence[str], matrix: np.ndarray) -> None:
    """Write as word2vec.c does: a line end after every vector, which readers skip."""
    _check_words(words, path)
    with files.atomic(path) as file:
        file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for word, row in zip(words, matrix, strict=True):
            file.write(b"%b %b\n" % (word.encode(), row.astype("<f4", copy=False).tobytes()))


def read_binary(path: Path) -> tuple[list[str], np.ndarray]:
    """Read word2vec binary, with or without line ends. Raises StorageError, which names the word, where it is damaged."""
    words: list[str] = []
    with _reading(path) as file:
        num_words, dim = _parse_header(file.readline(_HEADER_BYTES), path)
        _check_size(path, file.tell() + num_words * (4 * dim + 2))
        matrix = np.empty((num_words, dim), dtype=np.float32)
        position = file.tell()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number in range(num_words):
                end = data.find(b" ", position, position + _WORD_BYTES)
                place = f"at word {number + 1} of {num_words}, byte {position}"
                if end < 0 or end + 1 + 4 * dim > len(data):
                    raise StorageError(f"{str(path)!r} ends or is damaged {place}; get the file again")
                try:
                    words.append(data[position:end].lstrip(b"\n").decode())
                except UnicodeDecodeError:
                    raise StorageError(f"{str(path)!r} has no UTF-8 word {place}; get the file again") from None
                position = end + 1 + 4 * dim
                matrix[number] = np.frombuffer(data[end + 1 : position], dtype="<f4")
            if data[position:].strip(b"\n"):
                raise StorageError(
                    f"{str(path)!r} goes on after its {num_words} words, at byte {position}; get it again"
                )
    return words, matrix


# --- safetensors ------------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, words: Sequence[str], matrix: np.ndarray) -> None:
    """Write the tensors `vectors`, `word_ends` and `words`."""
    encoded = [word.encode() for word in words]
    ends = np.cumsum([len(word) for word in encoded], dtype="<i8")
    sizes = {"vectors": matrix.size * 4, "word_ends": len(encoded) * 8, "words": sum(map(len, encoded))}
    shapes = {"vectors": list(matrix.shape), "word_ends": [len(encoded)], "words": [sizes["words"]]}
    header: dict[str, object] = {"__metadata__": {"format": "speedtransfer word vectors 1"}}
    offset = 0
    for name, kind in (("vectors", "F32"), ("word_ends", "I64"), ("words", "U8")):
        header[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": [offset, offset + sizes[name]]}
        offset += sizes[name]
    text = json.dumps(header)
    text += " " * (-(8 + len(text)) % 64)  # rows of a mapped file are then as well aligned as in memory
    with files.atomic(path) as file:
        file.write(len(text).to_bytes(8, "little") + text.encode())
        for start in range(0, len(words), _ROWS_AT_ONCE):
            file.write(matrix[start : start + _ROWS_AT_ONCE].astype("<f4", copy=False).tobytes())
        file.write(ends.tobytes())
        file.write(b"".join(encoded))


def read_safetensors(path: Path) -> tuple[list[str], np.ndarray]:
    """Read what `write_safetensors` wrote; the matrix is mapped, not read."""
    matrix, _ = files.open_mapped(path, writable=False, key="vectors")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            ends = file.get_tensor("word_ends").tolist()
            data = file.get_tensor("words").tobytes()
        words = [data[start:end].decode() for start, end in itertools.pairwise([0, *ends])]
    except (safetensors.SafetensorError, UnicodeDecodeError) as error:
        raise StorageError(f"{str(path)!r} holds no words ({error}); get the file again") from error
    if len(words) != len(matrix):
        raise StorageError(f"{str(path)!r} holds {len(words)} words but {len(matrix)} vectors; get the file again")
    return words, matrix.numpy()


_TEXT = Format(write_text, read_text)
FORMATS = {
    ".txt": _TEXT,
    ".vec": _TEXT,
    ".bin": Format(write_binary, read_binary),
    ".safetensors": Format(write_safetensors, read_safetensors),
}
