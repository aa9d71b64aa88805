"""Rows by word, with an error that helps; rows near a direction, in bounded memory."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from speedtransfer.errors import InvalidValueError

# Words searched for a similar spelling: the search is slow, and people mostly mean frequent words.
_SUGGEST_FROM = 50_000
_SUGGEST_FOR = 3  # unknown words for which near ones are looked for
_SHOW_WORDS = 10
_ROWS_AT_ONCE = 1 << 18
TINY = float(np.finfo(np.float32).tiny)  # a zero vector divided by this is a zero vector: near to nothing


class UnknownWordError(InvalidValueError, KeyError):
    """Words have no vector; `words` lists them, each once."""

    def __init__(self, message: str, words: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.words = tuple(words)

    __str__ = Exception.__str__  # KeyError shows its message in quotes


def find_rows(words: Sequence[str], row_of: Mapping[str, int]) -> list[int]:
    """Return the row of each word.

    Parameters
    ----------
    words : sequence of str
    row_of : mapping of str to int
        The known words in the order of their rows.

    Raises
    ------
    UnknownWordError
        Some have none: one error for all of them.
    """
    unknown = list(dict.fromkeys(word for word in words if word not in row_of))
    if not unknown:
        return [row_of[word] for word in words]
    frequent = list(row_of)[:_SUGGEST_FROM]
    nears = [difflib.get_close_matches(str(word), frequent, n=3, cutoff=0.7) for word in unknown[:_SUGGEST_FOR]]
    hints = ["did you mean " + " or ".join(map(repr, near)) + "?" if near else "" for near in nears]
    remedy = "check spelling and case"
    if len(unknown) == 1:
        message = f"{unknown[0]!r} is not among the {len(row_of)} words; {hints[0] or remedy}"
    else:
        parts = [f"{word!r} ({hint})" if hint else repr(word) for word, hint in zip(unknown, hints, strict=False)]
        parts += map(repr, unknown[_SUGGEST_FOR:_SHOW_WORDS])
        more = f" and {len(unknown) - _SHOW_WORDS} more" if len(unknown) > _SHOW_WORDS else ""
        count = f"{len(unknown)} of {len(set(words))} words are not among the {len(row_of)}"
        message = f"{count}: {', '.join(parts)}{more}; {remedy}"
    raise UnknownWordError(message, unknown)


def lengths(matrix: np.ndarray) -> np.ndarray:
    """Return the length of each row: float32, shape (num_rows,)."""
    norms = np.empty(len(matrix), dtype=np.float32)
    for start in range(0, len(matrix), _ROWS_AT_ONCE):  # numpy squares a copy of what it is given
        some = slice(start, start + _ROWS_AT_ONCE)
        norms[some] = np.linalg.norm(matrix[some], axis=1)
    return norms


def nearest_rows(
    matrix: np.ndarray, norms: np.ndarray, direction: np.ndarray, leave_out: set[int], topn: int
) -> tuple[list[int], list[float]]:
    """Return the rows with the largest cosines to `direction`, the nearest first, and the cosines.

    Parameters
    ----------
    matrix : ndarray of float32, shape (num_rows, dim)
    norms : ndarray of float32, shape (num_rows,)
    direction : ndarray of float, shape (dim,)
        Of any length.
    leave_out : set of int
        Rows that are no answers.
    topn : int
        How many; all where there are fewer.
    """
    direction = (direction / max(float(np.linalg.norm(direction)), TINY)).astype(np.float32)
    best, cosine = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    topn = min(topn, len(matrix) - len(leave_out))
    for start in range(0, len(matrix), _ROWS_AT_ONCE) if topn else ():
        some = slice(start, start + _ROWS_AT_ONCE)
        cosines = matrix[some] @ direction / np.maximum(norms[some], TINY)
        cosines[[row - start for row in leave_out if start <= row < start + len(cosines)]] = -np.inf
        size = min(topn, len(cosines))
        top = np.argpartition(-cosines, size - 1)[:size]
        best, cosine = np.concatenate([best, top + start]), np.concatenate([cosine, cosines[top]])
        order = np.lexsort((best, -cosine))[:topn]
        best, cosine = best[order], cosine[order]
    answers = cosine != -np.inf  # what is left out comes before vectors that hold nan
    best, cosine = best[answers], cosine[answers]
    return best.tolist(), cosine.tolist()
