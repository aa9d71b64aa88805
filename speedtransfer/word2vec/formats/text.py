"""Vectors as text: word2vec's, with a first line ``words dim``, and GloVe's, the same without that line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.system import replace_file
from speedtransfer.word2vec.formats.common import (
    HEADER_BYTES,
    ROWS_AT_ONCE,
    Stored,
    check_room,
    check_words,
    parse_header,
    reading,
)


def write(
    path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None = None, header: bool = True
) -> None:
    """Write `matrix` in nine digits, enough to read the same float32 numbers back; text has no place for counts."""
    check_words(words, path)
    line = "%s" + " %.9g" * matrix.shape[1] + "\n"
    with replace_file(path) as file:
        if header:
            file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for start in range(0, len(words), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            rows = zip(words[some], matrix[some].tolist(), strict=True)
            file.write("".join(line % (word, *row) for word, row in rows).encode())


def write_glove(path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None = None) -> None:
    """Write without the first line. Raises InvalidValueError where readers could not tell what such a file holds."""
    if not words or matrix.shape[1] < 2:
        raise InvalidValueError(
            f"GloVe text, without a header, needs a word and a dim of 2 at least but there are {len(words)} words of dim "
            f"{matrix.shape[1]}; save to .txt"
        )
    write(path, words, matrix, header=False)


def read(path: Path, max_words: int | None = None) -> Stored:
    """Read word2vec or GloVe text: two fields in the first line are a header, more are a word and its vector.

    GloVe's own files hold a few words with spaces (``. . .``); as word2vec's readers end a word there, so do these where
    there is a header.

    Raises
    ------
    StorageError
        The file is missing or damaged; the message names the line.
    """
    with reading(path) as file:
        first = file.readline(HEADER_BYTES)
        if len(first.split()) > 2 or len(first) == HEADER_BYTES:  # no header is as long
            num_words, dim, header = *_measure(path), False
            file.seek(0)
            promised = num_words
        else:
            promised, dim = parse_header(first, path)
            header = True
        promise = (
            "its header promises" if header else f"{promised} vectors as long as the first one, {dim} numbers, take"
        )
        check_room(path, promised * (2 * dim + 2) - (not header), promise)
        num_words = promised if max_words is None else min(promised, max_words)
        words: list[str] = []
        matrix = np.empty((num_words, dim), dtype=np.float32)
        lines = ((n, line) for n, line in enumerate(file, start=1 + header) if not line.isspace())
        for number, line in itertools.islice(lines, num_words):
            try:
                word, values = _split(line, dim, spaces=not header)
                matrix[len(words)] = list(map(float, values))
                words.append(word.decode())
            except ValueError as error:
                raise StorageError(
                    f"line {number} of {str(path)!r} is no word and vector ({error}); get it again"
                ) from None
        more = num_words == promised and next(lines, None) is not None
        if len(words) < num_words or more:
            holds = "more" if more else f"only {len(words)}"
            raise StorageError(
                f"{str(path)!r} promises {promised} words in its first line but holds {holds}; get it again"
            )
    return Stored(words, matrix)


def _measure(path: Path) -> tuple[int, int]:
    """Return how many lines that are not blank a file without a header has, and the numbers in its first one."""
    with reading(path) as file:
        dim = len(file.readline().rstrip(b"\r\n ").split(b" ")) - 1
        return 1 + sum(1 for line in file if not line.isspace()), dim


def _split(line: bytes, dim: int, spaces: bool) -> tuple[bytes, list[bytes]]:
    """Return the word and its numbers; with `spaces`, fields too many belong to the word unless one is a number."""
    word, *values = line.rstrip(b"\r\n ").split(b" ")
    extra = len(values) - dim
    if spaces and extra > 0 and not any(map(_is_number, values[:extra])):
        word, values = b" ".join([word, *values[:extra]]), values[extra:]
    if len(values) != dim:
        raise ValueError(f"{len(values)} numbers, not {dim}")
    return word, values


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
