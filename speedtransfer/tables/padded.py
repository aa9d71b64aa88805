"""Unique rows on a CUDA device, of which the host does not learn how many there are: it would have to wait for the device.

There is room for as many as there can be. What is left over is padding: ids equal to the number of rows of the table, which
name none, so that they are gathered as zeros and scattered nowhere. They come last, and ids out of range become padding too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import (
    VALUE_TYPES,
    KernelArgument,
    check_not_capturing,
    current_stream,
    is_trusted,
    kernel_on,
    launch_kernel,
    launch_over,
)
from speedtransfer.tables.unique import NOTHING, Known, UniqueRows

_INT32_MAX = 2**31 - 1
# struct Unique of unique.cu, struct Sums of sums.cu.
_UNIQUE, _SUMS = KernelArgument("13q"), KernelArgument("15q")
# kFew and kFewThreads of unique.cu, and the rows of a table whose numbers it can sort.
_FEW, _FEW_THREADS, _FEW_ROWS = 1 << 12, 256, 1 << 51
# Of few rows a block sums so many columns: 32 bytes at least, which memory gives at once.
_COLUMNS = 8


def padded_unique(flat: Tensor, num_rows: int, spare: bool = False) -> UniqueRows:
    """Return the unique rows of `flat`, (count,) int64, of a table of `num_rows` rows, padded.

    Parameters
    ----------
    flat : Tensor
        At least one; values out of range share a place in the padding.
    num_rows : int
    spare : bool
        Make sure that the last place is padding.

    Returns
    -------
    UniqueRows
        ``ids`` (n,) with n at most ``min(count, num_rows) + 1``.
    """
    room = min(flat.shape[0], num_rows) + 1 if spare else min(flat.shape[0], num_rows + 1)
    find = _find_by_kernels if flat.is_cuda and is_trusted("unique rows", flat.device, _check_unique(flat)) else _find
    return find(flat, num_rows, room)


def _find(flat: Tensor, num_rows: int, room: int) -> UniqueRows:
    keys = torch.where((flat >= 0) & (flat < num_rows), flat, num_rows)
    ordered, order = keys.sort(stable=True)
    groups = torch.ones_like(ordered)
    groups[1:] = ordered[1:] != ordered[:-1]
    groups = groups.cumsum(0)
    inverse = torch.empty_like(flat).scatter_(0, order, groups - 1)
    # Repeats write the same value to the same place.
    ids = torch.full((room,), num_rows, device=flat.device).scatter_(0, groups - 1, ordered)
    starts = torch.searchsorted(groups, torch.arange(1, room + 2, device=flat.device))
    num_unique = (groups[-1] - (ordered[-1] == num_rows).long()).view(1)
    return UniqueRows(ids, inverse, order, starts, known=Known(num_unique))


def _find_by_kernels(flat: Tensor, num_rows: int, room: int) -> UniqueRows:
    few = flat.shape[0] <= _FEW and num_rows < _FEW_ROWS
    return (_find_few if few else _find_many)(flat, num_rows, room)


def _find_few(flat: Tensor, num_rows: int, room: int) -> UniqueRows:
    count, device = flat.shape[0], flat.device
    made = flat.new_empty(2 * room + 2 * count + 1)
    ids, starts, inverse, order = made.split_with_sizes([room, room + 1, count, count])
    # By itself: it may be kept for long.
    num_unique, at = flat.new_empty(1), made.data_ptr()
    made_at = at, at + 8 * room, at + 8 * (2 * room + 1), num_unique.data_ptr(), at + 8 * (2 * room + 1 + count)
    argument = _UNIQUE.pack(flat.data_ptr(), count, num_rows, 0, 0, 0, 0, room, *made_at)
    # A thread for each pair that is compared.
    threads = min(max(1 << (count - 1).bit_length() >> 1, 32), _FEW_THREADS)
    launch_kernel(kernel_on("unique.cu", "find_few", device), 1, threads, argument, current_stream(device))
    return UniqueRows(ids, inverse, order, starts, known=Known(num_unique))


def _find_many(flat: Tensor, num_rows: int, room: int) -> UniqueRows:
    count, device = flat.shape[0], flat.device
    wide = max(num_rows, count) > _INT32_MAX
    keys, groups = flat.new_empty((2, count), dtype=torch.int64 if wide else torch.int32)
    ids, starts, inverse = flat.new_empty(2 * room + count + 1).split([room, room + 1, count])
    # By itself: it may be kept for long.
    num_unique = flat.new_empty(1)
    pointers = [tensor.data_ptr() for tensor in (ids, starts, inverse, num_unique)]

    def launch(name: str, keys: Tensor, groups: Tensor, order: int) -> None:
        buffers = keys.data_ptr(), groups.data_ptr(), order
        argument = _UNIQUE.pack(flat.data_ptr(), count, num_rows, wide, *buffers, room, *pointers, 0)
        launch_over(max(count, room + 1), "unique.cu", name, device, argument)

    launch("find_keys", keys, groups, 0)
    keys, order = keys.sort(stable=True)
    launch("mark_groups", keys, groups, 0)
    groups = groups.cumsum(0, dtype=groups.dtype)
    launch("write_groups", keys, groups, order.data_ptr())
    return UniqueRows(ids, inverse, order, starts, known=Known(num_unique))


def kept(ids: Tensor, keep: Tensor, num_rows: int) -> tuple[Tensor, Known]:
    """Return `ids` (n,) with padding in place of those that `keep` (n,) is False for, and what is known of them."""
    found = ids.masked_fill(~keep, num_rows)
    return found, Known((found < num_rows).sum().view(1))


def padded_anew(ids: Tensor, known: Known, num_rows: int) -> Tensor:
    """Return padded `ids` (n,) of a table that has had fewer rows with padding for `num_rows`; others as they are."""
    if known.length is None:
        return ids
    return torch.where(torch.arange(ids.shape[0], device=ids.device) < known.length, ids, num_rows)


def trimmed(groups: UniqueRows) -> UniqueRows:
    """Return `groups` without padding; the host waits. An id out of range must have been ruled out."""
    if groups.known.length is None:
        return groups
    check_not_capturing("counting unique rows")
    n = int(groups.known.length)
    assert groups.starts is not None
    return groups._replace(ids=groups.ids[:n], starts=groups.starts[: n + 1], known=NOTHING)


def sum_rows(values: Tensor, groups: UniqueRows, num_rows: int, excluded: int = -1) -> Tensor:
    """Return the sum of the rows of `values`, (count, width), of each group, ``(n, width)``, always added in the same order.

    Parameters
    ----------
    values : Tensor
        float64, float32, float16 or bfloat16; the latter two are summed in float32.
    groups : UniqueRows
        With order and starts.
    num_rows : int
        Of the table: the sum of padding, which does not belong to it, is zero.
    excluded : int
        An id whose sum is zero as well.
    """
    if not values.numel():
        return values.new_zeros(groups.ids.shape[0], values.shape[1])
    values = values.contiguous()
    by_kernels = values.is_cuda and is_trusted("sums of rows", values.device, _check_sums(values))
    return (_sum_by_kernels if by_kernels else _sum)(values, groups, num_rows, excluded)


def _sum(values: Tensor, groups: UniqueRows, num_rows: int, excluded: int) -> Tensor:
    order, starts = groups.order, groups.starts
    assert order is not None
    assert starts is not None
    total = torch.nn.functional.embedding_bag(order, values, starts, mode="sum", include_last_offset=True)
    left_out = (groups.ids >= num_rows) | (groups.ids == excluded)
    return total.masked_fill_(left_out[:, None], 0)


def _sum_by_kernels(values: Tensor, groups: UniqueRows, num_rows: int, excluded: int) -> Tensor:
    (count, width), order, starts = values.shape, groups.order, groups.starts
    assert order is not None
    assert starts is not None
    num_groups, device = groups.ids.shape[0], values.device
    total = values.new_empty((num_groups, width))
    # Short, so that many threads read at once. Not much shorter than the root, or a row that everybody looks up takes long.
    piece = 1 << max(4, count.bit_length() // 2 - 3)
    pieces = -(-count // piece)
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    parts = values.new_empty(2 * pieces * width, dtype=kind)
    tensors = values, total, order, groups.inverse, starts, groups.ids, parts
    pointers = [tensor.data_ptr() for tensor in tensors]
    tails, shape = pointers[-1] + pieces * width * kind.itemsize, (count, width, piece)
    argument = _SUMS.pack(*pointers, tails, *shape, excluded, num_rows, VALUE_TYPES[values.dtype], num_groups)
    if count <= _FEW:
        kernel, blocks = kernel_on("sums.cu", "sum_few", device), -(-width // _COLUMNS)
        launch_kernel(kernel, blocks, _FEW_THREADS, argument, current_stream(device))
    else:
        launch_over(pieces * width, "sums.cu", "sum_pieces", device, argument)
        launch_over((pieces - 1) * width, "sums.cu", "add_pieces", device, argument)
    return total


def _check_unique(like: Tensor) -> Any:
    def right() -> bool:
        flat = torch.tensor([5, 0, -1, 5, 9, 7, 2**40, 0], device=like.device)
        few, many, wanted = (find(flat, 9, 8) for find in (_find_few, _find_many, _find))
        tensors = [(*rows[:4], rows.known.length) for rows in (few, many, wanted)]
        return all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(*tensors, strict=True))

    return right


def _check_sums(like: Tensor) -> Any:
    def right_for(count: int) -> bool:
        flat = torch.arange(count, device=like.device) % 7
        groups = _find(flat.clamp_(max=5), 5, 8)
        values = (torch.arange(3 * count, device=like.device) % 600).view(count, 3).to(torch.float32)
        return torch.equal(_sum_by_kernels(values, groups, 5, 2), _sum(values, groups, 5, 2))

    return lambda: right_for(200) and right_for(_FEW + 1)
