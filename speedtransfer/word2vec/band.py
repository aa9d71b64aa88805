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
