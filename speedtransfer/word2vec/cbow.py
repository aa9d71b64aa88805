"""Loss and gradients of CBOW with negative sampling over one block of words, written out: no autograd, no lists of contexts.

CBOW (Mikolov et al. 2013, "Efficient Estimation of Word Representations in Vector Space", section 3.1) predicts each word from
the mean of the input vectors around it. That mean is linear: a matrix with 1 / (words in the window) in a narrow band beside
its diagonal, and the gradient goes back through its transpose. Tile by tile both are batched products, as in `gradients`.
Differences of running sums would need fewer operations, but in float32 they lose digits; the products cost a small part of
what the negatives do, since every word has a mean of its own and none of those scores can be shared by words that repeat.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.word2vec.gradients import BlockGradients

TILE = 32  # words a tile: smaller ones cost more calls, larger ones more products outside the band


def cbow_gradients(
    input_rows: Tensor,
    output_rows: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    negatives: Tensor,
    before: Tensor,
    after: Tensor,
    negative: int,
    with_loss: bool = True,
) -> BlockGradients:
    """Return the gradients of ``sum softplus(-h.o) + sum softplus(h.n)``, h being the mean of the input rows around a word.

    They are the true gradients of that sum: what a mean receives is divided among its words. word2vec.c, and gensim with
    ``cbow_mean=1``, give each word of a window the whole of it, as if h were a sum (and gensim divides where h is one). An
    optimizer that scales its step for each number, as Adam or Adagrad, hardly tells the two apart; SGD here wants a learning
    rate for the input rows that is larger by about the number of words in a window.

    Parameters
    ----------
    input_rows, output_rows : Tensor, shapes (u, dim) and (v, dim)
        Vectors of the distinct words of the block, and unique rows of the output table.
    inputs, outputs : Tensor of int64, shape (n,)
        The words of the block, as positions in `input_rows` and in `output_rows`; at least one.
    negatives : Tensor of int64, shape (groups, k)
        The shared negatives, as positions in `output_rows`; group g serves the g-th equal share of the block's words,
        ``ceil(n / groups)`` of them.
    before, after : Tensor of int64, shape (n,)
        How many words to the left and to the right are in the window of each word; none beyond the block.
    negative : int
        Negatives a word; the k of its group are weighted by ``negative / k``.
    with_loss : bool
        False leaves the loss out.

    Returns
    -------
    BlockGradients
        `center` for `input_rows`, `context` for `output_rows`; `num_pairs` counts the words that have another one in their
        window: only those are predicted.
    """
    windows = _WindowMeans(before, after, input_rows.dtype)
    means, targets = windows.mean(input_rows[inputs]), output_rows[outputs]
    scores = (means * targets).sum(1)
    slope = (scores.sigmoid() - 1)[:, None]  # a mean of no words is zero, and what it receives goes nowhere
    noise = _Noise(means, output_rows[negatives], windows.predicted * (negative / negatives.shape[1]))
    loss = None
    if with_loss:
        loss = (F.softplus(-scores) * windows.predicted).sum() + noise.loss()
    mean_grad, noise_grad = noise.gradients()
    mean_grad.addcmul_(slope, targets)
    output_grad = torch.zeros_like(output_rows).index_add_(0, outputs, slope * means)
    output_grad.index_add_(0, negatives.flatten(), noise_grad)
    input_grad = torch.zeros_like(input_rows).index_add_(0, inputs, windows.spread(mean_grad))
    return BlockGradients(input_grad, output_grad, windows.predicted.sum().long(), loss)


class _WindowMeans:
    """The mean of the rows in the window of each word of a block, and the way back for gradients.

    Parameters
    ----------
    before, after : Tensor of int64, shape (n,)
    dtype : torch.dtype
        Of the rows.

    Attributes
    ----------
    predicted : Tensor of `dtype`, shape (n,)
        1 for a word with another one in its window, else 0: its mean is zero then.
    """

    def __init__(self, before: Tensor, after: Tensor, dtype: torch.dtype) -> None:
        self._num_words, device = len(before), before.device
        self._window = int(torch.maximum(before, after).max()) if len(before) else 0
        self._tile = max(TILE, 2 * self._window)  # so that a tile's reach overlaps that of the next tile only
        self._num_tiles = -(-self._num_words // self._tile)
        counts = before + after
        self.predicted = (counts > 0).to(dtype)

        def in_tiles(values: Tensor) -> Tensor:
            return F.pad(values, (0, self._padding)).view(self._num_tiles, self._tile, 1)

        column = torch.arange(self._tile + 2 * self._window, device=device) - self._window
        distance = column - torch.arange(self._tile, device=device)[:, None]
        near = (distance >= -in_tiles(before)) & (distance <= in_tiles(after)) & (distance != 0)
        self._weights = near / in_tiles(counts.to(dtype)).clamp(min=1)

    @property
    def _padding(self) -> int:
        return self._num_tiles * self._tile - self._num_words

    def mean(self, rows: Tensor) -> Tensor:
        """Return the means, shape (n, dim), of `rows`, shape (n, dim)."""
        dim, reach = rows.shape[1], self._weights.shape[2]
        padded = F.pad(rows, (0, 0, self._window, self._padding + self._window))
        reached = padded.as_strided((self._num_tiles, reach, dim), (self._tile * dim, dim, 1))  # overlapping, no copy
        return torch.bmm(self._weights, reached).view(-1, dim)[: self._num_words]

    def spread(self, grad: Tensor) -> Tensor:
        """Return the gradient of the rows, shape (n, dim), for that of the means."""
        dim, tile = grad.shape[1], self._tile
        tiles = F.pad(grad, (0, 0, 0, self._padding)).view(self._num_tiles, tile, dim)
        parts = torch.bmm(self._weights.transpose(1, 2), tiles)
        summed = grad.new_zeros((self._num_tiles + 1) * tile, dim)
        summed[:-tile].view(self._num_tiles, tile, dim).copy_(parts[:, :tile])
        summed[tile:].view(self._num_tiles, tile, dim)[:, : 2 * self._window].add_(parts[:, tile:])
        return summed[self._window : self._window + self._num_words]


class _Noise:
    """Scores and gradients of the negatives.

    Parameters
    ----------
    means : Tensor, shape (n, dim)
    rows : Tensor, shape (groups, k, dim)
        The negatives of each group.
    weight : Tensor, shape (n,)
        Of each word's negatives.
    """

    def __init__(self, means: Tensor, rows: Tensor, weight: Tensor) -> None:
        self._num_words, groups = len(means), len(rows)
        padding = -self._num_words % groups  # the last groups may serve fewer words, or none
        self._means = F.pad(means, (0, 0, 0, padding)).view(groups, -1, means.shape[1])
        self._weight = F.pad(weight, (0, padding)).view(groups, -1, 1)
        self._rows = rows
        self._scores = torch.bmm(self._means, rows.transpose(1, 2))

    def loss(self) -> Tensor:
        """Return the summed loss of the negatives, shape ()."""
        return (F.softplus(self._scores) * self._weight).sum()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return those of the means, shape (n, dim), and of the negatives, shape (groups * k, dim); the scores are used up."""
        slope = self._scores.sigmoid_().mul_(self._weight)
        mean_grad = torch.bmm(slope, self._rows).flatten(0, 1)[: self._num_words]
        return mean_grad, torch.bmm(slope.transpose(1, 2), self._means).flatten(0, 1)
