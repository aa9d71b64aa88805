"""Loss and gradients of skip-gram with negative sampling over one block of words, written out: no autograd, no pair lists.

Arrays in, arrays out; tables and optimizers are unknown here. A block of n consecutive words has up to 2 * window * n pairs
(center, context), all in a narrow band around the diagonal of an n x n matrix of scores. In torch the block is cut into
tiles of `TILE` words, and each tile is multiplied with the stretch of text its windows reach: three batched matrix products
instead of a gather per pair. On the host numba, where there is one, goes along the pairs themselves (`compiled`).

The negatives are shared: a group of them by an equal share of the unique centers, in a matrix product, weighted so that their
sum stands for `negative` draws a pair (an unbiased estimate of that sum). A negative that happens to be the context word
itself is not skipped, as it would be in word2vec.c: it has the weight of its small probability.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32  # words a tile: smaller ones cost more calls, larger ones more products outside the band

log = logging.getLogger(__name__)


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


def skipgram_gradients(
    center_rows: Tensor,
    context_rows: Tensor,
    centers: Tensor,
    contexts: Tensor,
    negatives: Tensor,
    before: Tensor,
    after: Tensor,
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
    negatives : Tensor of int64, shape (groups, k)
        The shared negatives, as positions in `context_rows`; group g serves the g-th equal share of `center_rows`.
    before, after : Tensor of int64, shape (n,)
        Of word i the contexts are the words ``i - before[i]`` to ``i + after[i]`` but itself.
    negative : int
        Negatives a pair; the k shared ones of a group are weighted by ``negative / k``.
    with_loss : bool
        False saves two passes over all scores.

    Returns
    -------
    BlockGradients
    """
    pairs, compiled = before + after, _compiled() if center_rows.device.type == "cpu" else None
    band = (center_rows, context_rows, centers, contexts, before, after, with_loss)
    in_thread = _helper().submit(_compiled_band, compiled, *band) if compiled else None

    # The negatives of a word are the same wherever it stands in the block: once a unique row, weighted by its pairs.
    groups, k = negatives.shape
    weight = center_rows.new_zeros(len(center_rows)).index_add_(0, centers, pairs.to(center_rows.dtype))
    weight = _in_groups(weight.mul_(negative / k)[:, None], groups)
    center, noise = _in_groups(center_rows, groups), context_rows[negatives]
    scores = torch.bmm(center, noise.transpose(1, 2))
    loss = (F.softplus(scores) * weight).sum() if with_loss else None
    slope = scores.sigmoid_().mul_(weight)
    from_noise = torch.bmm(slope, noise).flatten(0, 1)[: len(center_rows)]
    noise_grad = torch.bmm(slope.transpose(1, 2), center).flatten(0, 1)

    center_grad, context_grad, band_loss = in_thread.result() if in_thread else _band(*band)
    center_grad += from_noise
    context_grad.index_add_(0, negatives.flatten(), noise_grad)
    if loss is not None and band_loss is not None:
        loss += band_loss
    return BlockGradients(center_grad, context_grad, pairs.sum(), loss)


def _in_groups(rows: Tensor, groups: int) -> Tensor:
    """Return `rows` (u, dim) as (groups, share, dim), zeros at the end."""
    share = -(-len(rows) // groups)
    return F.pad(rows, (0, 0, 0, share * groups - len(rows))).view(groups, share, -1)


# --- positive pairs, compiled -----------------------------------------------------------------------------------------


@functools.cache
def _compiled() -> Any:
    """Return the module `compiled`, or None where numba does not work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from speedtransfer.word2vec import compiled
    except Exception as error:  # whatever a numba says that does not fit the rest of the installation
        log.warning("numba cannot be used (%s: %s), so torch does its work", type(error).__name__, error)
        return None
    return compiled


@functools.cache
def _helper() -> concurrent.futures.ThreadPoolExecutor:
    """Return the thread that sees to the positive pairs while the calling one sees to the negatives."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="speedtransfer-pairs")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helper.cache_clear)  # a forked process has no such thread


def _compiled_band(
    compiled: Any,
    center_rows: Tensor,
    context_rows: Tensor,
    centers: Tensor,
    contexts: Tensor,
    before: Tensor,
    after: Tensor,
    with_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_band`, pair by pair."""
    center_grad, context_grad = torch.empty_like(center_rows), torch.zeros_like(context_rows)
    loss = compiled.pairs(
        *(t.numpy() for t in (center_rows, context_rows, centers, contexts, before, after, center_grad, context_grad)),
        with_loss,
    )
    return center_grad, context_grad, center_rows.new_tensor(loss)


# --- positive pairs, in torch -----------------------------------------------------------------------------------------


def _band(
    center_rows: Tensor,
    context_rows: Tensor,
    centers: Tensor,
    contexts: Tensor,
    before: Tensor,
    after: Tensor,
    with_loss: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the positive pairs for both kinds of rows, and their summed loss."""
    num_words, dim = len(centers), center_rows.shape[1]
    reach = int(torch.maximum(before, after).max()) if num_words else 0
    tile = max(TILE, 2 * reach)  # so that a tile's stretch overlaps that of the next tile only
    num_tiles = -(-num_words // tile)
    padding = num_tiles * tile - num_words
    tiles = F.pad(center_rows[centers], (0, 0, 0, padding)).view(num_tiles, tile, dim)
    padded = F.pad(context_rows[contexts], (0, 0, reach, padding + reach))
    near = padded.as_strided((num_tiles, tile + 2 * reach, dim), (tile * dim, dim, 1))  # overlapping, without a copy

    mask = _pair_mask(before, after, num_tiles, tile, reach)
    scores = torch.bmm(tiles, near.transpose(1, 2))
    slope = (scores.sigmoid() - 1) * mask
    center_grad = torch.zeros_like(center_rows)
    center_grad.index_add_(0, centers, torch.bmm(slope, near).view(-1, dim)[:num_words])

    parts = torch.bmm(slope.transpose(1, 2), tiles)
    summed = center_rows.new_zeros((num_tiles + 1) * tile, dim)
    summed[: num_tiles * tile].view(num_tiles, tile, dim).copy_(parts[:, :tile])
    summed[tile:].view(num_tiles, tile, dim)[:, : 2 * reach].add_(parts[:, tile:])
    context_grad = torch.zeros_like(context_rows)
    context_grad.index_add_(0, contexts, summed[reach : reach + num_words])
    return center_grad, context_grad, (F.softplus(-scores) * mask).sum() if with_loss else None


def _pair_mask(before: Tensor, after: Tensor, num_tiles: int, tile: int, reach: int) -> Tensor:
    """Return whether a score belongs to a pair, bool, shape (num_tiles, tile, tile + 2 * reach)."""
    device, padding = before.device, num_tiles * tile - len(before)
    column = torch.arange(tile + 2 * reach, device=device) - reach  # relative to the tile's first word
    gap = column - torch.arange(tile, device=device)[:, None]
    left, right = (F.pad(side, (0, padding)).view(num_tiles, tile, 1) for side in (before, after))
    return (gap != 0) & (gap >= -left) & (gap <= right)
