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

from speedtransfer.word2vec.band import Noise, sum_by_row
from speedtransfer.word2vec.gradients import BlockGradients, compute_noise
from speedtransfer.word2vec.places import Places


def cbow_gradients(
    input_rows: Tensor, output_rows: Tensor, places: Places, negative: int, with_loss: bool = True
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
    places : Places
        Where among them its words and negatives are; group g of these serves the g-th equal share of the words,
        ``ceil(n / groups)`` of them.
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
    band, negatives, num_words = places.band, places.negatives, places.band.num_words
    sizes = band.window_sizes().to(input_rows.dtype)
    inside = band.inside()
    weights = inside / sizes.view(*inside.shape[:2], 1).clamp(min=1)
    means = torch.bmm(weights, band.stretches(input_rows[places.words.inverse])).flatten(0, 1)[:num_words]
    predicted, targets = (sizes[:num_words] > 0).to(input_rows.dtype), output_rows[places.contexts]
    scores = (means * targets).sum(1)
    slope = (scores.sigmoid() - 1)[:, None]  # a mean of no words is zero, and what it receives goes nowhere
    noise = Noise(means, output_rows, negatives, predicted * (negative / negatives.shape[1]), with_loss)
    compute_noise(noise, lambda: None)
    (mean_grad, noise_grad), loss = noise.gradients(), noise.loss()
    if loss is not None:
        loss += (F.softplus(-scores) * predicted).sum()
    mean_grad.addcmul_(slope, targets)
    output_grad = sum_by_row(torch.cat([slope * means, noise_grad]), places.outputs)
    spread = band.add_up(torch.bmm(weights.transpose(1, 2), band.tiles(mean_grad)))
    return BlockGradients(sum_by_row(spread, places.words), output_grad, places.num_predicted, loss)
