"""Where the rows of a block are in the tables: found on the host, which then knows every size, and uploaded in one copy.

So the host never waits for a CUDA device to tell it one, and a thread can find them while an earlier block is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from speedtransfer.tables import UniqueRows, move_together, unique_rows
from speedtransfer.word2vec.band import Band
from speedtransfer.word2vec.subwords import Bags, Subwords


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
    num_groups : int
        Groups of negatives.
    band : Band
        The windows.
    pairs : Tensor of int64, shape (u,)
        Of how many pairs each of `words` is the center.
    num_pairs, num_predicted : Tensor of int64, shape ()
        All pairs; the words that have another one in their window. On the host.
    found_with : tuple
        The last three arguments of `find`.
    """

    words: UniqueRows
    outputs: UniqueRows
    bags: Bags | None
    num_groups: int
    band: Band
    pairs: Tensor
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
        pairs = np.bincount(unique.inverse.numpy(), sizes.numpy(), len(unique.ids)).astype(np.int64)
        return cls(
            unique,
            outputs,
            None if subwords is None else subwords.find(unique.ids, grouped),
            len(negatives),
            Band.find(before, after),
            torch.from_numpy(pairs),
            sizes.sum(),
            (sizes > 0).sum(),
            (num_words, subwords, grouped),
        )

    def to(self, device: torch.device) -> Places:
        """Return the same on `device`, where the groups of sums have been found."""
        if self.pairs.device == device:
            return self
        bags, band = self.bags, self.band
        groups = [self.words, self.outputs, *([] if bags is None else [bags.rows])]
        more = [band.left, band.right, band.gaps, self.pairs, *([] if bags is None else bags[1:])]
        (words, outputs, *rows), (left, right, gaps, pairs, *of_bags) = move_together(groups, more, device)
        return replace(
            self,
            words=words,
            outputs=outputs,
            bags=None if bags is None else Bags(rows[0], *of_bags),
            band=replace(band, left=left, right=right, gaps=gaps),
            pairs=pairs,
        )

    @property
    def contexts(self) -> Tensor:
        """The words of the block, as positions in the output rows: (n,) int64."""
        return self.outputs.inverse[: self.band.num_words]

    @property
    def negatives(self) -> Tensor:
        """The shared negatives, as positions in the output rows: (groups, k) int64."""
        return self.outputs.inverse[self.band.num_words :].view(self.num_groups, -1)
