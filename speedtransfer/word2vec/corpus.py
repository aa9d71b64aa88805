"""A corpus: words streamed out of text, or walks over a graph, once, into a temporary file of word numbers.

The text may exceed memory, may be one single line (the text8 format) and may come from a pipe. So it is read exactly once, in
pieces: words get provisional numbers in order of appearance, which go to the file (4 bytes a word), and when the counts are
known it is rewritten in place with the numbers of the vocabulary. Memory holds the distinct words (of a graph: its edges).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import numpy as np

from speedtransfer.errors import InvalidValueError
from speedtransfer.jit import compile_function
from speedtransfer.ranks import exchange_of, world
from speedtransfer.untrusted import storage_error
from speedtransfer.word2vec.settings import Settings, settings_of
from speedtransfer.word2vec.text import POINT, Source, in_all, name_of, own_part
from speedtransfer.word2vec.tokenise import LINE_END, WordTable, read_words
from speedtransfer.word2vec.vocabulary import Vocabulary, count_together, read_counts
from speedtransfer.word2vec.walks import read_graph, write_walks

CHUNK_IDS = 1 << 22
MAX_PAIRS = 1 << 26  # of 16 bytes each
_SETTINGS = "kind", "vocabulary", "divide", "phrases", "phrase_threshold", "walks", "walk_length", "p", "q", "seed"
_DROPPED = -2


class Corpus:
    """A corpus as word numbers, in a temporary file that vanishes with this object.

    Parameters
    ----------
    source : path-like, list of path-like, "-" or binary file
        A text file (``.gz`` and ``.xz`` are decompressed; of ``.parquet`` it is the column `text`, or the only one of strings,
        read by pyarrow), a folder (every .txt, .gz, .xz and .parquet file below it, sorted), a pattern (``"texts/*.txt"``), a
        list of these, "-" for standard input, or an open binary file.
    min_count, max_words, kind, phrases, phrase_threshold, walks, walk_length, p, q, seed, vocabulary, divide
        As in :class:`Settings`; `seed` decides every walk. With `divide` all processes must make theirs.
    report : callable, optional
        Called with the number of words read so far, about once per megabyte of text.
    settings : Settings, optional
        All of them instead, of which those named above count.

    Attributes
    ----------
    vocabulary : Vocabulary
    ids : ndarray of int32, shape (num_words,)
        The words of the vocabulary in the order of the text, mapped from the temporary file, read-only; of a divided corpus
        those of the part of this process.
    starts : ndarray of int64, shape (num_sequences,), or None
        Where in `ids` each sequence begins, from 0 on, rising; those that have lost all their words are left out. None for
        one stream.
    num_words, num_raw_words : int
        Words of the vocabulary in the text (in all walks); and all words, those that were dropped included. Of all parts.
    """

    def __init__(
        self, source: Source, min_count: int = Settings.min_count, max_words: int | None = Settings.max_words,
        report: Callable[[int], None] | None = None, *, settings: Settings | None = None, **given: Any,
    ) -> None:  # fmt: skip
        if settings is None:
            settings = settings_of(_SETTINGS, given, min_count=min_count, max_words=max_words)
        kind, min_count = settings.kind, settings.min_count
        group = world() if settings.divide else None
        self._exchange = exchange = None if group is None else exchange_of(group)
        table = settings.vocabulary
        listed = None if table is None else in_all(exchange, lambda: read_counts(table))
        if exchange is not None:
            source = own_part(source, exchange)
        words, ids = in_all(exchange, lambda: _read(source, settings, report))
        counts = count_numbers(ids, len(words))
        num_raw_words = int(counts.sum())
        for _ in range(settings.phrases):
            ids = join_phrases(ids, words, min_count, settings.phrase_threshold)
            counts = count_numbers(ids, len(words))
        chosen_by = min_count, settings.max_words
        if listed is not None:
            self.vocabulary = Vocabulary.choose(listed[1], lambda rows: [listed[0][i] for i in rows], *chosen_by)
        elif exchange is not None:
            self.vocabulary = count_together(words, counts, *chosen_by, exchange)
        else:
            self.vocabulary = Vocabulary.choose(counts, words.take, *chosen_by)
        kept = words.number(" ".join(self.vocabulary.words).encode())
        final = np.full(len(words) + 1, _DROPPED, np.int32)
        final[kept] = np.arange(len(self.vocabulary), dtype=np.int32)
        final[LINE_END] = LINE_END
        self.ids, starts = _renumber(ids, final)
        self.starts = None if kind == "text" else starts
        self.num_words, self.num_raw_words = len(self.ids), num_raw_words
        if exchange is not None:
            sizes = exchange.agree(POINT, [self.num_words, num_raw_words])
            if not sizes[:, 0].all():
                raise InvalidValueError(
                    f"the part of process {int(sizes[:, 0].argmin())} has no word of the vocabulary; divide the corpus into "
                    "parts of one kind, or start fewer processes"
                )
            self.num_words, self.num_raw_words = sizes.sum(0).tolist()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_divided(self) -> bool:
        """Whether other processes have other parts of it."""
        return self._exchange is not None

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies a corpus, as JSON can hold it: numbers of words, digests of words and text.

        That of a divided one is of all its parts, so that all processes must call this.
        """
        vocabulary, text = hashlib.sha256(), hashlib.sha256()
        words = self.vocabulary.words
        for start in range(0, len(words), CHUNK_IDS):
            vocabulary.update("\n".join(words[start : start + CHUNK_IDS]).encode() + b"\n")
        vocabulary.update(np.ascontiguousarray(self.vocabulary.counts).data)
        for array in [self.ids] if self.starts is None else [self.ids, self.starts]:
            text.update(np.ascontiguousarray(array).data)
        if self._exchange is not None:
            text = hashlib.sha256(" ".join(self._exchange.texts(text.hexdigest())).encode())
        digests = {"vocabulary": vocabulary.hexdigest(), "text": text.hexdigest()}
        return {"vocabulary_words": len(words), "words": self.num_words, **digests}


