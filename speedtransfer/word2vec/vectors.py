"""Word vectors: look-up, neighbours, and the file they came from or go to."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.word2vec import formats

_SUGGEST_FROM = (
    50_000  # words looked through for a near one: the search is slow, the frequent ones are what people mean
)


class UnknownWordError(InvalidValueError, KeyError):
    """A word has no vector."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class Vectors:
    """Words and their vectors.

    Parameters
    ----------
    words : sequence of str
        Distinct words; from the most frequent on, where `train` made them.
    matrix : ndarray or Tensor, shape (len(words), dim)
        float32 is taken as it is, without a copy; other floats are converted.

    Attributes
    ----------
    words : list of str
    matrix : ndarray of float32, shape (len(words), dim)

    Raises
    ------
    InvalidValueError
        `matrix` is not 2-D or has not one row a word, or a word is there twice.
    InvalidTypeError
        `matrix` holds no floating-point numbers.
    """

    def __init__(self, words: Sequence[str], matrix: Any) -> None:
        if isinstance(matrix, torch.Tensor):
            matrix = matrix.detach().cpu()
            matrix = (matrix.float() if matrix.is_floating_point() else matrix).numpy()
        matrix = np.asarray(matrix)
        if not np.issubdtype(matrix.dtype, np.floating):
            raise InvalidTypeError(
                f"matrix holds {matrix.dtype} but vectors are floating-point; pass matrix.astype('f4')"
            )
        if matrix.ndim != 2 or len(matrix) != len(words):
            raise InvalidValueError(
                f"matrix has shape {matrix.shape} but there are {len(words)} words; pass one row a word"
            )
        self.words = list(words)
        self.matrix = matrix.astype(np.float32, copy=False)
        self._row_of = {word: row for row, word in enumerate(self.words)}
        if len(self._row_of) != len(self.words):
            twice = next(word for row, word in enumerate(self.words) if self._row_of[word] != row)
            raise InvalidValueError(f"word {twice!r} is there twice; pass distinct words")
        self._norms: np.ndarray | None = None

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return self.matrix.shape[1]

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._row_of

    def __repr__(self) -> str:
        return f"Vectors({len(self)} words, dim={self.dim})"

    def __getitem__(self, word: str) -> np.ndarray:
        """Return the vector of `word`: float32, shape (dim,), a view of `matrix`.

        Raises
        ------
        UnknownWordError
            There is none; the message offers near words.
        """
        row: np.ndarray = self.matrix[self._find(word)]
        return row

    def _find(self, word: str) -> int:
        row = self._row_of.get(word)
        if row is None:
            near = difflib.get_close_matches(str(word), self.words[:_SUGGEST_FROM], n=3, cutoff=0.7)
            remedy = "did you mean " + " or ".join(map(repr, near)) + "?" if near else "check spelling and case"
            raise UnknownWordError(f"{word!r} is not among the {len(self)} words; {remedy}")
        return row

    @property
    def norms(self) -> np.ndarray:
        """Lengths of the vectors as they were at the first use: float32, shape (len(self),)."""
        if self._norms is None:
            self._norms = np.linalg.norm(self.matrix, axis=1)
        return self._norms

    def similarity(self, first: str, second: str) -> float:
        """Return the cosine of the angle between two words' vectors, 0 where one of them is zero."""
        a, b = self[first].astype(np.float64), self[second].astype(np.float64)
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / length if length else 0.0

    def most_similar(self, word: str, topn: int = 10) -> list[tuple[str, float]]:
        """Return the words whose vectors point most nearly the same way.

        Parameters
        ----------
        word : str
        topn : int
            How many; all the other words where there are fewer.

        Returns
        -------
        list of (str, float)
            Word and cosine, the nearest first.
        """
        topn = check_size(topn, "topn", 1)
        row = self._find(word)
        tiny = np.finfo(np.float32).tiny  # a zero vector is near to nothing
        cosines = (self.matrix @ (self.matrix[row] / max(self.norms[row], tiny))) / np.maximum(self.norms, tiny)
        cosines[row] = -np.inf
        topn = min(topn, len(self) - 1)
        best = np.argpartition(-cosines, topn - 1)[:topn] if topn else np.empty(0, dtype=np.int64)
        best = best[np.lexsort((best, -cosines[best]))]
        return [(self.words[i], float(cosines[i])) for i in best]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vectors; the suffix of `path` says how. A file that was there stays whole until the new one is.

        ============== ===========================================================================================
        .txt, .vec     word2vec text: a line ``words dim``, then ``word number number ...`` a line; exact
        .bin           word2vec binary: the same line, then the word, a space, float32 little-endian, a line end
        .safetensors   tensors `vectors` (float32, 2-D), `words` (uint8: all words in UTF-8, one after the other) and
                       `word_ends` (int64: the byte where each word ends); any word at all
        ============== ===========================================================================================

        Raises
        ------
        InvalidValueError
            Another suffix; a word that the format cannot hold (empty, or with white space, in text and binary).
        StorageError
            The file cannot be written.
        """
        path = Path(path)
        formats.find_format(path).write(path, self.words, self.matrix)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vectors:
        """Read what `save`, word2vec.c or gensim wrote; .safetensors is mapped, so it loads at once.

        Raises
        ------
        InvalidValueError
            Unknown suffix.
        StorageError
            The file is missing, or is damaged (the message says where).
        """
        path = Path(path)
        return cls(*formats.find_format(path).read(path))
