"""Add the gradients of two lists of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer.tables import UniqueRows, is_padded, on_host, padded_unique, sum_rows, trimmed, unique_rows


def merged(
    num_rows: int, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], takes_padding: bool
) -> tuple[Tensor, Tensor, UniqueRows | None]:
    """Return ids and sum of two gradients (ids, gradient), in the memory of the first if it has all their rows.

    `num_rows` are those of the table, and with `takes_padding` the ids returned may be padded.
    Last, on a CUDA device, how the ids come from the two, one after the other; None where that was not needed.
    """
    (ids, grad), (more_ids, more) = one, other
    if not len(more_ids):
        return ids, grad, None
    if more_ids is ids:
        return ids, grad.add_(more), None
    full, more_full = (len(some) == num_rows and not is_padded(some) for some in (ids, more_ids))
    if full and more_full:
        return ids, grad.add_(more), None
    if full:
        # What pads `more` adds zero to the last row.
        return ids, grad.index_add_(0, more_ids.clamp(max=num_rows - 1), more), None
    if more_full:
        return more_ids, more.index_add(0, ids.clamp(max=num_rows - 1), grad), None
    if ids.is_cuda:
        union = _union(num_rows, ids, more_ids, takes_padding)
        return union.ids, sum_rows(torch.cat([grad, more]), union, num_rows), union
    if more_ids.shape == ids.shape and torch.equal(more_ids, ids):
        return ids, grad.add_(more), None
    rows, position, *_ = unique_rows(torch.cat([ids, more_ids]))
    total = grad.new_zeros(len(rows), grad.shape[1])
    total[position[: len(ids)]] = grad
    # `more_ids` are unique.
    total[position[len(ids) :]] += more
    return rows, total, None


def _union(num_rows: int, ids: Tensor, more_ids: Tensor, takes_padding: bool) -> UniqueRows:
    """Return the unique rows of two lists on a CUDA device, for which the host does not wait where it need not."""
    known, more_known = on_host(ids), on_host(more_ids)
    if known is not None and more_known is not None:
        return unique_rows(torch.cat([known, more_known]), grouped=True).to(ids.device)
    union = padded_unique(torch.cat([ids, more_ids]), num_rows)
    return union if takes_padding else trimmed(union)
