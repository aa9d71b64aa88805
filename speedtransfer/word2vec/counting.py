"""Words to numbers, on all cores where a compiled tokeniser is at hand, else word by word in Python.

Both number the words in order of appearance (the threads of the fast way each in their own order, which is then put right),
and what comes of it once the numbers of the vocabulary are known is the same to the bit.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from speedtransfer.errors import HostMemoryError
from speedtransfer.jit import compiled_module
from speedtransfer.word2vec.text import Piece, Source, check, iter_pieces

LINE_END = -1  # among the numbers of words: a sequence ends here
FAST_FROM_PIECES = 32  # fewer are done before the compiled tokeniser would be there
MAX_THREADS = 16  # what the one thread that reads and writes can keep busy


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
        """Return the numbers of the words in `data` (valid UTF-8) as int32, new words being entered.

        Parameters
        ----------
        data : bytes
        line_end : int
            What to put where a line ends; 0 for nothing.
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
    threads: int | None = None,
) -> Words:
    """Read `source` once and hand its words, as numbers, to `write` in order.

    Parameters
    ----------
    source : path-like, "-" or binary file
    write : callable
        Called with int32 arrays, shape (n,): word numbers, and `LINE_END`.
    lines : bool
        Whether to put `LINE_END` where a line or a file ends.
    report : callable, optional
        Called with the number of words so far.
    threads : int, optional
        That help; all cores by default. 0 is the plain way.

    Returns
    -------
    Words
        Every distinct word.

    Raises
    ------
    StorageError, InvalidValueError, InvalidTypeError
        As `iter_pieces` and `decode`.
    HostMemoryError
        The distinct words do not fit in memory.
    """
    pieces = iter_pieces(source)
    head = list(itertools.islice(pieces, FAST_FROM_PIECES))
    compiled = compiled_counting() if threads != 0 and len(head) == FAST_FROM_PIECES else None
    words: Words = WordDict() if compiled is None else compiled.WordTable()
    line_end = LINE_END if lines else 0
    pieces = itertools.chain(head, pieces)
    if compiled is None:
        parts = _number_plainly(pieces, words, line_end)
    else:
        parts = _number_in_threads(pieces, words, line_end, compiled.WordTable, threads or _num_threads())
    num_words = 0
    try:
        for ids, last in parts:
            write(ids)
            num_words += len(ids) - (int(np.count_nonzero(ids == LINE_END)) if lines else 0)
            if lines and last:
                write(np.array([LINE_END], np.int32))
            if report is not None:
                report(num_words)
    except MemoryError as error:
        raise HostMemoryError(
            f"the {len(words)} distinct words so far fill the memory; pass less text, or clean it of what is no word"
        ) from error
    return words


def compiled_counting() -> Any:
    """Return the module `counting_compiled`, or None where numba does not work."""
    return compiled_module("speedtransfer.word2vec.counting_compiled")


def _num_threads() -> int:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_cores, MAX_THREADS)


def _number_plainly(pieces: Iterable[Piece], words: Words, line_end: int) -> Iterator[tuple[np.ndarray, bool]]:
    for piece in pieces:
        check(piece)
        yield words.number(piece.data, line_end), piece.last


class _Translation:
    """From the numbers of one thread's words to those of all, growing as its words do."""

    def __init__(self) -> None:
        self._size = 1
        self._numbers = np.full(1 << 12, LINE_END, np.int32)  # first what a line end becomes

    def extend(self, numbers: np.ndarray) -> None:
        """Add the numbers of the next words."""
        size = self._size + len(numbers)
        if size > len(self._numbers):
            self._numbers = np.concatenate([self._numbers, np.empty(size, np.int32)])
        self._numbers[self._size : size] = numbers
        self._size = size

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        return self._numbers[ids + 1]


def _number_in_threads(
    pieces: Iterable[Piece], words: Words, line_end: int, make_table: Callable[[], Any], threads: int
) -> Iterator[tuple[np.ndarray, bool]]:
    """Let each thread number pieces with a table of its own; enter the new words of each into `words`."""
    own = threading.local()
    translations: defaultdict[int, _Translation] = defaultdict(_Translation)

    def number(piece: Piece) -> tuple[int, np.ndarray, bytes]:
        check(piece)
        if not hasattr(own, "table"):
            own.table = make_table()
        known = len(own.table)
        ids = own.table.number(piece.data, line_end)
        return threading.get_ident(), ids, own.table.text(known)

    def finish(piece: Piece, future: Future[tuple[int, np.ndarray, bytes]]) -> tuple[np.ndarray, bool]:
        thread, ids, new_words = future.result()
        # A thread takes pieces in order, so its new words come in the order in which it numbered them.
        translations[thread].extend(words.number(new_words))
        return translations[thread](ids), piece.last

    pool = ThreadPoolExecutor(threads, thread_name_prefix="speedtransfer-words")
    under_way: deque[tuple[Piece, Future[tuple[int, np.ndarray, bytes]]]] = deque()
    try:
        for piece in pieces:
            under_way.append((piece, pool.submit(number, piece)))
            if len(under_way) > 2 * threads:
                yield finish(*under_way.popleft())
        while under_way:
            yield finish(*under_way.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
