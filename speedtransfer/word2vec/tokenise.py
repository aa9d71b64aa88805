"""Words to numbers in order of appearance, at the speed of memory: a hash table of words compiled by numba, without the GIL.

One thread numbers several million words a second, which is more than training takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from speedtransfer.errors import HostMemoryError
from speedtransfer.jit import compile_function
from speedtransfer.word2vec.text import Source, decode, iter_pieces

LINE_END = -1  # stands among the numbers of words where a sequence ends
_FIRST_WORDS = 1 << 15
_PRIME = 0x1E3779B97F4A7C15  # odd and without pattern, as Fibonacci hashing has it
_32 = np.uint64(32)


@njit(inline="always")
def _wide_space_bytes(data: Any, at: int) -> int:
    """Return of how many bytes the white space at `at` of valid UTF-8 is, 0 where none of several begins."""
    byte = data[at]
    if byte == 0xC2:
        return 2 if data[at + 1] == 0x85 or data[at + 1] == 0xA0 else 0
    if byte < 0xE1 or byte > 0xE3:
        return 0
    code = (byte & 15) << 12 | (data[at + 1] & 63) << 6 | data[at + 2] & 63
    return 3 if 0x2000 <= code <= 0x200A or code in (0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000) else 0


@njit(inline="always")
def _slot(hashed: int, num_slots: int) -> Any:
    """Return where the search for a word begins: the low bits of a permutation in which they depend on all bits."""
    x = np.uint64(hashed)
    x = (x ^ (x >> _32)) * np.uint64(_PRIME)
    return np.int64((x ^ (x >> _32)) & np.uint64(num_slots - 1))


@njit(inline="always")
def _equal(text: Any, starts: Any, number: int, data: Any, begin: int, length: int) -> bool:
    first = starts[number]
    if starts[number + 1] - first != length + 1:
        return False
    k = 0
    while k < length and text[first + k] == data[begin + k]:
        k += 1
    return k == length


@compile_function
def _number(
    data: Any, at: int, line_end: int, ids: Any, count: int, seed: Any, multiplier: Any, slots: Any, starts: Any, text: Any,
    size: int
) -> tuple[int, int, int]:  # fmt: skip
    """Number the words of `data` from byte `at` on, until its end or until the table is full.

    Word n of the table is ``text[starts[n] : starts[n + 1] - 1]``; a slot is the hash of a word and its number, -1 where it is
    empty. Returns the byte reached, how many numbers are in `ids` and how many words in the table.
    """
    num_slots, max_size = len(slots), len(starts) - 1
    begin, hashed = at, seed
    while at <= len(data):
        byte, width = np.int64(32), 1  # what ends the last word
        if at < len(data):
            byte = np.int64(data[at])
        if byte < 0xC2:
            is_space = byte == 32 or 9 <= byte <= 13 or 28 <= byte <= 31
        else:
            width = _wide_space_bytes(data, at)
            is_space = width > 0
            width = max(width, 1)
        if not is_space:
            hashed = (hashed ^ np.uint64(byte)) * multiplier
            at += width
            continue
        length = at - begin
        if length:
            key = np.int64(hashed)
            slot = _slot(key, num_slots)
            while slots[slot, 1] >= 0 and not (
                slots[slot, 0] == key and _equal(text, starts, slots[slot, 1], data, begin, length)
            ):
                slot = (slot + 1) & (num_slots - 1)
            if slots[slot, 1] < 0:
                if size == max_size or starts[size] + length + 1 > len(text):
                    return begin, count, size
                for k in range(length):
                    text[starts[size] + k] = data[begin + k]
                starts[size + 1] = starts[size] + length + 1
                text[starts[size + 1] - 1] = 32
                slots[slot, 0], slots[slot, 1] = key, size
                size += 1
            ids[count] = slots[slot, 1]
            count += 1
        if line_end and byte == 10:
            ids[count] = line_end
            count += 1
        at += width
        begin, hashed = at, seed
    return at, count, size


@compile_function
def _move(slots: Any, more_slots: Any) -> None:
    for old in range(len(slots)):
        if slots[old, 1] >= 0:
            slot = _slot(slots[old, 0], len(more_slots))
            while more_slots[slot, 1] >= 0:
                slot = (slot + 1) & (len(more_slots) - 1)
            more_slots[slot] = slots[old]


class WordTable:
    """Distinct words, numbered in order of appearance.

    Where their slots are is another secret in each table: a text made for it cannot make the searches long. Numbers do not
    depend on it.
    """

    def __init__(self) -> None:
        seed, multiplier = np.frombuffer(os.urandom(16), np.uint64)
        self._secret = seed, multiplier | np.uint64(1)
        self._size = 0
        self._slots = np.full((2 * _FIRST_WORDS, 2), -1, np.int64)
        self._starts = np.zeros(_FIRST_WORDS + 1, np.int64)
        self._text = np.empty(8 * _FIRST_WORDS, np.uint8)  # the words, a space after each

    def __len__(self) -> int:
        return self._size

    def number(self, data: bytes, line_end: int = 0) -> np.ndarray:
        """Return the numbers of the words in `data` (valid UTF-8) as int32; new words get the next ones.

        `line_end` is put where a line ends; 0 for nothing.
        """
        source, at, count = np.frombuffer(data, np.uint8), 0, 0
        ids = np.empty(len(source) + 1, np.int32)
        while True:
            table = *self._secret, self._slots, self._starts, self._text, self._size
            at, count, self._size = _number(source, at, line_end, ids, count, *table)
            if at > len(source):
                return ids[:count].copy()
            self._grow(len(source))

    def take(self, numbers: np.ndarray) -> list[str]:
        """Return the words with these numbers."""
        starts, ends = self._starts[numbers].tolist(), (self._starts[numbers + 1] - 1).tolist()
        text = self._text.data
        return [str(text[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]

    def _grow(self, room_bytes: int) -> None:
        if self._size == len(self._starts) - 1:
            self._starts = np.resize(self._starts, 2 * self._size + 1)  # what is beyond the old end will be written
            slots = np.full((4 * self._size, 2), -1, np.int64)
            _move(self._slots, slots)
            self._slots = slots
        else:
            self._text = np.resize(self._text, 2 * len(self._text) + room_bytes)


def read_words(
    source: Source, write: Callable[[np.ndarray], None], lines: bool = False, report: Callable[[int], None] | None = None
) -> WordTable:  # fmt: skip
    """Read `source` once, hand its words, as numbers, to `write` in order, and return the distinct words.

    `write` is called with int32 arrays, shape (n,): word numbers and, with `lines`, `LINE_END` where a line or a file ends;
    `report` with the number of words so far. Raises what `iter_pieces` and `decode` do, and `HostMemoryError` where distinct
    words do not fit in memory.
    """
    words, num_words = WordTable(), 0
    try:
        for piece in iter_pieces(source):
            if b"\0" in piece.data or not piece.data.isascii():
                decode(piece)  # raises where it is no text
            ids = words.number(piece.data, LINE_END if lines else 0)
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
