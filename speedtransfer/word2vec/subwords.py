"""Words as bags of rows: their own and those of their character n-grams, hashed into buckets (Bojanowski et al. 2017).

A word in boundary marks, ``<word>``, is cut into all its n-grams of `min_n` to `max_n` characters (a mark alone is none), and
each is hashed into one of `buckets` rows that all words share; n-grams, their order and buckets are those of fastText and
gensim: 32-bit FNV-1a over UTF-8 as signed bytes. The table has a row for each word, then the buckets; the vector of a word is
the mean of its rows. In training each moves by the whole of what the vector receives, as in fastText, so that the vector does
too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.jit import compile_function
from speedtransfer.tables import UniqueRows, files, unique_rows
from speedtransfer.tables.saving import check_safetensors_path
from speedtransfer.untrusted import only_storage_errors
from speedtransfer.word2vec.formats_text import encode
from speedtransfer.word2vec.lookup import UnknownWordError

_FORMAT = "speedtransfer n-gram vectors 1"
MAX_BUCKETS = 1 << 32  # the hash has 32 bits
_FNV_OFFSET, _FNV_PRIME = np.uint32(2166136261), np.uint32(16777619)


def check_ngrams(buckets: int, min_n: int, max_n: int) -> None:
    """Raise unless n-grams can be hashed with these sizes; `buckets` 0 means none."""
    if check_size(buckets, "buckets", 0) > MAX_BUCKETS:
        raise InvalidValueError(f"buckets is {buckets} but the hash has 32 bits; pass at most {MAX_BUCKETS}")
    if check_size(max_n, "max_n", 1) < check_size(min_n, "min_n", 1):
        raise InvalidValueError(f"max_n is {max_n} but min_n is {min_n}; pass a max_n of at least {min_n}")


def count_ngrams(words: Sequence[str], min_n: int, max_n: int) -> np.ndarray:
    """Return how many n-grams each word has, those that it has twice counted twice: int64, shape (len(words),)."""
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words)) + 2  # with the boundary marks
    counts = np.zeros(len(words), dtype=np.int64)
    for n in range(min_n, min(max_n, int(lengths.max(initial=0))) + 1):
        counts += np.maximum(lengths - n + 1, 0)
    return counts - 2 if min_n == 1 else counts  # the marks alone


def hash_ngrams(words: Sequence[str], buckets: int, min_n: int = 3, max_n: int = 6) -> np.ndarray:
    """Return the bucket of every n-gram of `words`, word after word, by where they begin, then by length: int64."""
    marked = [encode(f"<{word}>") for word in words]
    ends = np.cumsum([len(word) for word in marked], dtype=np.int64)
    hashed = np.empty(count_ngrams(words, min_n, max_n).sum(), dtype=np.int64)
    _hash(np.frombuffer(b"".join(marked), dtype=np.uint8), ends, buckets, min_n, max_n, hashed)
    return hashed


@compile_function
def _hash(data: np.ndarray, ends: np.ndarray, buckets: int, min_n: int, max_n: int, hashed: np.ndarray) -> None:
    """Set `hashed` to the buckets of the n-grams of words in UTF-8 that end before the bytes `ends`."""
    first, count = 0, 0
    for last in ends:
        for begin in range(first, last):
            if data[begin] & 0xC0 == 0x80:  # goes on with a character
                continue
            value, length, at = _FNV_OFFSET, 0, begin
            while at < last and length < max_n:
                while True:
                    # Signed bytes, as in fastText.
                    value = np.uint32((value ^ np.uint32(np.int8(data[at]))) * _FNV_PRIME)
                    at += 1
                    if at == last or data[at] & 0xC0 != 0x80:
                        break
                length += 1
                if length >= min_n and not (length == 1 and (begin == first or at == last)):
                    hashed[count] = np.int64(value) % buckets
                    count += 1
        first = last


class Subwords:
    """The rows that the vector of each word of a vocabulary is the mean of: its own, then those of its n-grams.

    Those of word i are ``rows[offsets[i] : offsets[i + 1]]``; `rows` is int32, or int64 where the table has 2**31 or more.
    """

    def __init__(self, words: Sequence[str], buckets: int, min_n: int = 3, max_n: int = 6) -> None:
        self.buckets, self.min_n, self.max_n = buckets, min_n, max_n
        num_words = len(words)
        offsets = np.zeros(num_words + 1, dtype=np.int64)
        np.cumsum(count_ngrams(words, min_n, max_n) + 1, out=offsets[1:])
        rows = np.empty(offsets[-1], dtype=np.int32 if num_words + buckets <= 1 << 31 else np.int64)
        is_own = np.zeros(len(rows), dtype=bool)
        is_own[offsets[:-1]] = True
        rows[is_own] = np.arange(num_words)
        rows[~is_own] = hash_ngrams(words, buckets, min_n, max_n) + num_words
        self.offsets, self.rows = torch.from_numpy(offsets), torch.from_numpy(rows)

    def find(self, words: Tensor) -> Bags:
        """Return the bags of `words`, (n,) int64 on the CPU."""
        begins = self.offsets[words]
        counts = self.offsets[words + 1] - begins
        ends = counts.cumsum(0)
        place = torch.repeat_interleave(begins - (ends - counts), counts)
        place += torch.arange(len(place), device="cpu")
        bag_of = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        return Bags(unique_rows(self.rows[place].long()), F.pad(ends, (1, 0)), bag_of)


class Bags(NamedTuple):
    """The rows that the vectors of n words are the means of, one bag after the other."""

    rows: UniqueRows
    starts: Tensor  # where in that list each bag begins and, last, its length: int64, shape (n + 1,)
    bag_of: Tensor  # which bag each row of the list belongs to


class NgramVectors:
    """The rows of character n-grams; the vector of a word is the mean of those of its n-grams.

    They go with the `Vectors` of the same training: ``vectors.most_similar(ngrams["unseen"])``.

    Parameters
    ----------
    matrix : ndarray of float32, shape (buckets, dim)
        float32 is taken as it is, without a copy.
    min_n, max_n : int
        Characters of an n-gram.
    """

    def __init__(self, matrix: np.ndarray, min_n: int = 3, max_n: int = 6) -> None:
        matrix = np.asarray(matrix, np.float32)
        if matrix.ndim != 2 or not len(matrix):
            raise InvalidValueError(f"matrix has shape {matrix.shape} but must be (buckets, dim); pass a row a bucket")
        check_ngrams(len(matrix), min_n, max_n)
        self.matrix, self.min_n, self.max_n = matrix, min_n, max_n

    def __getitem__(self, word: str) -> np.ndarray:
        """Return the mean of the rows of the n-grams of `word`: float32, shape (dim,), as fastText for unseen words.

        Raises `UnknownWordError` where it is too short to have any.
        """
        if not isinstance(word, str):
            raise InvalidTypeError(f"{word!r} is no word; pass a str")
        hashed = hash_ngrams([word], len(self.matrix), self.min_n, self.max_n)
        if not len(hashed):
            raise UnknownWordError(f"{word!r} has no n-grams of {self.min_n} to {self.max_n} characters; pass another")
        mean: np.ndarray = self.matrix[hashed].mean(axis=0)
        return mean

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as tensor `ngrams` of a .safetensors file; a file that was there stays whole until the new one is."""
        facts = {"format": _FORMAT, "min_n": str(self.min_n), "max_n": str(self.max_n)}
        files.write(check_safetensors_path(path), [files.in_chunks("ngrams", torch.from_numpy(self.matrix))], facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramVectors:
        """Read what `save` wrote; the rows are mapped, so it loads at once. Raises StorageError for a damaged file."""
        path = check_safetensors_path(path)
        matrix, _ = files.open_mapped(path, writable=False, key="ngrams")
        with only_storage_errors(path, "a file that says min_n and max_n"):
            facts: Any = files.open_header(path).metadata
            return cls(matrix.numpy(), int(facts["min_n"]), int(facts["max_n"]))
