"""The sampler: blocks of words, the window of each word, and the negatives that a block shares.

A block is a stretch of the corpus of fixed length, chosen so that about `block_words` words survive subsampling. Fixed
stretches make the number of steps known beforehand (a learning rate can fall along a straight line to the very end) and any
block reachable by its number and the state of the generator (training can be taken up in the middle).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.word2vec.vocabulary import Vocabulary


@dataclass(frozen=True)
class Block:
    """What one step trains on; all on the CPU.

    Attributes
    ----------
    words : Tensor of int64, shape (n,)
        Consecutive words that survived subsampling.
    windows : Tensor of int64, shape (n,)
        How far the context of each word reaches, to both sides.
    negatives : Tensor of int64, shape (shared_negatives,)
        Words drawn from the noise distribution, for all the words of the block.
    num_corpus_words : int
        Words of the corpus that the block covers, before subsampling.
    """

    words: Tensor
    windows: Tensor
    negatives: Tensor
    num_corpus_words: int


class Sampler:
    """Blocks of a corpus, one after the other.

    Parameters
    ----------
    ids : ndarray of int32, shape (num_words,)
        The corpus as word numbers.
    vocabulary : Vocabulary
    generator : torch.Generator
        Every draw comes from it, so its seed decides the blocks bit for bit. On the CPU.
    window : int
        The window of a word is drawn evenly from 1 to `window`.
    sample : float
        Threshold of subsampling (`Vocabulary.keep_probability`).
    block_words : int
        About so many words of a block survive subsampling.
    shared_negatives : int
        Negatives drawn for a block.
    """

    def __init__(
        self,
        ids: np.ndarray,
        vocabulary: Vocabulary,
        generator: torch.Generator,
        window: int = 5,
        sample: float = 1e-3,
        block_words: int = 2048,
        shared_negatives: int = 256,
    ) -> None:
        if len(ids) == 0:
            raise InvalidValueError("the corpus has no word of the vocabulary; build the vocabulary from this corpus")
        self.ids = ids
        self.generator = generator
        self.window = check_size(window, "window", 1)
        self.shared_negatives = check_size(shared_negatives, "shared_negatives", 1)
        keep = vocabulary.keep_probability(sample)
        kept_share = float(keep @ vocabulary.counts) / vocabulary.num_words
        self.stretch = min(max(round(check_size(block_words, "block_words", 2) / kept_share), 1), len(ids))
        # float32 is what torch.rand draws by default; half the memory traffic of the lookup, too.
        self._keep = torch.from_numpy(keep.astype(np.float32))
        cumulated = np.cumsum(vocabulary.noise())
        cumulated[-1] = 1.0  # rounding must not leave a gap behind the last word
        self._noise = torch.from_numpy(cumulated)

    def __len__(self) -> int:
        """Return the number of blocks in the corpus."""
        return -(-len(self.ids) // self.stretch)

    def __iter__(self) -> Iterator[Block]:
        return map(self.block, range(len(self)))

    def block(self, number: int) -> Block:
        """Draw block `number`, ``0 <= number < len(self)``; the draws follow the generator, not the number."""
        stretch = self.ids[number * self.stretch : (number + 1) * self.stretch]
        words = torch.from_numpy(stretch.astype(np.int64))
        words = words[torch.rand(len(words), generator=self.generator) < self._keep[words]]
        windows = torch.randint(1, self.window + 1, (len(words),), generator=self.generator)
        uniform = torch.rand(self.shared_negatives, dtype=torch.float64, generator=self.generator)
        negatives = torch.searchsorted(self._noise, uniform, right=True)
        return Block(words, windows, negatives, len(stretch))
