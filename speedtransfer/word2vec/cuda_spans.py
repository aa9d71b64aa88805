"""Train the rows of a block on a CUDA device by one kernel; in torch each span takes two dozen operations."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, current_stream, launch_kernel, load_kernel
from speedtransfer.word2vec.places import Places

THREADS = 512  # of the block that does it alone
_PARTS = 8  # kParts of word2vec.cu
_TRAIN = KernelArgument("21q2d")  # struct Train


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
        *(len(places.before), dim, span, reach, num_draws, cbow),
        *(negative, rate),
    )
    return packed, room


def are_suitable(rows: Tensor, places: Places) -> bool:
    """Tell whether the kernel can train such rows: float32, in spans whose parts can be counted in 32 bits."""
    return rows.is_cuda and rows.dtype == torch.float32 and sum(_sizes(places, rows.shape[1])) < 1 << 32


def _sizes(places: Places, dim: int) -> tuple[int, ...]:
    """Return how many numbers each of the arrays has that the kernel works in."""
    span, near, num_draws = places.span, 2 * places.reach, places.draws.shape[1]
    scores = span * (near + 1 + num_draws)
    return span * dim, span * dim, (span + near) * dim, num_draws * dim, scores * _PARTS, scores


def train(
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
@functools.cache
def _kernel(device: torch.device) -> Any:
    return load_kernel("word2vec.cu", "train_spans", device)
