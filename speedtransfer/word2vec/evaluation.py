"""Evaluate vectors on sets of two kinds: pairs of words that people scored for similarity, and analogy questions.

The figures are those that gensim's `evaluate_word_pairs` and `evaluate_word_analogies` give for the same vectors.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, check_path, check_size, printable
from speedtransfer.word2vec.evaluation_results import Analogies, Question, Section, Similarity
from speedtransfer.word2vec.formats_text import reading
from speedtransfer.word2vec.lookup import answer_analogies, lengths
from speedtransfer.word2vec.vectors import Vectors

__all__ = ["Analogies", "AnalogySet", "Section", "Similarity", "SimilaritySet", "evaluate", "load_set"]


@dataclass(frozen=True)
class SimilaritySet:
    """Pairs of words and how similar people found them: a score a pair, on any scale."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class AnalogySet:
    """Questions "a is to b as c is to d", by section: name and questions of each, in the order of the file."""

    name: str
    sections: tuple[tuple[str, tuple[Question, ...]], ...]


def load_set(path: str | os.PathLike[str]) -> SimilaritySet | AnalogySet:
    """Read a set of either kind, distinguished by its first line.

    Similarity: ``word word score`` a line, separated by tabs or, in lines without one, by white space. Analogies, as in
    Google's questions-words.txt (Mikolov et al. 2013): ``: section`` lines, each followed by lines of four words. Blank lines
    and lines that begin with ``#`` are skipped.

    Raises `StorageError` where the file is missing, is no text, or a line of it is neither; the message names the line.
    """
    path = check_path(path)
    with reading(path) as packed, io.TextIOWrapper(packed, encoding="utf-8-sig") as file:
        text = file.read()
    every = enumerate(text.split("\n"), start=1)
    lines = [(number, line.rstrip("\r")) for number, line in every if line.strip() and not line.startswith("#")]
    if not lines:
        raise StorageError(f"{str(path)!r} holds no lines to evaluate with; pass a set of word pairs or of analogies")
    if lines[0][1].startswith(":") or (len(lines[0][1].split()) == 4 and "\t" not in lines[0][1]):
        return _parse_analogies(path, lines)
    return _parse_pairs(path, lines)


def _malformed(path: Path, number: int, line: str, expected: str) -> StorageError:
    return StorageError(f"line {number} of {str(path)!r} is {line[:60]!r} but must be {expected}; fix it, or drop it")


def _parse_pairs(path: Path, lines: list[tuple[int, str]]) -> SimilaritySet:
    expected = "'word word score', as lines of a similarity set are (an analogy set begins with ': section')"
    pairs, scores = [], []
    for number, line in lines:
        fields = [field.strip() for field in (line.split("\t") if "\t" in line else line.split())]
        try:
            first, second, score = fields
            if not (first and second and math.isfinite(float(score))):
                raise ValueError
        except ValueError:
            raise _malformed(path, number, line, expected) from None
        scores.append(float(score))
        pairs.append((first, second))
    return SimilaritySet(printable(path.stem), tuple(pairs), tuple(scores))


def _parse_analogies(path: Path, lines: list[tuple[int, str]]) -> AnalogySet:
    sections: list[tuple[str, list[Question]]] = []
    for number, line in lines:
        fields = line.split()
        if fields[0] == ":" and len(fields) > 1:
            sections.append((" ".join(fields[1:]), []))
        elif not sections:
            raise _malformed(path, number, line, "': section', as the first line of an analogy set is")
        elif len(fields) != 4:
            raise _malformed(path, number, line, "four words or ': section', as lines of an analogy set are")
        else:
            sections[-1][1].append((fields[0], fields[1], fields[2], fields[3]))
    return AnalogySet(printable(path.stem), tuple((name, tuple(questions)) for name, questions in sections))


def evaluate(
    vectors: Vectors, which: str | os.PathLike[str] | SimilaritySet | AnalogySet, restrict_vocab: int = 300_000
) -> Similarity | Analogies:
    """Evaluate vectors on a set, or its file (see `load_set`).

    The figures are gensim's to rounding: here all words are equally near to themselves, and a zero vector is near to nothing.
    Upper and lower case are the same; of words that differ only in case the first one counts, the most frequent where
    `train` made the vectors. What has an unknown word is left out and counted. Only the first `restrict_vocab` words count,
    both as words of the sets and as answers to analogies.

    Raises `InvalidValueError` where there is nothing to measure with these vectors (no known words, a correlation of equal
    numbers, a vector of infinity or nan), and `StorageError` where the file is missing or malformed.
    """
    if not isinstance(vectors, Vectors):
        raise InvalidTypeError(f"vectors is a {type(vectors).__name__} but must be Vectors; pass Vectors.load(path)")
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
    both = (_ranks(scores), _ranks(cosines)), (scores, cosines)
    spearman, pearson = (float(np.corrcoef(x, y)[0, 1]) for x, y in both)
    return Similarity(which.name, spearman, pearson, len(rows), len(which.pairs) - len(rows), unknown)


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
    correct[known] = answer_analogies(matrix, norms, name, rows[known])
    answers, sections = iter(zip(known, correct, strict=True)), []
    for title, section in which.sections:
        answered = [(q, right) for q, (is_known, right) in zip(section, answers, strict=False) if is_known]
        sections.append(Section(title, *(tuple(q for q, right in answered if right == part) for part in (True, False))))
    return Analogies(which.name, tuple(sections), int((~known).sum()), unknown)
