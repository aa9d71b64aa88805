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
    words : UniqueRows
        Of the words (n,): what has a vector.
    outputs : UniqueRows
        Of the words, then the negatives, group by group.
    bags : Bags or None
        The rows that the vectors of `words` are made of; None: each word has one.
    before, after : Tensor of int64, shape (n,)
        The windows, as in `Block`.
    reach : int
        The widest window to a side.
    span : int
        Words that are trained at once.
    num_pairs, num_predicted : Tensor of int64, shape ()
        All pairs; the words that have another one in their window. On the host.
    found_with : tuple
        The last three arguments of `find`.
    """

    words: UniqueRows
    outputs: UniqueRows
    bags: Bags | None
    before: Tensor
    after: Tensor
    reach: int
    span: int
    num_pairs: Tensor
    num_predicted: Tensor
    found_with: tuple[int, Subwords | None, bool]

    @classmethod
    def find(
        cls,
        words: Tensor,
        before: Tensor,
        after: Tensor,
        negatives: Tensor,
        num_words: int,
        subwords: Subwords | None = None,
        grouped: bool = False,
    ) -> Places:
        """Return those of the tensors of a block, all on the CPU.

        Parameters
        ----------
        words, before, after, negatives : Tensor of int64
            As in `Block`.
        num_words : int
            Of the vocabulary.
        subwords : Subwords, optional
        grouped : bool
            Find the order of sums too, which a CUDA device needs.

        Raises
        ------
        RowIndexError
            A word is none of the vocabulary.
        """
        outputs = unique_rows(torch.cat([words, negatives.flatten()]), num_words, grouped=grouped)
        unique, sizes = unique_rows(words, grouped=grouped), before + after
        return cls(
            unique,
            outputs,
            None if subwords is None else subwords.find(unique.ids, grouped),
            before,
            after,
            int(torch.maximum(before, after).max()) if len(words) else 0,
            _span_of(unique.inverse),
            sizes.sum(),
            (sizes > 0).sum(),
            (num_words, subwords, grouped),
        )

    def to(self, device: torch.device) -> Places:
        """Return the same on `device`, where the groups of sums have been found."""
        if self.before.device == device:
            return self
        bags = self.bags
        groups = [self.words, self.outputs, *([] if bags is None else [bags.rows])]
        more = [self.before, self.after, *([] if bags is None else bags[1:])]
        (words, outputs, *rows), (before, after, *of_bags) = move_together(groups, more, device)
        return replace(
            self,
            words=words,
            outputs=outputs,
            bags=None if bags is None else Bags(rows[0], *of_bags),
            before=before,
            after=after,
        )

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


def _span_of(words: Tensor) -> int:
    """Return how many words may be trained at once: `MOST_WORDS_AT_ONCE`, fewer where one would often be among them twice.

    What a row learns at once from many pairs overshoots.
    """
    most = int(torch.bincount(words).max()) if len(words) else 1
    return min(max(len(words) // most, 1), MOST_WORDS_AT_ONCE)
