"""Skip-gram and CBOW with negative sampling over a block of words: how far word2vec would move the rows, as a gradient.

word2vec moves the rows after every pair of words; an optimizer steps once a block, where a sum of gradients of thousands of
words at the same point overshoots (docs/word2vec.md). So a copy of the block's rows is trained as word2vec does, and the way
that each row went, divided by the rate, is the gradient: `torch.optim.SGD` with that rate takes word2vec's steps, and any
other makes of them what it makes of gradients. As the rate goes to 0 those of skip-gram become the gradients of the loss.

All scores of a round are of the rows as the round finds them, which changes next to nothing, since few words occur twice in
it (`places.MOST_TIMES`). The words of each of its spans share their negatives, of the pool of the block, weighted to stand
for `negative` a prediction. A negative that is the context word itself is not skipped, as in word2vec.c: it has the weight of
its small probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speedtransfer.cuda import is_trusted
from speedtransfer.jit import compiled_module
from speedtransfer.word2vec import spans
from speedtransfer.word2vec.places import Block, Places

# Negatives of a span for each of `negative`. A word of skip-gram makes six predictions with windows of 1 to 5, one of CBOW
# makes one. With a third less analogies were 0.02 lower, with twice as many those of CBOW 0.02 higher, for a tenth more time.
DRAWS = {"skipgram": 6, "cbow": 3}
# Negatives in the pool for every `sampler.GROUP_WORDS` words. AdamW does not bear a pool in which each word stands for many:
# with 128 for skip-gram the vectors fell into one dimension (`progress.warning_of_vectors`).
POOLS = {"skipgram": 512, "cbow": 256}


def draws_of(model: str, negative: int, window: int) -> int:
    """Return how many negatives a span takes from the pool: `DRAWS` for each of `negative`, and more for wider windows.

    A word of skip-gram predicts `window` + 1 others. With window 10 and the draws of 5 node2vec's vectors classified
    the nodes of BlogCatalog worse than gensim's (micro-F1 0.004 lower); with these they do equally well.
    """
    return negative * (max(DRAWS[model], window + 1) if model == "skipgram" else DRAWS[model])


MODELS = tuple(DRAWS)
# First learning rates, those of word2vec.c but for 0.03, which is 0.025 there: similarities and analogies were better with it
# (SimVerb-3500, MEN and the tuned sets of bench/experiments/word2vec.py).
RATES = {"skipgram": 0.03, "cbow": 0.05}


@dataclass
class BlockGradients:
    """What one block gives: for the rows of the input table (u, dim) and of the output table (v, dim)."""

    center: Tensor
    context: Tensor
    num_pairs: Tensor  # predictions, each as much as it counts: `Places.num_pairs`, or `num_predicted` of CBOW
    # Summed over the predictions and their negatives, each at the rows that it found; None where it was not asked for.
    loss: Tensor | None


def block_gradients(
    center_rows: Tensor, context_rows: Tensor, places: Places, *,
    model: str = "skipgram", negative: int = 5, rate: float | None = None, with_loss: bool = True,
) -> BlockGradients:  # fmt: skip
    """Return how far training at the learning rate `rate` moves the rows against the gradient, divided by `rate`.

    The loss of skip-gram is ``sum softplus(-c.o) + sum softplus(c.n)`` over pairs of a word's vector c, the output row o
    of a word in its window, and the negatives n of each, times what the pair counts (`places.pair_weight`). That of CBOW
    is the same over words, c being the mean of the vectors in the window and o the row of the word. What is a mean passes
    the whole of what it receives to each of its parts, as in word2vec.c, fastText and gensim (``cbow_mean=1``): vectors
    in a window of CBOW, rows that a word's vector is made of.

    `center_rows` and `context_rows` are unique rows of the input and of the output table, and not changed; `places` says
    where among them the words and negatives are, whose draws stand for `negative` a prediction. `rate` is by default that of
    `RATES`.
    """
    rate = RATES[model] if rate is None else rate
    starts, cbow = (center_rows, context_rows), model == "cbow"
    if not _may_be_compiled(center_rows):
        center, context = center_rows.clone(), context_rows.clone()
        device = center_rows.device
        by_kernel = spans.fits_kernel(center_rows, places, cbow)
        by_kernel = by_kernel and is_trusted("word2vec", device, lambda: _check_kernel(device))
        train = spans.train_by_kernel if by_kernel else spans.train_in_torch
        loss = train(center, context, places, cbow, negative, rate, with_loss)
        for start, end in zip(starts, (center, context), strict=True):
            torch.sub(start, end, out=end).div_(rate)
    else:
        compiled = compiled_module("speedtransfer.word2vec.compiled")
        (center, context), summed = compiled.gradients(starts, places, cbow, negative, rate, with_loss)
        loss = center_rows.new_tensor(summed) if with_loss else None
    return BlockGradients(center, context, places.num_predicted if cbow else places.num_pairs, loss)


def _may_be_compiled(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _check_kernel(device: torch.device) -> bool:
    """Compare the kernel with torch where words repeat, at the ends of a block, and where nobody is around; the host waits."""
    position = torch.arange(50, device="cpu")
    before, after = torch.minimum(position % 4, position), torch.minimum(position % 3, 49 - position)
    places = Places.find(Block(position * 7 % 23, before, after, position[:22:2], 4), 23, num_draws=5).to(device)
    for model in MODELS:
        found = []
        for train in (spans.train_by_kernel, spans.train_in_torch):
            numbers = torch.arange(23 * 6, dtype=torch.float32, device=device).view(23, 6)
            center, context = (numbers[: len(rows.ids)].sin() for rows in (places.bags.rows, places.outputs))
            loss = train(center, context, places, model == "cbow", 5, 0.1, True)
            found.append((center, context, loss))
        for ours, theirs in zip(*found, strict=True):
            if ours is None or theirs is None or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                return False
    return True
