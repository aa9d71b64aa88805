"""A corpus: words streamed out of text files, once, into a temporary file of word numbers that training reads at will.

The text may exceed memory, may be one single line (the text8 format) and may come from a pipe that can be read only once.
So it is read exactly once, in blocks of bytes: every word gets a provisional number in order of appearance, the numbers go
to a temporary file (4 bytes a word), and when the counts are known the file is rewritten in place with the numbers of the
vocabulary. Memory holds the distinct words, never the text.

Words are what white space separates. Lower-casing and punctuation are the user's affair. The corpus is one stream: windows
reach across lines and files.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import IO

import numpy as np

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec.text import Source, iter_words, name_of
from speedtransfer.word2vec.vocabulary import Vocabulary

CHUNK_IDS = 1 << 22


class Corpus:
    """A corpus as word numbers, in a temporary file that vanishes with this object.

    Parameters
    ----------
    source : path-like, "-" or binary file
        A text file (``.gz`` and ``.xz`` are decompressed), a folder (every .txt, .gz and .xz file below it, sorted), "-" for
        standard input, or an open binary file.
    min_count : int
        Words that occur less often are dropped.
    max_words : int, optional
        Keep only this many of the most frequent words.
    report : callable, optional
        Called with the number of words read so far, about once per megabyte of text.

    Attributes
    ----------
    vocabulary : Vocabulary
    ids : ndarray of int32, shape (num_words,)
        The words of the vocabulary in the order of the text, mapped from the temporary file, read-only.
    num_raw_words : int
        Words of the text, those that were dropped included.

    Raises
    ------
    StorageError
        A file is missing, unreadable or damaged, or the temporary file does not fit on its disk.
    InvalidValueError
        The text is empty, is no UTF-8, or leaves fewer than two words in the vocabulary.
    """

    def __init__(
        self,
        source: Source,
        min_count: int = 5,
        max_words: int | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self.num_raw_words = 0
        with _temporary_file() as self._file:
            for words in iter_words(source):
                numbers = np.fromiter(map(number_of.__getitem__, words), dtype=np.int32, count=len(words))
                _write(self._file, numbers)
                self.num_raw_words += len(words)
                if report is not None:
                    report(self.num_raw_words)
            if self.num_raw_words == 0:
                raise InvalidValueError(f"{name_of(source)} holds no words; pass a corpus with text in it")
            self._file.flush()
            # The map keeps the pages of the file alive after the file is closed (and, nameless, gone from its folder).
            ids = np.memmap(self._file, dtype=np.int32, mode="r+", shape=(self.num_raw_words,))
        counts = np.zeros(len(number_of), dtype=np.int64)
        for start in range(0, len(ids), CHUNK_IDS):
            counts += np.bincount(ids[start : start + CHUNK_IDS], minlength=len(counts))
        self.vocabulary = Vocabulary.from_counts(
            dict(zip(number_of, counts.tolist(), strict=True)), min_count=min_count, max_words=max_words
        )
        final = np.fromiter((self.vocabulary.get(word) for word in number_of), dtype=np.int32, count=len(counts))
        self.ids = _renumber(ids, final)

    def __len__(self) -> int:
        return len(self.ids)


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="speedtransfer-")
    except OSError as error:
        raise StorageError(
            f"no temporary file for the corpus ({error.strerror}); set TMPDIR to a folder with room"
        ) from error


def _write(file: IO[bytes], numbers: np.ndarray) -> None:
    try:
        file.write(numbers.tobytes())
    except OSError as error:
        raise StorageError(
            f"the corpus does not fit as numbers (4 bytes a word) in {tempfile.gettempdir()!r} ({error.strerror}); "
            "set TMPDIR to a folder with more room"
        ) from error


def _renumber(ids: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Replace every number by its final one in place, drop those whose final one is negative, return what is left."""
    end = 0  # never overtakes the chunk being read
    for start in range(0, len(ids), CHUNK_IDS):
        chunk = final[ids[start : start + CHUNK_IDS]]
        chunk = chunk[chunk >= 0]
        ids[end : end + len(chunk)] = chunk
        end += len(chunk)
    left = ids[:end].view(np.ndarray)
    left.flags.writeable = False
    return left
