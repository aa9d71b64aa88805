"""A text as numbers: lower-case words between spaces, the frequent ones by number; a line is a document."""

from __future__ import annotations

import collections
import gzip
import lzma
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

# The tokens that are no words: all words that are not in the vocabulary, and the end of a line.
UNKNOWN, END = 0, 1
VALIDATION = 0.1  # of the text, its end


class DataError(ValueError):
    """A text cannot be read, or is too short."""


class Corpus(NamedTuple):
    """The tokens of a text, ``(n,)`` int64 each.

    Attributes
    ----------
    name : str
    vocabulary : int
        How many tokens there are; those of the text are below it.
    train, validation : Tensor
    """

    name: str
    vocabulary: int
    train: Tensor
    validation: Tensor


def read_corpus(path: Path | None, vocabulary: int) -> Corpus:
    """Return the tokens of a text file (``.gz`` and ``.xz`` too), or of the World Factbook that comes with the package.

    The vocabulary is that of the part for training: its `vocabulary` - 2 most frequent words.

    Raises
    ------
    DataError
        The file cannot be read.
    """
    try:
        if path is None:
            corpora = resources.files("speedtransfer.word2vec").joinpath("corpora")
            with corpora.joinpath("world_factbook.words.txt.gz").open("rb") as packed, gzip.open(packed) as file:
                return _tokens("world_factbook", _words(file), vocabulary)
        openers = {".gz": gzip.open, ".xz": lzma.open}
        with openers.get(path.suffix, open)(path, "rb") as file:
            return _tokens(path.name, _words(file), vocabulary)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a text file, which may end with .gz or .xz") from error


def _words(file: IO[bytes]) -> list[str]:
    """Return the words of a text, and "" for the end of a line."""
    found: list[str] = []
    for line in file:
        words = line.decode("utf-8", errors="replace").lower().split()
        if words:
            found += [*words, ""]
    return found


def _tokens(name: str, words: list[str], vocabulary: int) -> Corpus:
    split = len(words) - int(VALIDATION * len(words))
    counts = collections.Counter(words[:split])
    counts.pop("", None)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(vocabulary - 2), start=2)}
    numbers[""] = END
    tokens = torch.tensor([numbers.get(word, UNKNOWN) for word in words], dtype=torch.int64)
    return Corpus(name, len(numbers) + 1, tokens[:split], tokens[split:])


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """Return ``(n, length + 1)`` stretches of the text; the last token of each is the first of the next."""
    return tokens.unfold(0, length + 1, length)


def batches(windows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches ``(size, length + 1)`` without end, all windows once in an epoch, in an order by the seed."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        for places in torch.randperm(len(windows), generator=draw).split(size):
            if len(places) == size:
                yield windows[places]
