"""Skip-gram and CBOW with negative sampling over a block of words: how far word2vec would move the rows, as a gradient.

word2vec moves the rows after every pair of words. An optimizer steps once a block, and a sum of gradients over thousands of
words, all taken at the same point, overshoots where a row occurs often: limits and scales that prevent that cost quality
(docs/word2vec.md tells how). So a copy of the block's rows is trained as word2vec does, at a given learning rate, and the way
that each row went, divided by the rate, is the gradient that the optimizer gets: `torch.optim.SGD` with that learning rate
takes word2vec's steps, and any other makes of them what it makes of gradients. As the rate goes to 0 those of skip-gram become
the gradients of the loss.

Words are taken in spans of a few (`Places.span`): all scores of a span are of the rows as the span finds them, which changes
next to nothing, since few words occur twice in it, and its words share their negatives, weighted to stand for `negative` a
prediction. These come from a pool that the block draws from the noise distribution (`sampler`). One that happens to be the
context word itself is not skipped, as it would be in word2vec.c: it has the weight of its small probability. On the host numba
goes along the pairs (`compiled`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.jit import compiled_module
from speedtransfer.word2vec.places import Places

# Negatives of a span for each of `negative`. A word of skip-gram makes six predictions with windows of 1 to 5, one of CBOW
# makes one. With a third less analogies were 0.02 lower, with twice as many those of CBOW 0.02 higher, for a tenth more time.
DRAWS = {"skipgram": 6, "cbow": 3}
# Negatives in the pool for every `sampler.GROUP_WORDS` words. AdamW does not bear a pool in which each word stands for many:
# with 128 for skip-gram the vectors fell into one dimension (`outcome.warning_of_vectors`).
POOLS = {"skipgram": 512, "cbow": 256}
MODELS = tuple(DRAWS)
# First learning rates, those of word2vec.c but for 0.03, which is 0.025 there: similarities and analogies were better with it
# (SimVerb-3500, MEN and the tuned sets of bench/word2vec.py).
RATES = {"skipgram": 0.03, "cbow": 0.05}


@dataclass
class BlockGradients:
    """What one block gives.

    Attributes
    ----------
    center, context : Tensor, shapes (u, dim) and (v, dim)
        For the rows of the input and of the output table.
    num_pairs : Tensor of int64, shape ()
        Predictions: pairs of skip-gram; words of CBOW that have another one in their window. On the host.
    loss : Tensor, shape (), or None
        Summed over the predictions and their negatives, each at the rows that it found; None where it was not asked for.
    """

    center: Tensor
    context: Tensor
    num_pairs: Tensor
    loss: Tensor | None


def block_gradients(
    center_rows: Tensor,
    context_rows: Tensor,
    places: Places,
    *,
    model: str = "skipgram",
    negative: int = 5,
    rate: float | None = None,
    with_loss: bool = True,
) -> BlockGradients:
    """Return how far training at the learning rate `rate` moves the rows against the gradient, divided by `rate`.

    The loss of skip-gram is ``sum softplus(-c.o) + sum softplus(c.n)`` over pairs of a word's vector c, the output row o of a
    word in its window, and the negatives n of each; that of CBOW the same over words, c being the mean of the vectors in the
    window and o the row of the word. What is a mean passes the whole of what it receives to each of its parts, as in
    word2vec.c, fastText and gensim (``cbow_mean=1``): vectors in a window of CBOW, rows that a word's vector is made of.

    Parameters
    ----------
    center_rows, context_rows : Tensor, shapes (u, dim) and (v, dim)
        Unique rows of the input and of the output table; not changed.
    places : Places
        Where among them its words and negatives are.
    model : {"skipgram", "cbow"}
    negative : int
        Negatives a prediction that the draws of `places` stand for.
    rate : float, optional
        Above 0; by default that of `RATES`.
    with_loss : bool
        False leaves the loss out.
    """
    rate = RATES[model] if rate is None else rate
    starts, ends = (center_rows, context_rows), (center_rows.clone(), context_rows.clone())
    compiled = _compiled() if center_rows.device.type == "cpu" else None
    if compiled is None:
        loss = _train(*ends, places, model == "cbow", negative, rate, with_loss)
        for start, end in zip(starts, ends, strict=True):
            torch.sub(start, end, out=end).div_(rate)
    else:
        bags, rows = places.bags, [end.numpy() for end in ends]
        where = (bags.rows.inverse, bags.starts, places.contexts, places.before, places.after, places.draws)
        numbers, typed_rate = [tensor.numpy() for tensor in where], rows[0].dtype.type(rate)
        summed = compiled.train(*rows, *numbers, places.span, negative, typed_rate, model == "cbow", with_loss)
        loss = center_rows.new_tensor(summed) if with_loss else None
        for start, row in zip(starts, rows, strict=True):
            compiled.way(start.detach().numpy(), row, typed_rate)
    num_pairs = places.num_predicted if model == "cbow" else places.num_pairs
    return BlockGradients(*ends, num_pairs, loss)


def _compiled() -> Any:
    """Return the module `compiled`, or None where numba does not work."""
    return compiled_module("speedtransfer.word2vec.compiled")


def _train(
    center_rows: Tensor,
    context_rows: Tensor,
    places: Places,
    cbow: bool,
    negative: int,
    rate: float,
    with_loss: bool,
) -> Tensor | None:
    """Do what `compiled.train` does, in torch: two dozen operations a span."""
    contexts, reach = places.contexts, places.reach
    loss = center_rows.new_zeros(()) if with_loss else None
    at = torch.arange(len(contexts), device=center_rows.device)
    for number, drawn in enumerate(places.draws):
        start, stop = number * places.span, min((number + 1) * places.span, len(contexts))
        here, near = slice(start, stop), slice(max(start - reach, 0), min(stop + reach, len(contexts)))
        gap = at[near] - at[here, None]
        inside = (gap >= -places.before[here, None]) & (gap <= places.after[here, None]) & (gap != 0)
        inside = inside.to(center_rows.dtype)  # (words of the span, words near them)
        around, noise = inside.sum(1, keepdim=True), context_rows[drawn]
        moved = near if cbow else here  # words whose rows are moved
        bags, bag_of, vectors = _vectors(center_rows, places, moved)
        if cbow:
            vectors = (inside / around.clamp(min=1)) @ vectors
            targets, counts = contexts[here], around.clamp(max=1)
            scores = (vectors * context_rows[targets]).sum(1, keepdim=True)
        else:
            targets, counts = contexts[near], inside
            scores = vectors @ context_rows[targets].T
        noise_scores, weight = vectors @ noise.T, counts.sum(1, keepdim=True) * (negative / len(drawn))
        if loss is not None:
            loss += (F.softplus(-scores) * counts).sum() + (F.softplus(noise_scores) * weight).sum()
        slope, noise_slope = torch.sigmoid(-scores) * counts * rate, torch.sigmoid(noise_scores) * weight * -rate
        positives = context_rows[targets]
        moves = noise_slope @ noise + (slope * positives if cbow else slope @ positives)
        _add(context_rows, targets, slope * vectors if cbow else slope.T @ vectors)
        _add(context_rows, drawn, noise_slope.T @ vectors)
        _add(center_rows, bags, (inside.T @ moves if cbow else moves)[bag_of])
    return loss


def _vectors(rows: Tensor, places: Places, words: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that consecutive `words` are made of, which word each belongs to, and the vectors: (words, dim)."""
    inside = slice(places.starts[words.start], places.starts[words.stop])
    bags, starts = places.bags.rows.inverse[inside], places.bags.starts[words] - inside.start
    bag_of = places.bags.bag_of[inside] - words.start
    return bags, bag_of, F.embedding_bag(bags, rows, starts, mode="mean")


def _add(rows: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to `rows`, always in the same order."""
    if rows.device.type == "cpu":
        rows.index_add_(0, index, values)
    else:
        rows.index_put_((index,), values, accumulate=True)  # sorts; index_add_ adds in any order there
