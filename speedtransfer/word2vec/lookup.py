"""Find rows by word or by cosine, and answer analogies."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import row_chunks, tensor_of

# Words searched for a similar spelling: the search is slow, and people mostly mean frequent words.
_SUGGEST_FROM = 50_000
_SUGGEST_FOR = 3  # unknown words for which similar ones are suggested
_SHOW_WORDS = 10
_COSINES_AT_ONCE = 1 << 24
_LOOK_AT = 5  # words among which gensim looks for one that is not a, b or c
TINY = float(np.finfo(np.float32).tiny)  # a zero vector divided by this is a zero vector: near to nothing


class UnknownWordError(InvalidValueError, KeyError):
    """Words have no vector; `words` lists them, each once."""

    def __init__(self, message: str, words: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.words = tuple(words)


def check_words(words: Any, name: str = "words") -> list[str]:
    """Return words as a list of str; raise where they are none, or one str, which would be a word a letter."""
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise InvalidTypeError(f"{name} is {words!r} ({type(words).__name__}) but must be a list of words; pass one")
    found = list(words)
    for place, word in enumerate(found):
        if not isinstance(word, str):
            raise InvalidTypeError(
                f"{name}[{place}] is {word!r} ({type(word).__name__}) but words are strings; pass a list of str"
            )
    return found


class Words:
    """Distinct words, and the row of each."""

    def __init__(self, words: Any) -> None:
        self.words = check_words(words)
        self._row_of = {word: row for row, word in enumerate(self.words)}
        if len(self._row_of) != len(self.words):
            twice = next(word for row, word in enumerate(self.words) if self._row_of[word] != row)
            raise InvalidValueError(f"word {twice!r} is there twice; pass distinct words")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._row_of


def check_counts(counts: Any, num_words: int) -> np.ndarray:
    """Return the counts of words as int64, shape (num_words,); raise where they are none."""
    counts = np.asarray(counts)
    if counts.size and not np.issubdtype(counts.dtype, np.integer):
        raise InvalidTypeError(f"counts hold {counts.dtype} but are whole numbers; pass counts.astype('i8')")
    if counts.shape != (num_words,):
        raise InvalidValueError(f"counts have shape {counts.shape} but there are {num_words} words; pass one a word")
    return counts.astype(np.int64, copy=False)


def as_list(items: Any) -> list[Any]:
    """Return one word or vector, or several, as a list; raise `InvalidTypeError` for anything else."""
    if isinstance(items, torch.Tensor):
        items = items.detach().cpu().numpy()
    one = isinstance(items, str) or (isinstance(items, np.ndarray) and items.ndim == 1 and items.dtype.kind not in "UO")
    items = [items] if one or not isinstance(items, Iterable) else list(items)
    items = [item.detach().cpu().numpy() if isinstance(item, torch.Tensor) else item for item in items]
    for item in items:
        if not isinstance(item, str | np.ndarray):
            raise InvalidTypeError(
                f"{item!r} ({type(item).__name__}) is neither word nor vector; pass a str, or np.array(...) of shape (dim,)"
            )
    return items


def find_rows(words: Sequence[str], row_of: Mapping[str, int]) -> list[int]:
    """Return the row of each word; `row_of` has the known words in the order of their rows.

    Raises `UnknownWordError` where some are unknown, one for all of them, and `InvalidTypeError` where one is no str.
    """
    for word in words:
        if not isinstance(word, str):
            raise InvalidTypeError(f"{word!r} is no word; pass a str or a list of them (rows are vectors.matrix[...])")
    unknown = list(dict.fromkeys(word for word in words if word not in row_of))
    if not unknown:
        return [row_of[word] for word in words]
    frequent = list(row_of)[:_SUGGEST_FROM]
    named = list(map(repr, unknown[:_SHOW_WORDS]))
    for number, word in enumerate(unknown[:_SUGGEST_FOR]):
        if near := difflib.get_close_matches(word, frequent, n=3, cutoff=0.7):
            named[number] += f" (did you mean {' or '.join(map(repr, near))}?)"
    more = f" and {len(unknown) - _SHOW_WORDS} more" if len(unknown) > _SHOW_WORDS else ""
    verb = "is" if len(unknown) == 1 else "are"
    said = f"{', '.join(named)}{more} {verb} not among the {len(row_of)} words; check spelling and case"
    raise UnknownWordError(said, unknown)


def lengths(matrix: np.ndarray) -> np.ndarray:
    """Return the length of each row: float32, shape (num_rows,)."""
    norms = np.empty(len(matrix), dtype=np.float32)
    for some in row_chunks(len(matrix), 4 * matrix.shape[1]):  # numpy squares a copy of what it is given
        norms[some] = np.linalg.norm(matrix[some], axis=1)
    return norms


def unit(vector: np.ndarray) -> np.ndarray:
    """Return a vector at length 1, float32; a zero vector as it is."""
    return (vector / max(float(np.linalg.norm(vector)), TINY)).astype(np.float32)


def cosines_to(matrix: np.ndarray, norms: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return the cosines of all rows, whose lengths are `norms`, to `direction` (of any length): float32, (num_rows,)."""
    cosines, direction = np.empty(len(matrix), dtype=np.float32), unit(direction)
    for some in row_chunks(len(matrix), 4 * matrix.shape[1]):
        cosines[some] = matrix[some] @ direction / np.maximum(norms[some], TINY)
    return cosines


