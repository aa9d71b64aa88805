"""Train the rows of a block in torch: what `compiled` and `cuda_spans` do, where there is no numba, and no such kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.word2vec.places import Places


def train(
    center_rows: Tensor,
    context_rows: Tensor,
    places: Places,
    cbow: bool,
    negative: int,
    rate: float,
    with_loss: bool,
) -> Tensor | None:
    """Train rows in place by two dozen operations a span; arguments as `gradients.block_gradients`. Return the loss."""
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
