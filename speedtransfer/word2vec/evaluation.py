"""How good vectors are: similarity of words against people's judgement, and analogies.

The figures are those that gensim's `evaluate_word_pairs` and `evaluate_word_analogies` give for the same vectors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.word2vec.analogies import answer
from speedtransfer.word2vec.evaluation_results import Analogies, Section, Similarity
from speedtransfer.word2vec.evaluation_sets import AnalogySet, SimilaritySet, load_set
from speedtransfer.word2vec.lookup import lengths
from speedtransfer.word2vec.vectors import Vectors

__all__ = ["Analogies", "AnalogySet", "Section", "Similarity", "SimilaritySet", "evaluate", "load_set"]


def evaluate(
    vectors: Vectors, which: str | os.PathLike[str] | SimilaritySet | AnalogySet, restrict_vocab: int = 300_000
) -> Similarity | Analogies:
    """Evaluate vectors with a set.

    The figures are gensim's to rounding: here all words are equally near to themselves, and a zero vector is near to nothing.
    Upper and lower case are the same; of words that differ only in case the first one counts, the most frequent where
    `train` made the vectors. What has an unknown word is left out and counted.

    Parameters
    ----------
    vectors : Vectors
    which : path-like, SimilaritySet or AnalogySet
        The set, or its file (see `load_set`).
    restrict_vocab : int
        Use the first so many words only, for the sets' own words and for the answers to analogies.

    Raises
    ------
    InvalidValueError
        The set has nothing to measure with these vectors: no known words, or a correlation of equal numbers; or a vector
        holds an infinity or nan.
    StorageError
        The file is missing or malformed.
    """
    restrict_vocab = check_size(restrict_vocab, "restrict_vocab", 1)
    if not isinstance(which, SimilaritySet | AnalogySet):
        which = load_set(which)
    words = [word.upper() for word in vectors.words[:restrict_vocab]]
    row_of = dict(zip(reversed(words), range(len(words) - 1, -1, -1), strict=True))
    norms = lengths(vectors.matrix[:restrict_vocab])  # not vectors.norms: training may have changed them
    odd = np.flatnonzero(~np.isfinite(norms))
    if len(odd):
        raise InvalidValueError(
            f"the vector of {vectors.words[odd[0]]!r} (row {odd[0]}) holds nan, infinity or numbers too large for float32; "
            "train again, with a smaller lr if training diverged"
        )
    if isinstance(which, SimilaritySet):
        return _evaluate_pairs(vectors, which, row_of)
    return _evaluate_analogies(vectors.matrix[:restrict_vocab], norms, which, words, row_of)


def _unknown(used: Sequence[Sequence[str]], row_of: dict[str, int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for group in used for word in group if word.upper() not in row_of))


def _nothing_known(name: str, count: int, what: str, unknown: tuple[str, ...]) -> InvalidValueError:
    shown = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    return InvalidValueError(
        f"set {name!r} has {count} {what} with vectors for all their words, too few to measure; unknown are "
        f"{shown or 'none'}; pass a set in the vectors' language, or more words"
    )


def _evaluate_pairs(vectors: Vectors, which: SimilaritySet, row_of: dict[str, int]) -> Similarity:
    known = [(a.upper() in row_of and b.upper() in row_of) for a, b in which.pairs]
    rows = [(row_of[a.upper()], row_of[b.upper()]) for (a, b), both in zip(which.pairs, known, strict=True) if both]
    unknown = _unknown(which.pairs, row_of)
    if len(rows) < 2:
        raise _nothing_known(which.name, len(rows), "pairs", unknown)
    first, second = (vectors.matrix[list(side)].astype(np.float64) for side in zip(*rows, strict=True))
    length = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    # In float32: a word and itself then have the same cosine, 1, whatever the word.
    cosines = ((first * second).sum(axis=1) / np.where(length > 0, length, 1)).astype(np.float32).astype(np.float64)
    scores = np.array(which.scores)[known]
    for numbers, what in ((scores, "scores"), (cosines, "cosines")):
        if numbers.min() == numbers.max():
            raise InvalidValueError(
                f"the {what} of the {len(rows)} known pairs of set {which.name!r} are all {numbers[0]:g}, which correlates "
                "with nothing; pass another set or other vectors"
            )
    spearman, pearson = _correlation(_ranks(scores), _ranks(cosines)), _correlation(scores, cosines)
    return Similarity(which.name, spearman, pearson, len(rows), len(which.pairs) - len(rows), unknown)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation of two arrays of shape (n,)."""
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), -1, 1))


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """Return the rank of each number from 1 on; equal ones share the mean of theirs."""
    _, place, count = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def _evaluate_analogies(
    matrix: np.ndarray, norms: np.ndarray, which: AnalogySet, words: list[str], row_of: dict[str, int]
) -> Analogies:
    questions = [question for _, section in which.sections for question in section]
    rows = np.array([[row_of.get(word.upper(), -1) for word in q] for q in questions], dtype=np.int64).reshape(-1, 4)
    known = rows.min(axis=1, initial=0) >= 0
    unknown = _unknown(questions, row_of)
    if not known.any():
        raise _nothing_known(which.name, 0, "questions", unknown)
    name = np.array([row_of[word] for word in words], dtype=np.int64)
    correct = np.zeros(len(questions), dtype=bool)
    correct[known] = answer(matrix, norms, name, rows[known])
    sections, start = [], 0
    for title, section in which.sections:
        some = slice(start, start + len(section))
        told = list(zip(section, known[some], correct[some], strict=True))
        right = tuple(q for q, is_known, is_correct in told if is_known and is_correct)
        wrong = tuple(q for q, is_known, is_correct in told if is_known and not is_correct)
        sections.append(Section(title, right, wrong))
        start += len(section)
    return Analogies(which.name, tuple(sections), int((~known).sum()), unknown)
