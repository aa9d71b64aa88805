"""word2vec binary: a line ``words dim``, then for each word the word, a space and float32 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speedtransfer.errors import StorageError
from speedtransfer.system import replace_file
from speedtransfer.word2vec.formats.common import HEADER_BYTES, Stored, check_room, check_words, parse_header, reading

_WORD_BYTES = 100_000  # a longer "word" means that the reader is lost
_BYTES_AT_ONCE = 1 << 20


def write(path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None = None) -> None:
    """Write as word2vec.c does: a line end after every vector, which readers skip; it has no place for counts."""
    check_words(words, path)
    with replace_file(path) as file:
        file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for word, row in zip(words, matrix, strict=True):
            file.write(b"%b %b\n" % (word.encode(), row.astype("<f4", copy=False).tobytes()))


def read(path: Path, max_words: int | None = None) -> Stored:
    """Read it, with or without line ends. Raises StorageError, which names the word, where the file is damaged."""
    words: list[str] = []
    with reading(path) as file:
        header = file.readline(HEADER_BYTES)
        promised, dim = parse_header(header, path)
        check_room(path, len(header) + promised * (4 * dim + 2))
        num_words = promised if max_words is None else min(promised, max_words)
        matrix = np.empty((num_words, dim), dtype=np.float32)
        data, position, passed = b"", 0, len(header)  # `passed` bytes of the file come before `data`
        for number in range(num_words):
            place = f"at word {number + 1} of {promised}, byte {passed + position}"
            end = data.find(b" ", position, position + _WORD_BYTES)
            while end < 0 or end + 1 + 4 * dim > len(data):
                more = file.read(max(_BYTES_AT_ONCE, 4 * dim))
                data, passed, position = data[position:] + more, passed + position, 0
                end = data.find(b" ", 0, _WORD_BYTES)
                if not more or (end < 0 and len(data) > _WORD_BYTES):
                    raise StorageError(f"{str(path)!r} ends or is damaged {place}; get the file again")
            try:
                words.append(data[position:end].lstrip(b"\n").decode())
            except UnicodeDecodeError:
                raise StorageError(f"{str(path)!r} has no UTF-8 word {place}; get the file again") from None
            matrix[number] = np.frombuffer(data, dtype="<f4", count=dim, offset=end + 1)
            position = end + 1 + 4 * dim
        if num_words == promised and (data[position:] + file.read(_BYTES_AT_ONCE)).strip(b"\n"):
            raise StorageError(
                f"{str(path)!r} goes on after its {promised} words, at byte {passed + position}; get it again"
            )
    return Stored(words, matrix)
