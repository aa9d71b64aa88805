"""The words of a corpus with their counts, of all its parts, and the two distributions that word2vec draws from them."""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidValueError, StorageError, check_path
from speedtransfer.lazy import import_extra
from speedtransfer.ranks import Exchange, Segment
from speedtransfer.system import replace_file
from speedtransfer.untrusted import check_file, only_storage_errors
from speedtransfer.word2vec.formats_text import encode, reading
from speedtransfer.word2vec.lookup import Words, check_counts
from speedtransfer.word2vec.text import POINT
from speedtransfer.word2vec.tokenise import WordTable, read_words

_WORDS_AT_ONCE = 1 << 18
_COUNT_DIGITS = 19  # of the largest int64


class Vocabulary(Words):
    """Words numbered by decreasing frequency; words of equal count in alphabetical order.

    Parameters
    ----------
    words : sequence of str
        Distinct words, in the order of their numbers.
    counts : sequence of int
        How often each occurs.

    Attributes
    ----------
    words : list of str
    counts : ndarray of int64, shape (len(words),)
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int] | np.ndarray) -> None:
        super().__init__(words)
        self.counts = check_counts(counts, len(self.words))
        if len(self.counts) and self.counts.min() < 0:
            at = int(self.counts.argmin())
            raise InvalidValueError(f"the count of {self.words[at]!r} is {self.counts[at]} but must be at least 0")

    @classmethod
    def choose(
        cls, counts: np.ndarray, take: Callable[[np.ndarray], list[str]], min_count: int, max_words: int | None,
        num_distinct: int | None = None,
    ) -> Vocabulary:  # fmt: skip
        """Choose the words of a model by their numbers, so that rare words need not be looked at.

        `counts` (n,) int64 says how often word number i occurs, and `take` returns the words that have the numbers passed to
        it. Words that occur less than `min_count` times are left out, and of the rest all but the `max_words` most frequent.
        Raises `InvalidValueError` where fewer than two are left, of `num_distinct` words.
        """
        kept = most_frequent(counts, min_count, max_words)
        if len(kept) < 2:
            found = int(np.count_nonzero(counts)) if num_distinct is None else num_distinct
            remedy = "a larger corpus" if found < 2 else f"min_count={np.partition(counts, -2)[-2]} or less"
            raise InvalidValueError(
                f"min_count={min_count} leaves {len(kept)} of {found} distinct words but a model needs at least 2; "
                f"pass {remedy}"
            )
        words = take(kept)
        alphabetical = np.array(sorted(range(len(words)), key=words.__getitem__))
        order = alphabetical[np.argsort(-counts[kept[alphabetical]], kind="stable")][:max_words]
        return cls([words[i] for i in order.tolist()], counts[kept[order]])

    @property
    def num_words(self) -> int:
        """Occurrences of all the words in the corpus."""
        return int(self.counts.sum())

    def keep_probability(self, sample: float) -> np.ndarray:
        """Return the probability with which subsampling keeps an occurrence of each word.

        With f the share of a word in the corpus it is ``(sqrt(f / sample) + 1) * sample / f``, at most 1: the formula of
        Google's word2vec.c (function ``TrainModelThread``), which is not quite the one in the paper (Mikolov et al. 2013,
        "Distributed Representations of Words and Phrases", section 2.3).

        `sample` is the threshold, usually 1e-5 to 1e-3; 0 keeps everything. float64, shape (len(self),).
        """
        if sample == 0:
            return np.ones(len(self))
        with np.errstate(divide="ignore"):  # a word that never occurs is kept
            part = sample * self.num_words / self.counts.astype(np.float64)
        return np.minimum(part + np.sqrt(part), 1.0)

    def kept_share(self, sample: float) -> float:
        """Return the share of all occurrences that subsampling keeps."""
        return float((self.counts * self.keep_probability(sample)).sum()) / max(self.num_words, 1)

    def noise(self) -> np.ndarray:
        """Return the probability of each word as a negative example: float64, shape (len(self),).

        It is ``count**0.75`` over the sum of them (Mikolov et al. 2013, section 2.2).
        """
        weight: np.ndarray = self.counts.astype(np.float64) ** 0.75
        return weight / weight.sum()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a line ``word count`` a word, which gensim reads as `fvocab`; the old file stays whole until the end."""
        with replace_file(check_path(path)) as file:
            for word, count in zip(self.words, self.counts.tolist(), strict=True):
                file.write(encode(f"{word} {count}\n"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what `save` wrote, or another table that `read_counts` reads."""
        return cls(*read_counts(path, least=0))


def most_frequent(counts: np.ndarray, min_count: int, max_words: int | None) -> np.ndarray:
    """Return which of `counts` (n,) are at least `min_count`: the `max_words` largest, with all that tie with the last."""
    kept = np.flatnonzero(counts >= min_count)
    if max_words is not None and len(kept) > max_words:
        kept = kept[counts[kept] >= np.partition(counts[kept], -max_words)[-max_words]]
    return kept


def count_together(
    words: WordTable, counts: np.ndarray, min_count: int, max_words: int | None, exchange: Exchange
) -> Vocabulary:
    """Choose the words of a model by how often they occur in the parts of all processes; `counts` (len(words),) are of this.

    Each word has an owner, by its hash, who adds its counts up; all get the words that any owner may keep. So a process holds
    the distinct words of its part, its share of those of all, and the vocabulary.
    """
    owners = np.empty(len(words), np.int64)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        some = np.arange(start, min(start + _WORDS_AT_ONCE, len(words)))
        owners[some] = [zlib.crc32(word.encode()) % exchange.ranks for word in words.take(some)]
    order = np.argsort(owners, kind="stable")
    parts = np.split(order, np.searchsorted(owners[order], np.arange(1, exchange.ranks)))
    texts = [_text(words, part) for part in parts]
    sizes = torch.tensor([[len(text), len(part)] for text, part in zip(texts, parts, strict=True)], device="cpu")
    received = exchange.agree(POINT, sizes)
    values = np.frombuffer(b"".join(texts), np.uint8), counts[order]
    segments = [
        Segment(torch.from_numpy(value.copy())[:, None], sizes[:, i].tolist(), received[:, i].tolist())
        for i, value in enumerate(values)
    ]
    mine, sums = _add_up(*exchange.move("control", segments))
    kept = most_frequent(sums, min_count, max_words)
    if len(kept) < 2:
        kept = np.argsort(-sums, kind="stable")[:2]  # for the message of an error
    text = torch.frombuffer(bytearray(_text(mine, kept) or b" "), dtype=torch.uint8)[:, None]
    told = exchange.agree(POINT, [len(text), len(kept), len(mine)])
    texts_of_all = exchange.gather("control", text, told[:, 0].tolist())
    counts_of_all = exchange.gather("control", torch.from_numpy(sums[kept])[:, None], told[:, 1].tolist())
    union, totals = _add_up(texts_of_all, counts_of_all)
    return Vocabulary.choose(totals, union.take, min_count, max_words, int(told[:, 2].sum()))


def _text(words: WordTable, numbers: np.ndarray) -> bytes:
    """Return the words with these numbers, a space after each."""
    parts = np.split(numbers, range(_WORDS_AT_ONCE, len(numbers), _WORDS_AT_ONCE))
    return b"".join("".join(f"{word} " for word in words.take(part)).encode() for part in parts)


def _add_up(text: torch.Tensor, counts: torch.Tensor) -> tuple[WordTable, np.ndarray]:
    """Return the distinct words of a text (bytes, 1), and the sums of the counts (words, 1) that stand for its words."""
    numbers = [np.empty(0, np.int32)]
    words = read_words(io.BytesIO(b" " + text.numpy().tobytes()), numbers.append)
    sums = np.zeros(len(words), np.int64)
    np.add.at(sums, np.concatenate(numbers), counts[:, 0].numpy())
    return words, sums


def read_counts(path: str | os.PathLike[str], least: int = 1) -> tuple[list[str], np.ndarray]:
    """Read a table of words and how often each occurs, `least` times or more.

    A line is a word and a count, with a tab or space between; the first may name the columns (``word\tcount``). ``.gz`` is
    unpacked. A ``.parquet`` file, or a folder of them with such a name, has the columns word and count. Raises `StorageError`
    with the line or row where the file is missing, has no words, or one twice, or something that is no word and count.
    """
    path = check_path(path)
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _text_rows(path)
    counts: dict[str, int] = {}
    for place, word, count in rows:
        is_word = isinstance(word, str) and (word.split() == [word] if least else word)
        if not is_word or not isinstance(count, int) or isinstance(count, bool):
            raise StorageError(
                f"{place} of {str(path)!r} is the word {str(word)[:40]!r} and the count {count!r} but must be a word and a "
                "count, with a tab between; fix it, or leave it out"
            )
        if not least <= count < 1 << 63:
            raise StorageError(f"{place} of {str(path)!r} counts {word!r} {count} times; leave it out")
        if word in counts:
            raise StorageError(f"{place} of {str(path)!r} has the word {word!r} again; add up the counts of a word")
        counts[word] = count
    if not counts and least:
        raise StorageError(f"{str(path)!r} is empty; pass a table of words and counts")
    if sum(counts.values()) >= 1 << 63:
        raise StorageError(
            f"{str(path)!r} counts {sum(counts.values()):,} words in all; divide the counts, to be below 2**63"
        )
    return list(counts), np.fromiter(counts.values(), np.int64, len(counts))


def _text_rows(path: Path) -> Iterator[tuple[str, Any, Any]]:
    with reading(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.rstrip("\r\n")
            word, _, count = line.rpartition("\t" if "\t" in line else " ")
            if number > 1 or line != "word\tcount":
                is_count = count.isdecimal() and len(count) <= _COUNT_DIGITS
                yield f"line {number}", word, int(count) if is_count else count[:40]


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any, Any]]:
    parquet = import_extra("pyarrow.parquet", "tables of .parquet", "pyarrow")
    # Engines of several processes write a folder, a file each.
    parts, number = sorted(path.glob("*.parquet")) if path.is_dir() else [path], itertools.count(1)
    for part in parts:
        with only_storage_errors(part, "a table of words and counts"):
            check_file(part)
            with parquet.ParquetFile(part) as table:
                if not {"word", "count"} <= set(table.schema_arrow.names):
                    raise ValueError(f"its columns are {', '.join(table.schema_arrow.names)}, not word and count")
                for batch in table.iter_batches(columns=["word", "count"]):
                    for row in batch.to_pylist():
                        yield f"row {next(number)}", row["word"], row["count"]
