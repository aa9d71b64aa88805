"""What the gradients of both models are made of in torch: windows as a band beside the diagonal, shared negatives, sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.tables import UniqueRows, sum_rows

TILE = 32  # words a tile: smaller ones cost more calls, larger ones more products outside the band
_NOWHERE = 1 << 62  # farther than any window reaches


@dataclass(frozen=True)
class Band:
    """The windows of a block of n words: a band of an n x n matrix, cut into tiles for batched products.

    A tile is multiplied with the stretch of text that its windows reach, at most `reach` words to both sides.

    Attributes
    ----------
    num_words, reach : int
    left, right : Tensor of int64, shape (num_tiles * tile,)
        Where the window of each word begins and ends, counted from the word; 0 after the last word.
    gaps : Tensor of int64, shape (2 * tile + 2 * reach - 1,)
        How far the words of a stretch are from a word of the tile: a stretch of this for each of them, the last one first.
    """

    num_words: int
    reach: int
    left: Tensor
    right: Tensor
    gaps: Tensor

    @classmethod
    def find(cls, before: Tensor, after: Tensor) -> Band:
        """Return the band of windows of `before` words to the left and `after` to the right, both (n,) int64 on the CPU."""
        count = len(before)
        reach = int(np.maximum(before.numpy(), after.numpy()).max(initial=0))
        tile = max(TILE, 2 * reach)  # so that a tile's stretch overlaps that of the next tile only
        padding = -count % tile
        gaps = torch.arange(1 - tile - reach, tile + reach, device="cpu")
        gaps[tile + reach - 1] = _NOWHERE  # no word is in its own window
        return cls(count, reach, F.pad(-before, (0, padding)), F.pad(after, (0, padding)), gaps)

    @property
    def _tile(self) -> int:
        return max(TILE, 2 * self.reach)

    @property
    def _num_tiles(self) -> int:
        return len(self.left) // self._tile

    def inside(self) -> Tensor:
        """Return whether a word of the stretch is in the window of a word of the tile.

        Bool, shape (num_tiles, tile, tile + 2 * reach).
        """
        gap = self.gaps.unfold(0, self._tile + 2 * self.reach, 1).flip(0)
        shape = self._num_tiles, self._tile, 1
        return (gap >= self.left.view(shape)) & (gap <= self.right.view(shape))

    def window_sizes(self) -> Tensor:
        """Return how many words are in the window of each: (num_tiles * tile,) int64, zeros at the end."""
        return self.right - self.left

    def tiles(self, rows: Tensor) -> Tensor:
        """Return `rows` (n, dim) as (num_tiles, tile, dim), zeros at the end."""
        padding = len(self.left) - self.num_words
        return F.pad(rows, (0, 0, 0, padding)).view(self._num_tiles, self._tile, rows.shape[1])

    def stretches(self, rows: Tensor) -> Tensor:
        """Return what the tiles reach of `rows` (n, dim): (num_tiles, tile + 2 * reach, dim), overlapping, without a copy."""
        dim, tile, padding = rows.shape[1], self._tile, len(self.left) - self.num_words
        padded = F.pad(rows, (0, 0, self.reach, padding + self.reach))
        return padded.as_strided((self._num_tiles, tile + 2 * self.reach, dim), (tile * dim, dim, 1))

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum, (n, dim), over the stretches `parts` of each word: the transpose of `stretches`."""
        tile, dim = self._tile, parts.shape[2]
        summed = parts.new_zeros((self._num_tiles + 1) * tile, dim)
        summed[: self._num_tiles * tile].view(self._num_tiles, tile, dim).copy_(parts[:, :tile])
        summed[tile:].view(self._num_tiles, tile, dim)[:, : 2 * self.reach].add_(parts[:, tile:])
        return summed[self.reach : self.reach + self.num_words]


class Noise:
    """Gradients of negatives: a group of them is shared by an equal share of the vectors, in a matrix product.

    The groups are computed by `compute`, in any order and in any threads.

    Parameters
    ----------
    vectors : Tensor, shape (n, dim)
        Group g serves the g-th share, ``ceil(n / groups)`` of them; the last groups may serve fewer, or none.
    rows : Tensor, shape (v, dim)
    negatives : Tensor of int64, shape (groups, k)
        Positions in `rows`.
    weight : Tensor, shape (n,)
        Of the negatives of each vector.
    with_loss : bool
        Whether the loss is wanted.
    """

    def __init__(self, vectors: Tensor, rows: Tensor, negatives: Tensor, weight: Tensor, with_loss: bool) -> None:
        (self._num_vectors, dim), (self.num_groups, k) = vectors.shape, negatives.shape
        share = -(-self._num_vectors // self.num_groups)
        padding = share * self.num_groups - self._num_vectors
        self._vectors = F.pad(vectors, (0, 0, 0, padding)).view(self.num_groups, share, dim)
        self._weight = F.pad(weight, (0, padding)).view(self.num_groups, share, 1)
        self._rows, self._negatives, self.device = rows, negatives, rows.device
        self._losses = vectors.new_empty(self.num_groups) if with_loss else None
        self._grad, self._rows_grad = torch.empty_like(self._vectors), vectors.new_empty(self.num_groups, k, dim)

    @torch.no_grad()
    def compute(self, groups: slice) -> None:
        """Compute what `groups` give: each group must be computed once before the results are read."""
        vectors, weight, rows = self._vectors[groups], self._weight[groups], self._rows[self._negatives[groups]]
        scores = torch.bmm(vectors, rows.transpose(1, 2))
        if self._losses is not None:
            self._losses[groups] = (F.softplus(scores) * weight).sum((1, 2))
        slope = scores.sigmoid_().mul_(weight)
        torch.bmm(slope, rows, out=self._grad[groups])
        torch.bmm(slope.transpose(1, 2), vectors, out=self._rows_grad[groups])

    def loss(self) -> Tensor | None:
        """Return the summed loss of the negatives, shape (), or None."""
        return None if self._losses is None else self._losses.sum()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return those of the vectors (n, dim) and of the negatives (groups * k, dim)."""
        return self._grad.flatten(0, 1)[: self._num_vectors], self._rows_grad.flatten(0, 1)


def sum_by_row(values: Tensor, groups: UniqueRows) -> Tensor:
    """Return the sum of `values` (count, dim) for each unique row, (u, dim), always added in the same order."""
    if values.device.type == "cpu":
        return values.new_zeros(len(groups.ids), values.shape[1]).index_add_(0, groups.inverse, values)
    # index_add_ adds in any order there. No id is padding.
    return sum_rows(values, groups, torch.iinfo(torch.int64).max)
