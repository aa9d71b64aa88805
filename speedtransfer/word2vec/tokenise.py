"""Words to numbers in order of appearance: by a compiled tokeniser where numba works, else word by word in Python.

Both give the same numbers. A compiled tokeniser numbers 10 to 20 million words a second, which is more than training takes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from speedtransfer.errors import HostMemoryError
from speedtransfer.jit import compiled_module
from speedtransfer.word2vec.text import Source, check, iter_pieces

LINE_END = -1  # stands among the numbers of words where a sequence ends
FAST_FROM_PIECES = 32  # for fewer, Python is done before numba has loaded


class Words(Protocol):
    """Distinct words and their numbers."""

    def __len__(self) -> int: ...

    def number(self, data: bytes, line_end: int = 0) -> np.ndarray:
        """Return the numbers of the words in `data` as int32; new words get the next ones, line ends `line_end` if not 0."""
        ...

    def take(self, numbers: np.ndarray) -> list[str]:
        """Return the words with these numbers."""
        ...


class WordDict:
    """Distinct words, numbered in order of appearance."""

    def __init__(self) -> None:
        self._number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)

    def __len__(self) -> int:
        return len(self._number_of)

    def number(self, data: bytes, line_end: int = 0) -> np.ndarray:
        """Return the numbers of the words in `data` (valid UTF-8) as int32; new words get the next ones.

        `line_end` is put where a line ends; 0 for nothing.
        """
        text = data.decode()
        if not line_end:
            return self.number_words(text.split())
        lines = [self.number_words(line.split()) for line in text.split("\n")]
        end = np.array([line_end], np.int32)
        return np.concatenate([part for line in lines for part in (line, end)][:-1])  # the last one goes on

    def number_words(self, words: list[str]) -> np.ndarray:
        """Return the numbers of `words` as int32, new ones being entered."""
        return np.fromiter(map(self._number_of.__getitem__, words), dtype=np.int32, count=len(words))

    def take(self, numbers: np.ndarray) -> list[str]:
        """Return the words with these numbers."""
        words = list(self._number_of)
        return [words[number] for number in numbers.tolist()]


def read_words(
    source: Source,
    write: Callable[[np.ndarray], None],
    lines: bool = False,
    report: Callable[[int], None] | None = None,
    compiled: bool = True,
) -> Words:
    """Read `source` once, hand its words, as numbers, to `write` in order, and return the distinct words.

    Parameters
    ----------
    source : path-like, "-" or binary file
    write : callable
        Called with int32 arrays, shape (n,): word numbers, and `LINE_END`.
    lines : bool
        Whether to put `LINE_END` where a line or a file ends.
    report : callable, optional
        Called with the number of words so far.
    compiled : bool
        Whether to use the compiled tokeniser, for texts of some size.

    Raises
    ------
    HostMemoryError
        The distinct words do not fit in memory. Also what `iter_pieces` and `decode` raise.
    """
    pieces = iter_pieces(source)
    head = list(itertools.islice(pieces, FAST_FROM_PIECES))
    tokeniser = compiled_tokeniser() if compiled and len(head) == FAST_FROM_PIECES else None
    words: Words = WordDict() if tokeniser is None else tokeniser.WordTable()
    line_end = LINE_END if lines else 0
    num_words = 0
    try:
        for piece in itertools.chain(head, pieces):
            check(piece)
            ids = words.number(piece.data, line_end)
            write(ids)
            num_words += len(ids) - (int(np.count_nonzero(ids == LINE_END)) if lines else 0)
            if lines and piece.last:
                write(np.array([LINE_END], np.int32))
            if report is not None:
                report(num_words)
    except MemoryError as error:
        raise HostMemoryError(
            f"the {len(words)} distinct words so far fill the memory; pass less text, or clean it of what is no word"
        ) from error
    return words


def compiled_tokeniser() -> Any:
    """Return the module `tokenise_compiled`."""
    return compiled_module("speedtransfer.word2vec.tokenise_compiled")