def _read(source: Source, settings: Settings, report: Callable[[int], None] | None) -> tuple[WordTable, np.ndarray]:
    """Return the distinct words of a source, and a map of the temporary file that has their numbers in order."""
    with storage_error("no temporary file for the corpus", "set TMPDIR to a folder with room"):
        file = tempfile.TemporaryFile(prefix="speedtransfer-")  # noqa: SIM115
    with file:
        write = partial(_write, file)
        if settings.kind in ("graph", "adjacency"):
            graph = read_graph(source, adjacency=settings.kind == "adjacency")
            words = graph.nodes
            write_walks(graph, settings, write, report)
            del graph  # the edges are no longer needed
        else:
            words = read_words(source, write, settings.kind == "lines", report)
        if len(words) == 0:
            raise InvalidValueError(f"{name_of(source)} holds no words; pass a corpus with text in it")
        # The map keeps the pages of the file alive after the file is closed (and, nameless, gone from its folder).
        return words, np.memmap(file, dtype=np.int32, mode="r+")


def _write(file: IO[bytes], numbers: np.ndarray) -> None:
    what = f"the corpus does not fit as numbers (4 bytes a word) in {tempfile.gettempdir()!r}"
    with storage_error(what, "set TMPDIR to a folder with more room"):
        file.write(numbers.tobytes())
        file.flush()


