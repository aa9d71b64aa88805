"""The words of a corpus with their counts, and the two distributions that word2vec draws from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, check_size
from speedtransfer.tables.files import atomic


class Vocabulary:
    """Words numbered from the most frequent on; words of equal count in alphabetical order.

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

    Raises
    ------
    InvalidValueError
        A word is there twice, or there are not as many counts as words.
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int] | np.ndarray) -> None:
        self.words = list(words)
        self.counts = np.asarray(counts, dtype=np.int64)
        self._number_of = {word: number for number, word in enumerate(self.words)}
        if self.counts.shape != (len(self.words),):
            raise InvalidValueError(f"{len(self.words)} words but counts of shape {self.counts.shape}; pass one a word")
        if len(self._number_of) != len(self.words):
            twice = next(word for number, word in enumerate(self.words) if self._number_of[word] != number)
            raise InvalidValueError(f"word {twice!r} is there twice; pass distinct words")

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], min_count: int = 5, max_words: int | None = None) -> Vocabulary:
        """Choose the words of a model.

        Parameters
        ----------
        counts : mapping of str to int
            Every word of the corpus and how often it occurs.
        min_count : int
            Words that occur less often are left out.
        max_words : int, optional
            Of the rest, only this many of the most frequent.

        Raises
        ------
        InvalidValueError
            Fewer than two words are left: there is nothing to tell apart.
        """
        min_count = check_size(min_count, "min_count", 1)
        if len(counts) < 2:
            found = f"has one distinct word, {next(iter(counts))!r}," if counts else "holds no words"
            raise InvalidValueError(f"the corpus {found} but a model needs at least 2; pass a larger corpus")
        kept = [(-count, word) for word, count in counts.items() if count >= min_count]
        if len(kept) < 2:
            works = sorted(counts.values())[-2]
            raise InvalidValueError(
                f"min_count={min_count} leaves {len(kept)} of {len(counts)} distinct words but a model needs at least 2; "
                f"pass min_count={works} or less"
            )
        kept.sort()
        if max_words is not None:
            del kept[check_size(max_words, "max_words", 2) :]
        return cls([word for _, word in kept], [-negated for negated, _ in kept])

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._number_of

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} words, {self.num_words} occurrences)"

    @property
    def num_words(self) -> int:
        """Occurrences of all the words in the corpus."""
        return int(self.counts.sum())

    def get(self, word: str, default: int = -1) -> int:
        """Return the number of `word`, or `default` where it is not in the vocabulary."""
        return self._number_of.get(word, default)

    def encode(self, words: Iterable[str]) -> np.ndarray:
        """Return the numbers of `words` as int32, shape (known words,); words outside the vocabulary are dropped."""
        numbers = np.fromiter(map(self.get, words), dtype=np.int32)
        return numbers[numbers >= 0]

    def keep_probability(self, sample: float) -> np.ndarray:
        """Return the probability with which subsampling keeps an occurrence of each word.

        With f the share of a word in the corpus it is ``(sqrt(f / sample) + 1) * sample / f``, at most 1: the formula of
        Google's word2vec.c (function ``TrainModelThread``), which is not quite the one in the paper (Mikolov et al. 2013,
        "Distributed Representations of Words and Phrases", section 2.3).

        Parameters
        ----------
        sample : float
            The threshold, usually 1e-5 to 1e-3; 0 keeps everything.

        Returns
        -------
        ndarray of float64, shape (len(self),)

        Raises
        ------
        InvalidTypeError, InvalidValueError
            `sample` is no number, or is negative or not finite.
        """
        if not isinstance(sample, int | float) or isinstance(sample, bool):
            raise InvalidTypeError(f"sample is {sample!r} but must be a number; pass 1e-3, or 0 to keep every word")
        if not 0 <= sample < float("inf"):
            raise InvalidValueError(f"sample is {sample} but must be at least 0 and finite; pass 1e-3, or 0 for none")
        if sample == 0:
            return np.ones(len(self))
        share = self.counts / self.num_words
        return np.minimum((np.sqrt(share / sample) + 1) * sample / share, 1.0)

    def noise(self, power: float = 0.75) -> np.ndarray:
        """Return the probability of each word as a negative example, ``count**power`` over the sum of them.

        The power is that of Mikolov et al. 2013 (section 2.2).

        Returns
        -------
        ndarray of float64, shape (len(self),)
        """
        weight = self.counts.astype(np.float64) ** power
        return weight / weight.sum()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a line ``word count`` a word, which gensim reads as `fvocab`; the old file stays whole until the end."""
        with atomic(Path(path)) as file:
            for word, count in zip(self.words, self.counts.tolist(), strict=True):
                file.write(f"{word} {count}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what `save` wrote.

        Raises
        ------
        StorageError
            The file is missing or a line of it is no word and count.
        """
        words, counts = [], []
        try:
            with open(path, encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, start=1):
                    word, _, count = line.rstrip("\n").rpartition(" ")
                    if not (word and count.isdecimal()):
                        raise StorageError(
                            f"line {number} of {str(path)!r} is {line[:40]!r}, no word and count; mend it"
                        )
                    words.append(word)
                    counts.append(int(count))
        except UnicodeDecodeError as error:
            raise StorageError(f"{str(path)!r} is no vocabulary ({error}); pass a vocab.txt") from None
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); check the path") from error
        return cls(words, counts)
