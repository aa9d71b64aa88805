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

from speedtransfer.word2vec.band import Band, Noise
from speedtransfer.word2vec.gradients import BlockGradients, compute_noise


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
    band, counts = Band(before, after), before + after
    weights = band.inside / band.tiles(counts[:, None].to(input_rows.dtype)).clamp(min=1)
    means = torch.bmm(weights, band.stretches(input_rows[inputs])).flatten(0, 1)[: len(inputs)]
    predicted, targets = (counts > 0).to(input_rows.dtype), output_rows[outputs]
    scores = (means * targets).sum(1)
    slope = (scores.sigmoid() - 1)[:, None]  # a mean of no words is zero, and what it receives goes nowhere
    noise = Noise(means, output_rows, negatives, predicted * (negative / negatives.shape[1]), with_loss)
    compute_noise(noise, lambda: None)
    (mean_grad, noise_grad), loss = noise.gradients(), noise.loss()
    if loss is not None:
        loss += (F.softplus(-scores) * predicted).sum()
    mean_grad.addcmul_(slope, targets)
    output_grad = torch.zeros_like(output_rows).index_add_(0, outputs, slope * means)
    output_grad.index_add_(0, negatives.flatten(), noise_grad)
    spread = band.add_up(torch.bmm(weights.transpose(1, 2), band.tiles(mean_grad)))
    input_grad = torch.zeros_like(input_rows).index_add_(0, inputs, spread)
    return BlockGradients(input_grad, output_grad, (counts > 0).sum(), loss)
