"""Add the gradients of two lists of rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from speedtransfer.tables import NOTHING, Known, UniqueRows, padded_unique, sum_rows, trimmed, unique_rows

# As many rows of parts may wait without being added.
MANY_ROWS = 1 << 16
# The gradient of some rows: their ids (n,), the gradient (n, dim), what is known of the ids.
Part = tuple[Tensor, Tensor, Known]


def merged(num_rows: int, one: Part, other: Part, takes_padding: bool) -> tuple[Part, UniqueRows | None]:
    """Return the sum of two gradients, in the memory of the first if it has all their rows.

    `num_rows` are those of the table, and with `takes_padding` the ids returned may be padded.
    Last, on a CUDA device, how the ids come from the two, one after the other; None where that was not needed.
    """
    (ids, grad, known), (more_ids, more, more_known) = one, other
    if not len(more_ids):
        return one, None
    full, more_full = (len(some[0]) == num_rows and some[2].length is None for some in (one, other))
    if more_ids is ids or (full and more_full):
        return (ids, grad.add_(more), known), None
    if full:
        # What pads `more` adds zero to the last row.
        return (ids, grad.index_add_(0, more_ids.clamp(max=num_rows - 1), more), known), None
    if more_full:
        return (more_ids, more.index_add(0, ids.clamp(max=num_rows - 1), grad), more_known), None
    if ids.is_cuda:
        union = _union(num_rows, one, other, takes_padding)
        return (union.ids, sum_rows(torch.cat([grad, more]), union, num_rows), union.known), union
    if more_ids.shape == ids.shape and torch.equal(more_ids, ids):
        return (ids, grad.add_(more), known), None
    rows, position, *_ = unique_rows(torch.cat([ids, more_ids]))
    total = grad.new_zeros(len(rows), grad.shape[1])
    total[position[: len(ids)]] = grad
    # `more_ids` are unique.
    total[position[len(ids) :]] += more
    return (rows, total, NOTHING), None


def added(num_rows: int, parts: Sequence[Part], takes_padding: bool) -> Part:
    """Return the sum of several gradients, added in their order; `num_rows` and `takes_padding` as of `merged`."""
    if len(parts) < 3 or any(part[0].is_cuda or len(part[0]) == num_rows for part in parts):
        return functools.reduce(lambda one, other: merged(num_rows, one, other, takes_padding)[0], parts)
    # One by one they would be sorted and copied as often as there are parts: a decoder has hundreds.
    rows, position, *_ = unique_rows(torch.cat([ids for ids, _, _ in parts]))
    total = parts[0][1].new_zeros(len(rows), parts[0][1].shape[1])
    start = 0
    for ids, grad, _ in parts:
        places = position[start : start + len(ids)]
        total[places] = total[places] + grad if start else grad
        start += len(ids)
    return rows, total, NOTHING


def keep(parts: list[Part], part: Part, num_rows: int, takes_padding: bool) -> None:
    """Add a gradient to `parts`, which `added` adds: before, where they would take much memory for rows that come again."""
    parts.append(part)
    if len(parts) % 16 == 0 and sum(len(ids) for ids, *_ in parts) > 2 * max(len(parts[0][0]), MANY_ROWS):
        parts[:] = [added(num_rows, parts, takes_padding)]


def unpadded(part: Part) -> Part:
    """Return a gradient without the padding that it may have; the host waits for that."""
    ids, grad, known = part
    n = None if known.length is None else int(known.length)
    return part if n is None else (ids[:n], grad[:n], NOTHING)


def _union(num_rows: int, one: Part, other: Part, takes_padding: bool) -> UniqueRows:
    """Return the unique rows of two gradients on a CUDA device, for which the host does not wait where it need not."""
    (ids, _, known), (more_ids, _, more) = one, other
    if known.host is not None and more.host is not None:
        union = unique_rows(torch.cat([known.host, more.host]), grouped=True).to(ids.device)
    else:
        union = padded_unique(torch.cat([ids, more_ids]), num_rows)
        union = union if takes_padding else trimmed(union)
    noted = None if known.noted is None or more.noted is None else known.noted + more.noted
    return union._replace(known=union.known._replace(noted=noted))
