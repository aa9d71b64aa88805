"""Where the rows of a block are in the tables: found on the host, which then knows every size, and uploaded in one copy.

So the host never waits for a CUDA device to tell it one, and a thread can find them while an earlier block is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedtransfer.tables import UniqueRows, move_together, unique_rows
from speedtransfer.word2vec.subwords import Bags, Subwords

MOST_WORDS_AT_ONCE = 16
_TURN = 40503  # an odd number near 2**16 / golden ratio: neighbouring spans begin far from each other in the pool


@dataclass(frozen=True)
class Places:
    """The rows of both tables that a block needs, and where among them its words and negatives are.

    Attributes
    ----------
    bags : Bags
        The rows of the input table that the vector of each word (n,) is the mean of.
    starts : list of int
        Where the bag of each word begins among them and, last, how many there are; on the host.
    outputs : UniqueRows
        Of the words, then the negatives, group by group.
    before, after : Tensor of int64, shape (n,)
        The windows, as in `Block`.
    reach : int
        The widest window to a side.
    span : int
        Words that are trained at once.
    num_pairs, num_predicted : Tensor of int64, shape ()
        All pairs; the words that have another one in their window. On the host.
    found_with : tuple
        The last two arguments of `find`.
    """

    bags: Bags
    starts: list[int]
    outputs: UniqueRows
    before: Tensor
    after: Tensor
    reach: int
    span: int
    num_pairs: Tensor
    num_predicted: Tensor
    found_with: tuple[int, Subwords | None]

    @classmethod
    def find(
        cls,
        words: Tensor,
        before: Tensor,
        after: Tensor,
        negatives: Tensor,
        num_words: int,
        subwords: Subwords | None = None,
    ) -> Places:
        """Return those of the tensors of a block, all on the CPU.

        Parameters
        ----------
        words, before, after, negatives : Tensor of int64
            As in `Block`.
        num_words : int
            Of the vocabulary.
        subwords : Subwords, optional
            What words are made of; by default each has one row.

        Raises
        ------
        RowIndexError
            A word is none of the vocabulary.
        """
        outputs, sizes = unique_rows(torch.cat([words, negatives.flatten()]), num_words), before + after
        bags = Bags.of_single_rows(words) if subwords is None else subwords.find(words)
        return cls(
            bags,
            bags.starts.tolist(),
            outputs,
            before,
            after,
            int(torch.maximum(before, after).max()) if len(words) else 0,
            _span_of(bags, len(words)),
            sizes.sum(),
            (sizes > 0).sum(),
            (num_words, subwords),
        )

    def to(self, device: torch.device) -> Places:
        """Return the same on `device`."""
        if self.before.device == device:
            return self
        groups, others = [self.bags.rows, self.outputs], [self.before, self.after, self.bags.starts, self.bags.bag_of]
        (rows, outputs), (before, after, starts, bag_of) = move_together(groups, others, device)
        return replace(self, bags=Bags(rows, starts, bag_of), outputs=outputs, before=before, after=after)

    @property
    def contexts(self) -> Tensor:
        """The words of the block, as positions in the output rows: (n,) int64."""
        return self.outputs.inverse[: len(self.before)]

    @property
    def negatives(self) -> Tensor:
        """The pool of negatives, as positions in the output rows: int64, group by group."""
        return self.outputs.inverse[len(self.before) :]

    def draws(self, count: int) -> Tensor:
        """Return the negatives of each span, as positions in the output rows: int64, shape (spans, min(count, pool)).

        They are spread evenly over the pool, in which words stand by their frequency, and begin elsewhere in it for each span.
        """
        pool, num_spans = self.negatives, -(-len(self.before) // self.span)
        count = min(len(pool), count)
        first = torch.arange(num_spans, device=pool.device)[:, None] * _TURN
        return pool[(first + torch.arange(count, device=pool.device) * (len(pool) // count)) % len(pool)]


def _span_of(bags: Bags, num_words: int) -> int:
    """Return how many words may be trained at once: `MOST_WORDS_AT_ONCE`, fewer where two of them would often share a row.

    What a row learns at once from many pairs overshoots.
    """
    most = int(torch.bincount(bags.rows.inverse).max()) if num_words else 1
    return min(max(num_words // most, 1), MOST_WORDS_AT_ONCE)
