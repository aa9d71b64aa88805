"""Vectors as word2vec text and binary, which begin with a line ``words dim``, and as GloVe text, without it."""

from __future__ import annotations

import collections
import gzip
import itertools
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.system import replace_file
from speedtransfer.untrusted import only_storage_errors, open_file

HEADER_BYTES = 100  # a header is shorter
ROWS_AT_ONCE = 4096
_MOST_PACKED = 1032  # deflate makes nothing smaller than this share of it
_WORD_BYTES = 100_000  # a longer "word" means that the reader is lost
_BYTES_AT_ONCE = 1 << 20
_MAX_DIM = 2**24
_NUMBER_BYTES = 64  # a number takes fewer on the average, a space too
_FIRST_LINE_BYTES = 1 << 24  # of a file without a header, which does not say how many numbers a line has
_MEASURED_LINES = 1000


class Stored(NamedTuple):
    """The content of a file: words, their vectors (num_words, dim) and, where it has them, their counts."""

    words: list[str]
    matrix: np.ndarray
    counts: np.ndarray | None = None

    def first(self, max_words: int | None) -> Stored:
        """Return what is stored of the first words."""
        return Stored(*(part if part is None else part[:max_words] for part in self))  # type: ignore[arg-type]


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
    with only_storage_errors(path, "a whole file of words"), open_file(path) as file:
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def parse_header(line: bytes, path: Path) -> tuple[int, int]:
    """Return the number of words and of dimensions that the first line of a word2vec file promises."""
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise StorageError(
            f"line 1 of {str(path)!r} is no word2vec header ('words dim') but {line[:40]!r}; pass a file of vectors"
        )
    num_words, dim = map(int, parts)
    if dim >= _MAX_DIM:
        raise StorageError(f"line 1 of {str(path)!r} promises vectors of {dim} numbers, which none has; get it again")
    return num_words, dim


def check_room(path: Path, least_bytes: int, promise: str = "its header promises") -> None:
    """Raise where the file is too short for the vectors it promises, before memory is taken for them."""
    size = path.stat().st_size
    if size * (_MOST_PACKED if path.suffix == ".gz" else 1) < least_bytes:
        raise StorageError(
            f"{str(path)!r} is truncated: it has {size} bytes but {promise} at least {least_bytes}; get it again"
        )


def write_text(path: Path, stored: Stored, header: bool = True) -> None:
    """Write the vectors in nine digits, enough to read the same float32 numbers back; text has no place for counts.

    Without a header, as in GloVe: raises InvalidValueError where readers could not parse such a file.
    """
    words, matrix, _ = stored
    check_words(words, path)
    if not header and (not words or matrix.shape[1] < 2):
        raise InvalidValueError(
            f"GloVe text, without a header, needs a word and a dim of 2 at least but there are {len(words)} words of dim "
            f"{matrix.shape[1]}; save to .txt"
        )
    line = "%s" + " %.9g" * matrix.shape[1] + "\n"
    with replace_file(path) as file:
        if header:
            file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for start in range(0, len(words), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            rows = zip(words[some], matrix[some].tolist(), strict=True)
            file.write("".join(line % (word, *row) for word, row in rows).encode())


def read_text(path: Path, max_words: int | None = None) -> Stored:
    """Read word2vec or GloVe text: two fields in the first line are a header, more are a word and its vector.

    GloVe's own files hold a few words with spaces (``. . .``), which may be in the first line: the dim is that of most lines.
    Of a damaged file the message of the `StorageError` names the line.
    """
    with reading(path) as file:
        first = file.readline(HEADER_BYTES)
        header = len(first.split()) <= 2 and len(first) < HEADER_BYTES
        promised, dim = parse_header(first, path) if header else _measure(path)
        if not header:
            file.seek(0)
        promise = "its header promises" if header else f"{promised} vectors as long as most, {dim} numbers, take"
        check_room(path, promised * (2 * dim + 2) - (not header), promise)
        num_words = promised if max_words is None else min(promised, max_words)
        words: list[str] = []
        matrix = np.empty((num_words, dim), dtype=np.float32)
        longest = _WORD_BYTES + _NUMBER_BYTES * dim if header else _FIRST_LINE_BYTES
        lines = ((n, line) for n, line in enumerate(_lines(file, path, longest), 1 + header) if not line.isspace())
        for number, line in itertools.islice(lines, num_words):
            try:
                word, values = _split(line, dim)
                matrix[len(words)] = list(map(float, values))
                words.append(word.decode())
            except ValueError as error:
                raise StorageError(
                    f"line {number} of {str(path)!r} is no word and vector ({error}); get it again, or leave that line out"
                ) from None
        more = num_words == promised and next(lines, None) is not None
        if len(words) < num_words or more:
            holds = "more" if more else f"only {len(words)}"
            raise StorageError(
                f"{str(path)!r} promises {promised} words in its first line but holds {holds}; get it again"
            )
    return Stored(words, matrix)


def _measure(path: Path) -> tuple[int, int]:
    """Return how many lines that are not blank a file without a header has, and the numbers that most of the first have."""
    with reading(path) as file:
        lines = (line for line in _lines(file, path, _FIRST_LINE_BYTES) if not line.isspace())
        found = collections.Counter(map(_count_numbers, itertools.islice(lines, _MEASURED_LINES)))
        # Of two that are as frequent the one met first.
        return found.total() + sum(1 for _ in lines), found.most_common(1)[0][0]


def _lines(file: BinaryIO, path: Path, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file, which a packed one of a few bytes could make as long as the memory."""
    while line := file.readline(longest):
        if len(line) == longest and not line.endswith(b"\n"):
            raise StorageError(f"{str(path)!r} has a line of over {longest} bytes, which no vector takes; get it again")
        yield line


def _count_numbers(line: bytes) -> int:
    """Return how many numbers end a line, after the first field, which is a word even if it is a number; none: its fields."""
    values = line.rstrip(b"\r\n ").split(b" ")[1:]
    return sum(1 for _ in itertools.takewhile(_is_number, reversed(values))) or len(values)


def _split(line: bytes, dim: int) -> tuple[bytes, list[bytes]]:
    """Return the word and its numbers; fields too many belong to the word unless one is a number."""
    word, *values = line.rstrip(b"\r\n ").split(b" ")
    extra = len(values) - dim
    if extra > 0 and not any(map(_is_number, values[:extra])):
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


def write_binary(path: Path, stored: Stored) -> None:
    """Write as word2vec.c does: a line end after every vector, which readers skip; it has no place for counts."""
    words, matrix, _ = stored
    check_words(words, path)
    with replace_file(path) as file:
        file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for start in range(0, len(words), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            for word, row in zip(words[some], matrix[some].astype("<f4", copy=False), strict=True):
                file.write(b"%b %b\n" % (word.encode(), row.tobytes()))


def read_binary(path: Path, max_words: int | None = None) -> Stored:
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