def nearest_rows(
    matrix: np.ndarray, norms: np.ndarray, direction: np.ndarray, leave_out: set[int], topn: int
) -> tuple[list[int], list[float]]:
    """Return the `topn` rows with the largest cosines to `direction` (of any length), the nearest first, and the cosines.

    `matrix` (num_rows, dim) and its `norms` (num_rows,) are float32; the rows `leave_out` are not returned.
    """
    topn = min(topn, len(matrix) - len(leave_out))
    if not topn:
        return [], []
    cosines = cosines_to(matrix, norms, direction)
    cosines[list(leave_out)] = -np.inf
    best = np.argpartition(-cosines, topn - 1)[:topn]
    best = best[np.lexsort((best, -cosines[best]))]
    best = best[cosines[best] != -np.inf]  # rows left out sort before vectors that hold nan
    return best.tolist(), cosines[best].tolist()


def answer_analogies(matrix: np.ndarray, norms: np.ndarray, name: np.ndarray, questions: np.ndarray) -> np.ndarray:
    """Return which analogy questions are answered as expected; the answers are those of gensim's `evaluate_word_analogies`.

    A question "a is to b as c is to ?" is answered by the word nearest to b - a + c, all at length 1 (3CosAdd, Levy and
    Goldberg 2014), other than a, b and c. In another case they are words of their own: the first of five that is none of them
    in any case counts, else the fifth.

    `matrix` (num_words, dim) holds the words among which answers are looked for, and `norms` (num_words,) their lengths;
    `name` (num_words,) a number for each way to write a word, which rows that differ only in case share; `questions` (n, 4)
    the rows of a, b, c and of the word expected. Of cosines that are equal to rounding gensim may rank another first.
    """
    correct, size = np.zeros(len(questions), dtype=bool), max(_COSINES_AT_ONCE // len(matrix), 1)
    units = tensor_of(matrix) / torch.from_numpy(np.maximum(norms, TINY)[:, None])
    for start in range(0, len(questions), size):
        some = questions[start : start + size]
        a, b, c = (units[torch.from_numpy(some[:, i])] for i in range(3))
        # Some of which are a, b and c.
        nearest = ((b - a + c) @ units.T).topk(min(_LOOK_AT + 3, len(units))).indices.numpy()
        for number, (question, near) in enumerate(zip(some, nearest, strict=True), start):
            near = near[~np.isin(near, question[:3])][:_LOOK_AT]
            others = near[~np.isin(name[near], name[question[:3]])]
            answer = [*others[:1], *near[-1:]]
            correct[number] = bool(answer) and name[answer[0]] == name[question[3]]
    return correct
