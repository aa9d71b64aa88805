"""Loss and gradients of skip-gram with negative sampling over one block of words, written out: no autograd, no pair lists.

Arrays in, arrays out; tables and optimizers are unknown here. A block of n consecutive words has up to 2 * window * n pairs
(center, context), all in a narrow band around the diagonal of an n x n matrix of scores. In torch they are three batched
matrix products over that band (`band`) instead of a gather a pair. On the host numba, where there is one, goes along the
pairs themselves (`compiled`).

The negatives are shared: a group of them by an equal share of the unique centers, in a matrix product, weighted so that their
sum stands for `negative` draws a pair (an unbiased estimate of that sum). A negative that happens to be the context word
itself is not skipped, as it would be in word2vec.c: it has the weight of its small probability.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.jit import compiled_module
from speedtransfer.word2vec.band import Noise, sum_by_row
from speedtransfer.word2vec.places import Places

T = TypeVar("T")


@dataclass
class BlockGradients:
    """What one block gives.

    Attributes
    ----------
    center, context : Tensor, shapes (u, dim) and (v, dim)
        Gradients of the summed loss for the rows of centers and of contexts and negatives.
    num_pairs : Tensor of int64, shape ()
        On the host.
    loss : Tensor, shape (), or None
        Summed over the pairs and their negatives; None where it was not asked for.
    """

    center: Tensor
    context: Tensor
    num_pairs: Tensor
    loss: Tensor | None


def skipgram_gradients(
    center_rows: Tensor, context_rows: Tensor, places: Places, negative: int, with_loss: bool = True
) -> BlockGradients:
    """Return the gradients of ``sum softplus(-c.o) + sum softplus(c.n)`` over pairs (c, o) and the negatives n of each.

    Parameters
    ----------
    center_rows, context_rows : Tensor, shapes (u, dim) and (v, dim)
        Vectors of the distinct words of the block, and unique rows of the output table.
    places : Places
        Where among them its words and negatives are; group g of these serves the g-th equal share of `center_rows`.
    negative : int
        Negatives a pair; the k shared ones of a group are weighted by ``negative / k``.
    with_loss : bool
        False saves two passes over all scores.

    Returns
    -------
    BlockGradients
    """
    negatives = places.negatives
    # The negatives of a word are the same wherever it stands in the block: once a unique row, weighted by its pairs.
    weight = places.pairs.to(center_rows.dtype).mul_(negative / negatives.shape[1])
    noise = Noise(center_rows, context_rows, negatives, weight, with_loss)
    if has_helper(noise.device):
        positive = functools.partial(_compiled_band, center_rows, context_rows, places, with_loss)
        center_grad, context_grad, loss = compute_noise(noise, positive)
        from_noise, noise_grad = noise.gradients()
        context_grad.index_add_(0, negatives.flatten(), noise_grad)
    else:
        to_centers, to_contexts, loss = _band(center_rows, context_rows, places, with_loss)
        noise.compute(slice(None))
        from_noise, noise_grad = noise.gradients()
        center_grad = sum_by_row(to_centers, places.words)
        context_grad = sum_by_row(torch.cat([to_contexts, noise_grad]), places.outputs)
    center_grad += from_noise
    noise_loss = noise.loss()
    if loss is not None and noise_loss is not None:
        loss += noise_loss
    return BlockGradients(center_grad, context_grad, places.num_pairs, loss)


# --- two threads ------------------------------------------------------------------------------------------------------


def compute_noise(noise: Noise, meanwhile: Callable[[], T]) -> T:
    """Compute `noise`, and return what `meanwhile` returns: on two threads where there is the helping one.

    That sees to `meanwhile`, and where torch computes on one thread then to groups of the noise, as long as there are any:
    which thread takes a group changes nothing about it.
    """
    if not has_helper(noise.device):
        noise.compute(slice(None))
        return meanwhile()
    share = torch.get_num_threads() == 1 and not torch.is_inference_mode_enabled()
    groups = [slice(g, g + 1) for g in range(noise.num_groups)] if share else [slice(None)]

    def take_groups() -> None:
        while True:
            try:
                group = groups.pop()
            except IndexError:  # the other thread may have taken the last one
                return
            noise.compute(group)

    def help_out() -> T:
        result = meanwhile()
        if share:
            torch.set_num_threads(1)  # of this thread, too: it would start more, which then spin
            take_groups()
        return result

    helped = _helper().submit(help_out)
    take_groups()
    return helped.result()


def has_helper(device: torch.device) -> bool:
    """Tell whether the helping thread has a part in gradients on `device`: on a CPU with numba, which leaves it the GIL."""
    return device.type == "cpu" and _compiled() is not None


# --- positive pairs, compiled -----------------------------------------------------------------------------------------


def _compiled() -> Any:
    """Return the module `compiled`, or None where numba does not work."""
    return compiled_module("speedtransfer.word2vec.compiled")


@functools.cache
def _helper() -> concurrent.futures.ThreadPoolExecutor:
    """Return the thread that helps: it sees to the positive pairs while the calling one begins with the negatives."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="speedtransfer-pairs")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helper.cache_clear)  # a forked process has no such thread


@contextlib.contextmanager
def leave_a_core(device: torch.device) -> Iterator[None]:
    """While this is entered torch leaves a core to the thread of the positive pairs, where there is one.

    After each of its parallel operations torch's threads go on to spin for a while, on the cores that others have work for.
    """
    threads = torch.get_num_threads()
    if not has_helper(device) or threads == 1:
        yield
        return
    torch.set_num_threads(threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compiled_band(
    center_rows: Tensor, context_rows: Tensor, places: Places, with_loss: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the positive pairs for both kinds of rows, and their summed loss."""
    grads, band = (torch.empty_like(center_rows), torch.empty_like(context_rows)), places.band
    before, after = -band.left[: band.num_words], band.right[: band.num_words]
    arrays = center_rows, context_rows, places.words.inverse, places.contexts, before, after, *grads
    loss = _compiled().pairs(*(tensor.numpy() for tensor in arrays), with_loss)
    return *grads, center_rows.new_tensor(loss) if with_loss else None


# --- positive pairs, in torch -----------------------------------------------------------------------------------------


def _band(
    center_rows: Tensor, context_rows: Tensor, places: Places, with_loss: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the positive pairs for each word of the block as a center and as a context, and their loss."""
    band, inside = places.band, places.band.inside()
    tiles, near = band.tiles(center_rows[places.words.inverse]), band.stretches(context_rows[places.contexts])
    scores = torch.bmm(tiles, near.transpose(1, 2))
    slope = scores.sigmoid().sub_(1).mul_(inside)
    to_centers = torch.bmm(slope, near).flatten(0, 1)[: band.num_words]
    to_contexts = band.add_up(torch.bmm(slope.transpose(1, 2), tiles))
    return to_centers, to_contexts, (F.softplus(-scores) * inside).sum() if with_loss else None
