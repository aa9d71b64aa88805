"""Windows of words of the text that comes with the package: some words, and the one that follows them."""

from __future__ import annotations

import collections
import functools
import gzip
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

TEXT = "world_factbook.words.txt.gz"
HELD_OUT = 0.1  # of the text, its end: nothing of it is trained on


class Windows(NamedTuple):
    """Windows of a text, ``(n, context + 1)`` int64 each; the last word of each is the one to be predicted.

    Attributes
    ----------
    num_words : int
        How many words there are; those that occur more often have smaller numbers. Two of them are none: the end of a line,
        and a word that the part for training does not have.
    train, held_out : Tensor
    """

    num_words: int
    train: Tensor
    held_out: Tensor


@functools.lru_cache(maxsize=2)
def read_windows(context: int, classes: int) -> Windows:
    """Return the windows of the text whose last word is one of the `classes` commonest.

    Parameters
    ----------
    context : int
        Words before the one to be predicted.
    classes : int
    """
    with resources.files("speedtransfer.word2vec").joinpath("corpora", TEXT).open("rb") as packed:
        lines = gzip.decompress(packed.read()).decode().splitlines()
    words = [word for line in lines for word in (*line.split(), "")]
    split = len(words) - int(HELD_OUT * len(words))
    counts = collections.Counter(words[:split])
    counts.pop("")
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    numbers[""] = len(numbers)
    unknown = len(numbers)
    tokens = torch.tensor([numbers.get(word, unknown) for word in words], dtype=torch.int64)
    train, held_out = (_cut(part, context, classes) for part in (tokens[:split], tokens[split:]))
    return Windows(unknown + 1, train, held_out)


def _cut(tokens: Tensor, context: int, classes: int) -> Tensor:
    windows = tokens.unfold(0, context + 1, 1)
    return windows[windows[:, -1] < classes]
