"""Word vectors: look-up, neighbours, and the file they came from or go to."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, check_path, check_size
from speedtransfer.word2vec import formats, lookup
from speedtransfer.word2vec.formats_text import Stored
from speedtransfer.word2vec.lookup import UnknownWordError
from speedtransfer.word2vec.vocabulary import Vocabulary

__all__ = ["UnknownWordError", "Vectors"]


class Vectors(lookup.Words):
    """Words and their vectors.

    Parameters
    ----------
    words : sequence of str
        Distinct words; from the most frequent on, where `train` made them.
    matrix : ndarray or Tensor, shape (len(words), dim)
        float32 is taken as it is, without a copy; other floats are converted.
    counts : sequence of int, optional
        How often each word occurred. Kept by .safetensors and .kv files and for gensim, where it is the attribute "count".

    Attributes
    ----------
    words : list of str
    matrix : ndarray of float32, shape (len(words), dim)
    counts : ndarray of int64, shape (len(words),), or None
    """

    def __init__(self, words: Sequence[str], matrix: Any, counts: Any = None) -> None:
        if isinstance(matrix, torch.Tensor):
            matrix = matrix.detach().cpu()
            matrix = (matrix.float() if matrix.is_floating_point() else matrix).numpy()
        matrix = np.asarray(matrix)
        if not np.issubdtype(matrix.dtype, np.floating):
            raise InvalidTypeError(f"matrix holds {matrix.dtype} but vectors are floating-point; pass astype('f4')")
        super().__init__(words)
        if matrix.ndim != 2 or len(matrix) != len(self.words):
            raise InvalidValueError(
                f"matrix has shape {matrix.shape} but there are {len(self.words)} words; pass one row a word"
            )
        self.matrix = matrix.astype(np.float32, copy=False)
        self.counts = None if counts is None else lookup.check_counts(counts, len(self.words))

    @property
    def dim(self) -> int:
        """Vector dimension."""
        return self.matrix.shape[1]

    def __repr__(self) -> str:
        return f"Vectors({len(self)} words, dim={self.dim})"

    def __getitem__(self, words: str | Iterable[str]) -> np.ndarray:
        """Return the vector of a word (dim,), a view of `matrix`; or those of several (number of words, dim), a copy.

        Raises `UnknownWordError` where some have no vector; its message lists them and offers similar ones.
        """
        if isinstance(words, str):
            return np.asarray(self.matrix[lookup.find_rows([words], self._row_of)[0]])
        words = list(words) if isinstance(words, Iterable) else [words]
        return self.matrix[np.array(lookup.find_rows(words, self._row_of), dtype=np.int64)]

    @functools.cached_property
    def norms(self) -> np.ndarray:
        """Lengths of the vectors as they were at the first use: float32, shape (len(self),)."""
        return lookup.lengths(self.matrix)

    def similarity(self, first: str, second: str) -> float:
        """Return the cosine of two words' vectors, 0 where one is zero; unknown words raise `UnknownWordError`."""
        a, b = self[[first, second]].astype(np.float64)
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / length if length else 0.0

    def most_similar(
        self,
        positive: str | np.ndarray | Sequence[str | np.ndarray] = (),
        topn: int = 10,
        *,
        negative: str | np.ndarray | Sequence[str | np.ndarray] = (),
    ) -> list[tuple[str, float]]:
        """Return the words whose vectors point most nearly the same way as those given.

        With several words the direction is the sum of their vectors at length 1, `negative` ones with a minus: what gensim's
        ``KeyedVectors.most_similar`` does. Vectors, of shape (dim,), are taken at their own length. The words given are not
        among the answers: `topn` words and their cosines, the nearest first. Besides the words' own memory this takes some
        bytes a word, whatever the dim. Raises `UnknownWordError` where words have no vector, one for all of them.
        """
        topn = check_size(topn, "topn", 1)
        signed = (1.0, positive), (-1.0, negative)
        given = [(item, sign) for sign, items in signed for item in lookup.as_list(items)]
        if not given:
            raise InvalidValueError("most_similar has no words to start from; pass a word, or positive=[...]")
        rows = lookup.find_rows([item for item, _ in given if isinstance(item, str)], self._row_of)
        direction = np.zeros(self.dim)
        for item, sign in given:
            if isinstance(item, str):
                row = self._row_of[item]
                item = self.matrix[row] / max(self.norms[row], lookup.TINY)
            elif item.shape != (self.dim,):
                raise InvalidValueError(
                    f"a vector has shape {item.shape} but these have dim {self.dim}; pass shape ({self.dim},)"
                )
            direction += sign * item
        near, cosines = lookup.nearest_rows(self.matrix, self.norms, direction, set(rows), topn)
        return [(self.words[row], cosine) for row, cosine in zip(near, cosines, strict=True)]

    def analogy(self, a: str, b: str, c: str, topn: int = 10) -> list[tuple[str, float]]:
        """Return what is to `c` as `b` is to `a`: the words nearest to b - a + c, each at length 1.

        Called 3CosAdd (Levy and Goldberg 2014, "Linguistic Regularities in Sparse and Explicit Word Representations");
        ``analogy("man", "king", "woman")`` asks for a queen.
        """
        return self.most_similar([b, c], topn, negative=[a])

    def similar_by_word(self, word: str, topn: int = 10) -> list[tuple[str, float]]:
        """Return the words most similar to one word: `most_similar`, by gensim's name."""
        return self.most_similar([word], topn)

    def similar_by_vector(self, vector: np.ndarray, topn: int = 10) -> list[tuple[str, float]]:
        """Return the words most similar to a vector of shape (dim,): `most_similar`, by gensim's name."""
        return self.most_similar([vector], topn)

    def doesnt_match(self, words: Iterable[str]) -> str:
        """Return the word that is farthest from the mean of all of `words`, each at length 1.

        The answer is that of gensim's ``KeyedVectors.doesnt_match``, which leaves unknown words out; here they raise
        `UnknownWordError`.
        """
        words, rows = self._several(words, "words")
        vectors = self.matrix[rows] / np.maximum(self.norms[rows], lookup.TINY)[:, None]
        # Among equals gensim returns the first in the order of the alphabet.
        return min(zip(vectors @ lookup.unit(vectors.mean(axis=0)), words, strict=True))[1]

    def rank(self, first: str, second: str) -> int:
        """Return which neighbour of `first` the word `second` is: 1 is the nearest; unknown words raise `UnknownWordError`."""
        row, than = lookup.find_rows([first, second], self._row_of)
        cosines = lookup.cosines_to(self.matrix, self.norms, self.matrix[row].astype(np.float64))
        limit, cosines[row] = cosines[than], -np.inf
        return int((cosines > limit).sum()) + 1

    def n_similarity(self, first: Iterable[str], second: Iterable[str]) -> float:
        """Return the cosine of the mean vectors of two groups of words, 0 where one is zero.

        The figure is that of gensim's ``KeyedVectors.n_similarity``, which leaves unknown words out; here they raise
        `UnknownWordError`. Vectors are taken at their own length.
        """
        groups = [self._several(words, name)[1] for words, name in ((first, "first"), (second, "second"))]
        a, b = (lookup.unit(self.matrix[rows].astype(np.float64).mean(axis=0)) for rows in groups)
        return float(a @ b)

    def _several(self, words: Any, name: str) -> tuple[list[str], np.ndarray]:
        """Return a group of words, at least one, and their rows."""
        words = lookup.check_words(words, name)
        if not words:
            raise InvalidValueError(f"{name} is empty; pass at least one word")
        return words, np.array(lookup.find_rows(words, self._row_of), dtype=np.int64)

    def to_gensim(self) -> Any:
        """Return gensim's ``KeyedVectors`` of these words, over the same memory as `matrix`; needs gensim."""
        return formats.to_keyed_vectors(Stored(self.words, self.matrix, self.counts))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vectors in the format of the suffix; a file that was there stays whole until the new one is.

        .txt, .vec and .bin are word2vec's; .glove is text without the first line; .kv gensim's ``KeyedVectors.save``, in one
        file. .safetensors takes any word: `vectors`, `words` (uint8: all in UTF-8, one after the other), `word_ends` (int64)
        and, if there are any, `counts` (int64). Text and .bin take no word that is empty or holds white space.
        """
        path = check_path(path)
        formats.find_format(path).write(path, Stored(self.words, self.matrix, self.counts))

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_words: int | None = None) -> Vectors:
        """Read what `save`, word2vec.c, GloVe or gensim wrote; .safetensors is mapped, so it loads at once.

        Text (.txt, .vec, .glove) has a header where its first line has two fields, else it is GloVe's. Text and .bin may be
        packed: .txt.gz, .bin.gz. **A .kv file is a pickle, which can run any code: load only those that you trust.**

        `path` is a file, or the output folder of a run, which has the counts of words whatever the format of the vectors. Only
        the first `max_words` are read, where trainers put the frequent ones. Raises `StorageError` where a file is missing or
        damaged; the message names the place.
        """
        path = check_path(path)
        folder = path if path.is_dir() else None
        path = formats.find_vectors(path)
        if max_words is not None:
            max_words = check_size(max_words, "max_words", 1)
        stored = formats.find_format(path, reading=True).read(path, max_words)
        if folder is not None and stored.counts is None:
            stored = stored._replace(counts=_counts_in(folder / formats.VOCABULARY, stored.words))
        try:
            return cls(*stored)
        except (InvalidValueError, InvalidTypeError) as error:
            what = str(error).partition(";")[0]
            raise StorageError(f"{str(path)!r} holds no word vectors ({what}); get the file again") from error


def _counts_in(path: Path, words: Sequence[str]) -> np.ndarray | None:
    """Return the counts of `words` in the file of a vocabulary; None where it is missing, or of others."""
    with contextlib.suppress(StorageError):
        vocabulary = Vocabulary.load(path)
        if vocabulary.words[: len(words)] == list(words):
            return vocabulary.counts[: len(words)]
    return None
