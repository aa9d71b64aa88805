"""Vectors of words outside the vocabulary, from the rows of hashed character n-grams."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import safetensors
import torch

from speedtransfer.errors import InvalidValueError, StorageError, describe_ending
from speedtransfer.safetensors_io import header_bytes, make_header
from speedtransfer.system import replace_file
from speedtransfer.tables import files, row_chunks
from speedtransfer.tables.saving import check_path
from speedtransfer.word2vec.subwords import check_ngrams, hash_word

_FORMAT = "speedtransfer n-gram vectors 1"


class NgramVectors:
    """The rows of character n-grams; the vector of a word is the mean of those of its n-grams.

    They go with the `Vectors` of the same training: ``vectors.most_similar(ngrams["unseen"])``.

    Parameters
    ----------
    matrix : ndarray of float32, shape (buckets, dim)
        Taken as it is, without a copy.
    min_n, max_n : int
        Characters of an n-gram.

    Attributes
    ----------
    matrix, min_n, max_n

    Raises
    ------
    InvalidValueError, InvalidTypeError
        `matrix` is not 2-D or empty; the lengths break their rule.
    """

    def __init__(self, matrix: np.ndarray, min_n: int = 3, max_n: int = 6) -> None:
        if matrix.ndim != 2 or not len(matrix):
            raise InvalidValueError(
                f"matrix has shape {matrix.shape} but must be (buckets, dim); pass one row a bucket"
            )
        check_ngrams(len(matrix), min_n, max_n)
        self.matrix, self.min_n, self.max_n = matrix, min_n, max_n

    def __repr__(self) -> str:
        buckets, dim = self.matrix.shape
        return f"NgramVectors({buckets} buckets, dim={dim}, min_n={self.min_n}, max_n={self.max_n})"

    def __getitem__(self, word: str) -> np.ndarray:
        """Return the mean of the rows of the n-grams of `word`: float32, shape (dim,), as fastText for unseen words.

        Raises
        ------
        UnknownWordError
            It is too short to have any.
        """
        mean: np.ndarray = self.matrix[hash_word(word, len(self.matrix), self.min_n, self.max_n)].mean(axis=0)
        return mean

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as tensor `ngrams` of a .safetensors file; a file that was there stays whole until the new one is.

        Raises
        ------
        InvalidValueError
            Another suffix.
        StorageError
            The file cannot be written.
        """
        path = _check_suffix(path)
        facts = {"format": _FORMAT, "min_n": str(self.min_n), "max_n": str(self.max_n)}
        with replace_file(path) as file:
            file.write(header_bytes(make_header([("ngrams", torch.float32, self.matrix.shape)], facts)))
            for rows in row_chunks(len(self.matrix), 4 * self.matrix.shape[1]):
                file.write(self.matrix[rows].astype("<f4", copy=False).tobytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramVectors:
        """Read what `save` wrote; the rows are mapped, so it loads at once.

        Raises
        ------
        InvalidValueError
            Another suffix, or a .safetensors file of something else.
        StorageError
            The file is missing or damaged.
        """
        path = _check_suffix(path)
        matrix, _ = files.open_mapped(path, writable=False, key="ngrams")
        try:
            with safetensors.safe_open(path, framework="np") as file:
                facts = file.metadata() or {}
            min_n, max_n = int(facts["min_n"]), int(facts["max_n"])
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise StorageError(f"{str(path)!r} does not say min_n and max_n ({error!r}); get the file again") from error
        return cls(matrix.numpy(), min_n, max_n)


def _check_suffix(path: str | os.PathLike[str]) -> Path:
    path = check_path(path)
    if path.suffix != ".safetensors":
        raise InvalidValueError(
            f"path {str(path)!r} {describe_ending(path)} but n-gram vectors are .safetensors; rename it"
        )
    return path
