"""Sample blocks of words, their windows and a pool of negatives; choose the number of steps.

A block is a stretch of the corpus of fixed length, of which about `block_words` words survive subsampling: so the number of
steps is known beforehand, and a learning rate can fall along a straight line to the very end. Each epoch takes the stretches
in an order of its own: in that of the text, rows lean towards its last topics at the end. What a step draws depends on the
seed and its number alone: a run is taken up in the middle, and blocks can be drawn ahead of time.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import HostMemoryError, InvalidValueError, format_bytes
from speedtransfer.system import physical_bytes
from speedtransfer.word2vec.places import Block
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.vocabulary import Vocabulary
from speedtransfer.workers import Workers

CHOSEN = ("epochs", "block_words")  # settings that a schedule chooses where they are None
STEPS = 1_000  # that a run should have
EPOCHS, MOST_EPOCHS = 5, 50
BLOCK_WORDS, FEWEST_BLOCK_WORDS = 16_384, 32
GROUP_WORDS = 512  # words of a block that each `shared_negatives` of the pool are drawn for


class Sampler:
    """Blocks of a corpus, epoch after epoch, drawn on the host.

    Parameters
    ----------
    ids : ndarray of int32, shape (num_words,)
        The corpus as word numbers.
    vocabulary : Vocabulary
    settings : Settings
        `block_words` are by default 16,384.
    starts : ndarray of int64, shape (num_sequences,), optional
        Where each sequence begins in `ids`, from 0 on; windows stay within a sequence. None: the corpus is one.
    """

    def __init__(
        self,
        ids: np.ndarray,
        vocabulary: Vocabulary,
        settings: Settings | None = None,
        starts: np.ndarray | None = None,
    ) -> None:
        settings = settings or Settings()
        if len(ids) == 0:
            raise InvalidValueError("the corpus has no word of the vocabulary; build the vocabulary from this corpus")
        if vocabulary.num_words == 0:
            raise InvalidValueError(
                "the counts of the vocabulary are all 0, so there is nothing to draw negatives by; pass how often words occur"
            )
        self.ids, self.seed = ids, settings.seed
        self.starts = np.zeros(1, np.int64) if starts is None else starts
        self.window, self.shared_negatives = settings.window, settings.pool
        # What CBOW predicts from is a mean over the window: no sum of pairs, of which the expectation could be taken instead.
        self._draws_windows = settings.model == "cbow"
        block_words = min(settings.block_words or BLOCK_WORDS, max(len(ids), 2))
        self.pool = -(-block_words // GROUP_WORDS) * self.shared_negatives
        num_bytes = 8 * self.pool
        if num_bytes > physical_bytes():
            raise HostMemoryError(
                f"shared_negatives={settings.pool} asks for {format_bytes(num_bytes)} a step but this machine has "
                f"{format_bytes(physical_bytes())} of memory; pass fewer shared_negatives"
            )
        self.stretch = min(max(round(block_words / vocabulary.kept_share(settings.sample)), 2), len(ids))
        self._keep = torch.from_numpy(vocabulary.keep_probability(settings.sample).astype(np.float32))
        cumulated = np.cumsum(vocabulary.noise())
        cumulated[-1] = 1.0  # exactly, however the sum was rounded
        self._noise = torch.from_numpy(cumulated)
        self._order = -1, torch.empty(0, device="cpu")  # of the epoch last asked for

    def __len__(self) -> int:
        """Return the number of steps per epoch."""
        return -(-len(self.ids) // self.stretch)

    def blocks(
        self,
        first: int,
        last: int,
        prepare: Callable[[Block], Block] | None = None,
        number_of: Callable[[int], int | None] = lambda step: step,
        threads: int = 1,
    ) -> Iterator[Block]:
        """Yield the blocks of steps `first` to below `last`; `threads` draw the next ones meanwhile, and prepare them.

        `number_of` returns the number of the block of a step; None: it has one without words.
        """
        none = torch.empty(0, dtype=torch.int64, device="cpu")

        def draw(step: int) -> Block:
            number = number_of(step)
            block = Block(none, none, none, none) if number is None else self.block(number)
            return block if prepare is None else prepare(block)

        with Workers("sampler", threads) as workers:
            steps = iter(range(first, last))
            drawn = deque(workers.submit(draw, step) for step in itertools.islice(steps, threads))
            while drawn:
                block = drawn.popleft().result()
                drawn.extend(workers.submit(draw, step) for step in itertools.islice(steps, 1))
                yield block

    def block(self, step: int) -> Block:
        """Draw the block of `step`, counted from 0 over all epochs."""
        epoch, number = divmod(step, len(self))
        start = int(self._order_of(epoch)[number]) * self.stretch
        stretch = self.ids[start : start + self.stretch]
        generator = torch.Generator().manual_seed(self._seed_of(step))
        words = torch.from_numpy(stretch.astype(np.int64))
        kept = torch.rand(len(words), dtype=torch.float32, generator=generator, device="cpu") < self._keep[words]
        words = words[kept]
        windows = torch.full((len(words),), self.window, device="cpu")
        if self._draws_windows:
            windows.random_(1, self.window + 1, generator=generator)
        before, after = self._within(windows, kept, start)
        negatives = self._draw_negatives(generator)
        return Block(words, before, after, negatives, 0 if self._draws_windows else self.window)

    def _order_of(self, epoch: int) -> Tensor:
        """Return in which order an epoch takes the stretches."""
        kept, order = self._order
        if kept != epoch:
            generator = torch.Generator().manual_seed(self._seed_of(-1 - epoch))  # no step has that number
            order = torch.randperm(len(self), generator=generator, device="cpu")
            self._order = epoch, order
        return order

    def _draw_negatives(self, generator: torch.Generator) -> Tensor:
        """Draw (pool,) words of the noise, one in each of as many equal strata, in random order: sums over them vary less."""
        strata = torch.rand(self.pool, dtype=torch.float64, generator=generator, device="cpu")
        strata.add_(torch.arange(self.pool, device="cpu")).div_(self.pool)
        # Clamped because the last stratum may be rounded up to 1.
        words = torch.searchsorted(self._noise, strata, right=True).clamp_(max=len(self._noise) - 1)
        return words[torch.randperm(self.pool, generator=generator, device="cpu")]

    def _seed_of(self, step: int) -> int:
        """Return the seed of a step: those of other runs are far away."""
        return (self.seed * 0x9E3779B97F4A7C15 + step) % (1 << 64)

    def _within(self, windows: Tensor, kept: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Cut `windows` (n,) at the edges of the block and of the sequences of the words `kept`."""
        position = torch.arange(len(windows), device="cpu")
        first, last = np.searchsorted(self.starts, [start, start + len(kept)], side="right")
        edges = torch.from_numpy(self.starts[first:last] - start)
        kept_before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        edges = torch.cat([edges.new_zeros(1), kept_before[edges], kept_before[-1:]])  # in words that were kept
        sequence = torch.searchsorted(edges, position, right=True)
        begin, end = edges[sequence - 1], edges[sequence] - 1
        return torch.minimum(windows, position - begin), torch.minimum(windows, end - position)


def choose_schedule(
    num_kept_words: float, epochs: int | None, block_words: int | None, ranks: int = 1
) -> tuple[int, int]:
    """Return epochs, and words in a step of each process, for a corpus of which subsampling keeps `num_kept_words` an epoch.

    What is given stays.

    A run needs some 1,000 steps: by loss on held-out text, with 4,000, 30,000 and 200,000 words of the World Factbook, AdamW
    was best at about 500, 1,500 and 1,500. Large blocks are faster, so they shrink only as far as that takes, and the corpus
    is passed over more often only where even the smallest are too few. Fewer than 32 words would lose too many pairs at the
    edges, and more than 50 epochs only learn a small text by heart.
    """
    if epochs is None:
        needed = math.ceil(STEPS * FEWEST_BLOCK_WORDS / max(num_kept_words, 1))
        epochs = min(max(needed, EPOCHS), MOST_EPOCHS)
    if block_words is None:
        fitting = max(min(int(epochs * num_kept_words / STEPS / ranks), BLOCK_WORDS), FEWEST_BLOCK_WORDS)
        block_words = 1 << fitting.bit_length() - 1
    return epochs, block_words
