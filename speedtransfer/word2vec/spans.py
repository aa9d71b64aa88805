"""Train the rows of a block on a CUDA device by one kernel, or in torch by two dozen operations a span."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.cuda import KernelArgument, current_stream, launch_kernel, load_kernel
from speedtransfer.once import once
from speedtransfer.word2vec.places import Places, pair_weight

THREADS = 512  # of the block that does it alone
_PARTS = 8  # kParts of word2vec.cu
_TRAIN = KernelArgument("22q2d")  # struct Train


def pack_spans(
    center_rows: Tensor,
    context_rows: Tensor,
    places: Places,
    cbow: bool,
    negative: int,
    rate: float,
    losses: Tensor | None,
) -> tuple[np.ndarray, Tensor]:
    """Return the argument of the kernel train_spans, and the memory that it works in, to be kept until it is queued.

    Parameters
    ----------
    center_rows, context_rows : Tensor of float32, shapes (u, dim) and (v, dim), contiguous
        Trained in place.
    places : Places
        On their device.
    cbow, negative, rate
        As in `gradients.block_gradients`.
    losses : Tensor of float64, shape (threads,), optional
        Gets the loss in parts, to be summed.
    """
    dim, span, reach, num_draws = center_rows.shape[1], places.span, places.reach, places.draws.shape[1]
    sizes = _sizes(places, dim)
    room = center_rows.new_empty(sum(sizes))
    bags = places.bags
    given = bags.rows.inverse, bags.starts, places.contexts, places.before, places.after, places.draws
    assert all(tensor.is_contiguous() for tensor in (center_rows, context_rows, *given))
    pointers = [tensor.data_ptr() for tensor in (center_rows, context_rows, *given, *room.split(sizes))]
    packed = _TRAIN.pack(
        *(*pointers, 0 if losses is None else losses.data_ptr()),
        *(len(places.before), dim, span, reach, num_draws, cbow, places.window),
        *(negative, rate),
    )
    return packed, room


def fits_kernel(rows: Tensor, places: Places) -> bool:
    """Return whether the kernel can train such rows: float32, in spans whose parts can be counted in 32 bits."""
    return rows.is_cuda and rows.dtype == torch.float32 and sum(_sizes(places, rows.shape[1])) < 1 << 32


def _sizes(places: Places, dim: int) -> tuple[int, ...]:
    """Return how many numbers each of the arrays has that the kernel works in."""
    span, near, num_draws = places.span, 2 * places.reach, places.draws.shape[1]
    scores = span * (near + 1 + num_draws)
    return span * dim, span * dim, (span + near) * dim, num_draws * dim, scores * _PARTS, scores


def train_by_kernel(
    center_rows: Tensor, context_rows: Tensor, places: Places, cbow: bool, negative: int, rate: float, with_loss: bool
) -> Tensor | None:
    """Train rows in place; arguments as `pack_spans`. Return the loss, shape (), where it is wanted."""
    device = center_rows.device
    losses = torch.zeros(THREADS, dtype=torch.float64, device=device) if with_loss else None
    # `room` may go once the kernel is queued: its memory is given to nothing that does not queue behind it.
    packed, room = pack_spans(center_rows, context_rows, places, cbow, negative, rate, losses)
    launch_kernel(_kernel(device), 1, THREADS, packed, current_stream(device))
    del room
    return None if losses is None else losses.sum().to(center_rows.dtype)


# Finding it again would make the device current each time.
@once
def _kernel(device: torch.device) -> Any:
    return load_kernel("word2vec.cu", "train_spans", device)


def train_in_torch(
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
            targets, counts = contexts[near], inside * pair_weight(gap.abs(), places.window).to(inside.dtype)
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
