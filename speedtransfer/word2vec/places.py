"""Blocks of words, and where their rows are in the tables: found on the host, which then knows every size.

They are uploaded in one copy. So the host never waits for a size from a CUDA device, and a thread can find them while an
earlier block is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.jit import compiled_module
from speedtransfer.tables import UniqueRows, move_together, unique_rows
from speedtransfer.word2vec.subwords import Bags, Subwords

MOST_WORDS_AT_ONCE = 16
MOST_SPANS_AT_ONCE = 16
# How often a row may be among the words of a round of several spans, and among their negatives: about as often as in the worst
# span of most blocks. All of its moves from the same place overshoot where they are more: SGD ended at a loss of 59 with up to
# a hundred.
MOST_TIMES = 6


def pair_weight(distance: Tensor, window: int) -> Tensor:
    """Return what a pair of words `distance` apart counts: ``(window + 1 - distance) / window``, or 1 where `window` is 0.

    That is the probability that a window of word2vec, drawn from 1 to `window`, reaches so far.
    """
    return (window + 1 - distance).double() / window if window else torch.ones_like(distance)


def _side_weight(reach: Tensor, window: int) -> Tensor:
    """Return the sum of `pair_weight` over the distances 1 to `reach`."""
    return (reach * (2 * window + 1 - reach)).double() / (2 * window) if window else reach


@dataclass(frozen=True)
class Block:
    """The words that one step trains on.

    `words` (n,) int64 are consecutive ones that survived subsampling. `before` and `after` (n,) int64 are how many words to
    the left and to the right of each are its context; within the block and its sequence.
    """

    words: Tensor
    before: Tensor
    after: Tensor
    negatives: Tensor  # (pool,) int64, drawn from the noise distribution; `Places.draws` are of these
    # 0: the reach of each context was drawn, as in word2vec. Else it is `window` for all, and a pair counts with the
    # probability that word2vec would have drawn it, see `pair_weight`.
    window: int = 0
    places: Places | None = None  # of its rows in the tables of the model whose `Word2Vec.prepare` has found them


@dataclass(frozen=True)
class Places:
    """The rows of both tables that a block needs, and where among them its words and negatives are."""

    bags: Bags  # the rows of the input table that the vector of each word is the mean of
    starts: list[int]  # where the bag of each word begins among them and, last, how many there are; on the host
    outputs: UniqueRows  # of the words, then the negatives
    before: Tensor  # the windows, as in `Block`
    after: Tensor
    reach: int  # the widest window to a side
    span: int  # words that are trained at once
    # Spans of a round are trained from the same rows; how far each moves them is added. With which span each round begins and,
    # last, how many there are: (rounds + 1,) int64, and on the host.
    rounds: Tensor
    round_starts: list[int]
    draws: Tensor  # the negatives of each span, as positions in the output rows: (spans, min(num_draws, pool))
    num_pairs: Tensor  # all pairs, each as much as it counts; on the host
    num_predicted: Tensor  # the words that have another one in their window; on the host
    window: int  # as in `Block`

    @classmethod
    def find(cls, block: Block, num_words: int, num_draws: int, subwords: Subwords | None = None) -> Places:
        """Return those of a block of a vocabulary of `num_words`, on the CPU; each span takes `num_draws` of the pool.

        `subwords`: what words are made of; by default each has one row. Raises `RowIndexError` where a word is none of the
        vocabulary, and `InvalidValueError` where a context reaches further than `window`: pairs would count less than nothing.
        """
        window = block.window
        words, before, after, negatives = (t.cpu() for t in (block.words, block.before, block.after, block.negatives))
        reach = int(torch.maximum(before, after).max()) if len(words) else 0
        if reach > window > 0:
            raise InvalidValueError(
                f"a context reaches {reach} words but window is {window}; pass window={reach}, or 0"
            )
        outputs, sizes = unique_rows(torch.cat([words, negatives]), num_words), before + after
        if subwords is None:  # each word has one row, of its own number
            each = torch.arange(len(words) + 1, device="cpu")
            bags = Bags(unique_rows(words), each, each[:-1])
        else:
            bags = subwords.find(words)
        # Fewer words at once where two of them would often share a row: what it learns at once from many pairs overshoots.
        most = int(torch.bincount(bags.rows.inverse).max()) if len(words) else 1
        span = min(max(len(words) // most, 1), MOST_WORDS_AT_ONCE)
        # The negatives of a span are the next of the pool, and from its end on those at its beginning again.
        pool, num_spans = outputs.inverse[len(words) :], -(-len(words) // span)
        num_draws = min(len(pool), num_draws)
        draws = pool[torch.arange(num_spans * num_draws, device="cpu").view(num_spans, num_draws) % len(pool)]
        find_rounds = compiled_module("speedtransfer.word2vec.compiled").find_rounds
        moved, span_starts = bags.rows.inverse.numpy(), np.append(bags.starts[:-1:span].numpy(), len(bags.rows.inverse))
        num_rows = len(bags.rows.ids), len(outputs.ids)
        rounds = find_rounds(moved, span_starts, draws.numpy(), num_rows, MOST_SPANS_AT_ONCE, MOST_TIMES)
        num_pairs = (_side_weight(before, window) + _side_weight(after, window)).sum()
        starts, predicted = bags.starts.tolist(), (sizes > 0).sum()
        round_starts = rounds.tolist()
        return cls(
            bags, starts, outputs, before, after, reach, span, torch.from_numpy(rounds), round_starts, draws, num_pairs,
            predicted, window,
        )  # fmt: skip

    def to(self, device: torch.device) -> Places:
        """Return the same on `device`."""
        if self.before.device == device:
            return self
        groups = [self.bags.rows, self.outputs]
        others = [self.before, self.after, self.rounds, self.bags.starts, self.bags.bag_of, self.draws.flatten()]
        (rows, outputs), (before, after, rounds, starts, bag_of, draws) = move_together(groups, others, device)
        bags, draws = Bags(rows, starts, bag_of), draws.view(self.draws.shape)
        return replace(self, bags=bags, outputs=outputs, before=before, after=after, rounds=rounds, draws=draws)

    @property
    def most_spans(self) -> int:
        """How many spans a round has at most."""
        return max(last - first for first, last in pairwise(self.round_starts))

    @property
    def contexts(self) -> Tensor:
        """The words of the block, as positions in the output rows: (n,) int64."""
        return self.outputs.inverse[: len(self.before)]
