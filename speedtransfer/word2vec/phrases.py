"""Phrases: join two words that occur together more often than by chance into one, with "_" between them.

Mikolov et al. 2013, "Distributed Representations of Words and Phrases", section 4, with the scaling of gensim's ``Phrases``
(its default scorer), so that a threshold means the same: a pair is joined where

    (count(a b) - min_count) / count(a) / count(b) * (distinct words + distinct pairs) > threshold.

It works on numbers, in place and in chunks. Memory holds the distinct pairs, up to `MAX_PAIRS`: whenever there are more the
rarest are dropped, first those that have occurred once, the next time twice, and so on, as word2phrase and gensim do. So in
a text of that size a pair that is always rare may be missed.
"""

from __future__ import annotations

import numpy as np

from speedtransfer.jit import compile_function
from speedtransfer.word2vec.tokenise import LINE_END, WordTable

JOINT = "_"
CHUNK_IDS = 1 << 22
MAX_PAIRS = 1 << 26  # of 16 bytes each


def count_numbers(ids: np.ndarray, num_words: int) -> np.ndarray:
    """Return how often each number occurs in `ids` as int64, shape (num_words,); `LINE_END` is left out."""
    counts = np.zeros(num_words + 1, dtype=np.int64)
    for start in range(0, len(ids), CHUNK_IDS):
        counts += np.bincount(ids[start : start + CHUNK_IDS] + 1, minlength=len(counts))
    return counts[1:]


def join_phrases(ids: np.ndarray, words: WordTable, min_count: int, threshold: float) -> np.ndarray:
    """Join the pairs of a corpus that are phrases, from left to right, never across the end of a sequence.

    `ids` (n,) int32 holds word numbers and `LINE_END`; it is changed in place, and its beginning returned, where the words and
    phrases now are. Phrases are entered into `words`. `min_count` is subtracted from the count of a pair, so that rare pairs
    are no phrases; a higher `threshold` joins fewer.
    """
    counts = count_numbers(ids, len(words))
    pairs, pair_counts = count_pairs(ids, len(words))
    first, second = pairs // len(words), pairs % len(words)
    distinct = int(np.count_nonzero(counts)) + len(pairs)
    score = (pair_counts - min_count) / counts[first] / counts[second] * distinct
    chosen = np.flatnonzero(score > threshold)
    names = zip(words.take(first[chosen]), words.take(second[chosen]), strict=True)
    stride = len(words)
    numbers = words.number(" ".join(a + JOINT + b for a, b in names).encode())
    return ids[: _replace(ids.view(np.ndarray), pairs[chosen], numbers, stride)]


def count_pairs(ids: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct pairs of neighbours and how often each occurs, both int64, shape (k,).

    A pair is ``first * num_words + second``; they are sorted.
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    least = 1
    for start in range(0, len(ids), CHUNK_IDS):
        some = _pairs_of(ids[start : start + CHUNK_IDS + 1], num_words)
        pairs, counts = _merge(pairs, counts, *np.unique(some[some >= 0], return_counts=True))
        if len(pairs) > MAX_PAIRS:
            kept = counts > least
            pairs, counts = pairs[kept], counts[kept]
            least += 1
    return pairs, counts


def _pairs_of(ids: np.ndarray, stride: int) -> np.ndarray:
    """Return each pair of neighbours as one number, -1 where the end of a sequence is one of them."""
    pairs = ids[:-1] * np.int64(stride) + ids[1:]
    pairs[(ids[:-1] == LINE_END) | (ids[1:] == LINE_END)] = -1
    return pairs


def _merge(
    pairs: np.ndarray, counts: np.ndarray, more: np.ndarray, more_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the union of two sorted sets of pairs, and the sums of their counts."""
    both = np.concatenate([pairs, more])
    order = np.argsort(both, kind="stable")  # two sorted runs: merged, not sorted
    both = both[order]
    begins = np.flatnonzero(np.concatenate([[True], both[1:] != both[:-1]])[: len(both)])
    if len(begins) == 0:
        return pairs, counts
    return both[begins], np.add.reduceat(np.concatenate([counts, more_counts])[order], begins)


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
