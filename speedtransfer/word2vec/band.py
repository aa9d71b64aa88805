"""What the gradients of both models are made of in torch: windows as a band beside the diagonal, and shared negatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32  # words a tile: smaller ones cost more calls, larger ones more products outside the band


class Band:
    """The windows of a block of n words: a band of an n x n matrix, cut into tiles for batched products.

    A tile is multiplied with the stretch of text that its windows reach, at most `reach` words to both sides.

    Parameters
    ----------
    before, after : Tensor of int64, shape (n,)
        How many words to the left and to the right are in the window of each word; none beyond the block.

    Attributes
    ----------
    inside : Tensor of bool, shape (num_tiles, tile, tile + 2 * reach)
        Whether a word of the stretch is in the window of a word of the tile. No word is in its own.
    """

    def __init__(self, before: Tensor, after: Tensor) -> None:
        self._num_words, device = len(before), before.device
        self._reach = int(torch.maximum(before, after).max()) if len(before) else 0
        self._tile = max(TILE, 2 * self._reach)  # so that a tile's stretch overlaps that of the next tile only
        self._num_tiles = -(-self._num_words // self._tile)
        column = torch.arange(self._tile + 2 * self._reach, device=device) - self._reach
        gap = column - torch.arange(self._tile, device=device)[:, None]
        left, right = self.tiles(before[:, None]), self.tiles(after[:, None])
        self.inside = (gap >= -left) & (gap <= right) & (gap != 0)

    @property
    def _padding(self) -> int:
        return self._num_tiles * self._tile - self._num_words

    def tiles(self, rows: Tensor) -> Tensor:
        """Return `rows` (n, dim) as (num_tiles, tile, dim), zeros at the end."""
        return F.pad(rows, (0, 0, 0, self._padding)).view(self._num_tiles, self._tile, rows.shape[1])

    def stretches(self, rows: Tensor) -> Tensor:
        """Return what the tiles reach of `rows` (n, dim): (num_tiles, tile + 2 * reach, dim), overlapping, without a copy."""
        dim, tile = rows.shape[1], self._tile
        padded = F.pad(rows, (0, 0, self._reach, self._padding + self._reach))
        return padded.as_strided((self._num_tiles, tile + 2 * self._reach, dim), (tile * dim, dim, 1))

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum, (n, dim), over the stretches `parts` of each word: the transpose of `stretches`."""
        tile, dim = self._tile, parts.shape[2]
        summed = parts.new_zeros((self._num_tiles + 1) * tile, dim)
        summed[: self._num_tiles * tile].view(self._num_tiles, tile, dim).copy_(parts[:, :tile])
        summed[tile:].view(self._num_tiles, tile, dim)[:, : 2 * self._reach].add_(parts[:, tile:])
        return summed[self._reach : self._reach + self._num_words]


class Noise:
    """Scores and gradients of negatives: a group of them is shared by an equal share of the vectors, in a matrix product.

    Parameters
    ----------
    vectors : Tensor, shape (n, dim)
        Group g serves the g-th share, ``ceil(n / groups)`` of them; the last groups may serve fewer, or none.
    rows : Tensor, shape (groups, k, dim)
        The negatives.
    weight : Tensor, shape (n,)
        Of the negatives of each vector.
    """

    def __init__(self, vectors: Tensor, rows: Tensor, weight: Tensor) -> None:
        self._num_vectors, groups = len(vectors), len(rows)
        share = -(-len(vectors) // groups)
        padding = share * groups - len(vectors)
        self._vectors = F.pad(vectors, (0, 0, 0, padding)).view(groups, share, vectors.shape[1])
        self._weight = F.pad(weight, (0, padding)).view(groups, share, 1)
        self._rows = rows
        self._scores = torch.bmm(self._vectors, rows.transpose(1, 2))

    def loss(self) -> Tensor:
        """Return the summed loss of the negatives, shape ()."""
        return (F.softplus(self._scores) * self._weight).sum()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return those of the vectors (n, dim) and of the negatives (groups * k, dim); the scores are used up."""
        slope = self._scores.sigmoid_().mul_(self._weight)
        grad = torch.bmm(slope, self._rows).flatten(0, 1)[: self._num_vectors]
        return grad, torch.bmm(slope.transpose(1, 2), self._vectors).flatten(0, 1)
