"""Loss and gradients of skip-gram with negative sampling over one block of words, written out: no autograd, no pair lists.

Arrays in, arrays out; tables and optimizers are unknown here. A block of n consecutive words has up to 2 * window * n pairs
(center, context), but they all lie in a narrow band around the diagonal of an n x n matrix of scores. So the block is cut into
tiles of `TILE` words, and each tile is multiplied with the stretch of text its windows reach: three batched matrix products
instead of a gather per pair. The negatives are shared by the whole block: one more matrix product, weighted so that their sum
stands for `negative` draws a pair (an unbiased estimate of that sum). A negative that happens to be the context word itself
is not skipped, as it would be in word2vec.c: it has the weight of its small probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32  # words a tile: smaller ones cost more calls, larger ones more products outside the band


@dataclass
class BlockGradients:
    """What one block gives.

    Attributes
    ----------
    center, context : Tensor, shapes (u, dim) and (v, dim)
        Gradients of the summed loss for the rows of centers and of contexts and negatives.
    num_pairs : Tensor of int64, shape ()
    loss : Tensor, shape (), or None
        Summed over the pairs and their negatives; None where it was not asked for.
    """

    center: Tensor
    context: Tensor
    num_pairs: Tensor
    loss: Tensor | None


def num_pairs_of(windows: Tensor) -> Tensor:
    """Return how many words are in the window of each word of a block: int64, shape (n,), as `windows`."""
    position = torch.arange(len(windows), device=windows.device)
    return torch.minimum(windows, position) + torch.minimum(windows, position.flip(0))


def block_gradients(
    center_rows: Tensor,
    context_rows: Tensor,
    centers: Tensor,
    contexts: Tensor,
    negatives: Tensor,
    windows: Tensor,
    max_window: int,
    negative: int,
    with_loss: bool = True,
) -> BlockGradients:
    """Return the gradients of ``sum softplus(-c.o) + sum softplus(c.n)`` over pairs (c, o) and the negatives n of each.

    Parameters
    ----------
    center_rows, context_rows : Tensor, shapes (u, dim) and (v, dim)
        Unique rows of the input table and of the output table.
    centers, contexts : Tensor of int64, shape (n,)
        The words of the block, as positions in `center_rows` and in `context_rows`.
    negatives : Tensor of int64, shape (k,)
        The shared negatives, as positions in `context_rows`.
    windows : Tensor of int64, shape (n,)
        Words at a distance of 1 to ``windows[i]`` are contexts of word i; at most `max_window`.
    max_window : int
    negative : int
        Negatives a pair; the k shared ones are weighted by ``negative / k``.
    with_loss : bool
        False saves two passes over all scores.

    Returns
    -------
    BlockGradients
    """
    pairs = num_pairs_of(windows)
    positive = _Band(center_rows[centers], context_rows[contexts], windows, max_window)
    context_grad = torch.zeros_like(context_rows).index_add_(0, contexts, positive.context_grad)

    # The negatives of a word are the same wherever it stands in the block: once a unique row, weighted by its pairs.
    weight = center_rows.new_zeros(len(center_rows))
    weight.index_add_(0, centers, pairs.to(weight) * (negative / len(negatives)))
    noise_rows = context_rows[negatives]
    scores = center_rows @ noise_rows.t()
    loss = None
    if with_loss:
        loss = positive.loss() + (F.softplus(scores) * weight[:, None]).sum()
    scores.sigmoid_().mul_(weight[:, None])
    center_grad = (scores @ noise_rows).index_add_(0, centers, positive.center_grad)
    context_grad.index_add_(0, negatives, scores.t() @ center_rows)
    return BlockGradients(center_grad, context_grad, pairs.sum(), loss)


class _Band:
    """Scores and gradients of the positive pairs of a block.

    Parameters
    ----------
    center, context : Tensor, shape (n, dim)
        The rows of each word of the block.
    windows : Tensor of int64, shape (n,)
    max_window : int
    """

    def __init__(self, center: Tensor, context: Tensor, windows: Tensor, max_window: int) -> None:
        num_words, dim = center.shape
        tile = max(TILE, 2 * max_window)  # so that a tile's reach overlaps that of the next tile only
        reach = tile + 2 * max_window
        num_tiles = -(-num_words // tile)
        padding = num_tiles * tile - num_words
        tiles = F.pad(center, (0, 0, 0, padding)).view(num_tiles, tile, dim)
        padded = F.pad(context, (0, 0, max_window, padding + max_window))
        reached = padded.as_strided((num_tiles, reach, dim), (tile * dim, dim, 1))  # overlapping, without a copy

        self._mask = self._in_window(windows, padding, num_tiles, tile, max_window)
        self._scores = torch.bmm(tiles, reached.transpose(1, 2))
        slope = (self._scores.sigmoid() - 1) * self._mask
        self.center_grad = torch.bmm(slope, reached).view(-1, dim)[:num_words]

        parts = torch.bmm(slope.transpose(1, 2), tiles)
        summed = center.new_zeros((num_tiles + 1) * tile, dim)
        summed[:-tile].view(num_tiles, tile, dim).copy_(parts[:, :tile])
        summed[tile:].view(num_tiles, tile, dim)[:, : 2 * max_window].add_(parts[:, tile:])
        self.context_grad = summed[max_window : max_window + num_words]

    @staticmethod
    def _in_window(windows: Tensor, padding: int, num_tiles: int, tile: int, max_window: int) -> Tensor:
        """Return whether a score belongs to a pair, bool, shape (num_tiles, tile, tile + 2 * max_window)."""
        num_words, device = len(windows), windows.device
        column = torch.arange(tile + 2 * max_window, device=device) - max_window  # relative to the tile's first word
        distance = (column - torch.arange(tile, device=device)[:, None]).abs_()
        distance[distance == 0] = max_window + 1  # a word is no context of itself
        position = column + torch.arange(0, num_tiles * tile, tile, device=device)[:, None]
        in_block = (position >= 0) & (position < num_words)
        near = distance <= F.pad(windows, (0, padding)).view(num_tiles, tile, 1)
        return near & in_block[:, None, :]

    def loss(self) -> Tensor:
        """Return the summed loss of the pairs, shape ()."""
        return (F.softplus(-self._scores) * self._mask).sum()