def _renumber(ids: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replace the numbers by the final ones, in place, and drop the others; return what is left, and where sequences begin."""
    end = 0  # never overtakes the chunk being read
    starts = [np.zeros(1, np.int64)]
    for start in range(0, len(ids), CHUNK_IDS):
        chunk = final[ids[start : start + CHUNK_IDS]]
        chunk = chunk[chunk != _DROPPED]
        line_ends = np.flatnonzero(chunk == LINE_END)
        if len(line_ends):
            starts.append(end + line_ends - np.arange(len(line_ends)))  # where the next word will be
            chunk = chunk[chunk != LINE_END]
        ids[end : end + len(chunk)] = chunk
        end += len(chunk)
    left = ids[:end].view(np.ndarray)
    left.flags.writeable = False
    begun = np.unique(np.concatenate(starts))  # line ends may follow one another
    return left, begun[begun < end]


# --- phrases ------------------------------------------------------------------------------------------------------------


def count_numbers(ids: np.ndarray, num_words: int) -> np.ndarray:
    """Return how often each number occurs in `ids` as int64, shape (num_words,); `LINE_END` is left out."""
    counts = np.zeros(num_words + 1, dtype=np.int64)
    for start in range(0, len(ids), CHUNK_IDS):
        counts += np.bincount(ids[start : start + CHUNK_IDS] + 1, minlength=len(counts))
    return counts[1:]


def join_phrases(ids: np.ndarray, words: WordTable, min_count: int, threshold: float) -> np.ndarray:
    """Join the pairs of a corpus that are phrases, from left to right, never across the end of a sequence.

    `ids` (n,) int32 holds word numbers and `LINE_END`; it is changed in place, and its beginning returned, where the words and
    phrases now are. Phrases are entered into `words`, with "_" within. Mikolov et al. 2013, "Distributed Representations of
    Words and Phrases", section 4, with the scaling of gensim's ``Phrases``: a pair is joined where

    (count(a b) - min_count) / count(a) / count(b) * (distinct words + distinct pairs) > threshold.
    """
    counts, stride = count_numbers(ids, len(words)), len(words)
    pairs, pair_counts = count_pairs(ids, stride)
    first, second = np.divmod(pairs, stride)
    distinct = int(np.count_nonzero(counts)) + len(pairs)
    score = (pair_counts - min_count) / counts[first] / counts[second] * distinct
    chosen = np.flatnonzero(score > threshold)
    names = zip(words.take(first[chosen]), words.take(second[chosen]), strict=True)
    numbers = words.number(" ".join(f"{a}_{b}" for a, b in names).encode())
    return ids[: _replace(ids.view(np.ndarray), pairs[chosen], numbers, stride)]


def count_pairs(ids: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct pairs of neighbours, sorted, as ``first * num_words + second``, and how often each occurs: int64.

    Whenever there are more than `MAX_PAIRS` the rarest are dropped, first those that have occurred once, the next time twice,
    and so on, as word2phrase and gensim do: in a text of that size a pair that is always rare may be missed.
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    least = 1
    for start in range(0, len(ids), CHUNK_IDS):
        first, second = ids[start : start + CHUNK_IDS], ids[start + 1 : start + CHUNK_IDS + 1]
        first = first[: len(second)]
        found = (first * np.int64(num_words) + second)[(first != LINE_END) & (second != LINE_END)]
        both = np.concatenate([pairs, found])
        # With `return_index` it merges sorted runs.
        pairs, _, place = np.unique(both, return_index=True, return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, np.ones(len(found))])).astype(np.int64)
        if len(pairs) > MAX_PAIRS:
            kept = counts > least
            pairs, counts = pairs[kept], counts[kept]
            least += 1
    return pairs, counts


@compile_function
def _replace(ids: np.ndarray, pairs: np.ndarray, numbers: np.ndarray, stride: int) -> int:
    """Replace the sorted `pairs` in `ids` by `numbers`, in place and from left to right; return how many numbers are left."""
    end, at = 0, 0
    while at < len(ids):
        number = ids[at]
        if at + 1 < len(ids) and number != LINE_END and ids[at + 1] != LINE_END:
            pair = number * np.int64(stride) + ids[at + 1]
            found = np.searchsorted(pairs, pair)
            if found < len(pairs) and pairs[found] == pair:
                number = numbers[found]
                at += 1
        ids[end] = number
        end += 1
        at += 1
    return end
