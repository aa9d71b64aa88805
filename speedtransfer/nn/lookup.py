"""Look active rows up as ``F.embedding`` and ``F.embedding_bag`` do, in recycled memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.eager import uncompiled
from speedtransfer.engines import gather_rows
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.nn.jagged import check_order
from speedtransfer.nn.ticket import FoundRows, Ticket, find_ticket
from speedtransfer.optim import Handle
from speedtransfer.tables import UniqueRows, sum_rows


class _Lookup(torch.autograd.Function):
    """Compute ``rows[inverse]`` in recycled memory: on the CPU fresh pages cost several times the copy.

    The result has the shape of the ids already, since a view of it could not be changed in place. The gradients of a row are
    added in the order of the batch: on CUDA those of torch's own function may be added in any.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, active: ActiveRows, by_freq: bool) -> Tensor:
        inverse = active.inverse
        # The rows themselves are not kept.
        ctx.groups, ctx.padding, ctx.by_freq = active._groups, active._padding_idx, by_freq
        ctx.table_rows = active._handle.num_rows if rows.is_cuda else 0
        out = buffers.empty((*inverse.shape, rows.shape[1]), rows.dtype, rows.device)
        flat = out.view(inverse.numel(), rows.shape[1])
        if rows.is_cuda:
            torch.index_select(rows, 0, ctx.groups.inverse, out=flat)
        else:
            gather_rows([rows], ctx.groups.inverse, [flat])
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        groups = ctx.groups
        inverse, num_rows = groups.inverse, groups.ids.shape[0]
        grad = grads[0].reshape(inverse.numel(), grads[0].shape[-1])
        # Many gradients at once (is_grads_batched, vmap) cannot be written to the memory of one; of a gradient that was made
        # with create_graph the gradient may be asked for.
        if is_batched(grad) or torch.is_grad_enabled():
            if ctx.padding >= 0:
                grad = grad * (groups.ids != ctx.padding)[inverse][:, None]
            if ctx.by_freq:
                # As in torch, whose double backward leaves the counts out.
                return torch.ops.aten.embedding_dense_backward(grad, inverse, num_rows, -1, True), None, None
            return grad.new_zeros(num_rows, grad.shape[1]).index_add(0, inverse, grad), None, None
        return _row_sums(groups, ctx.padding, ctx.table_rows, ctx.by_freq, grad), None, None


def is_batched(grad: Tensor) -> bool:
    """Tell whether `grad` are many gradients at once (is_grads_batched, vmap)."""
    return torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad)


def _row_sums(groups: UniqueRows, padding_idx: int, table_rows: int, by_freq: bool, grad: Tensor) -> Tensor:
    """Return the gradient of each unique row, ``(n, dim)``, from that of each id, in recycled memory.

    Parameters
    ----------
    groups : UniqueRows
        Of the ids.
    padding_idx : int
        -1: there is none.
    table_rows : int
        Of the table, if it is on a CUDA device.
    by_freq : bool
        Divide by the number of times that an id occurs; on CUDA only.
    grad : Tensor
        ``(number of ids, dim)``.
    """
    num_rows = groups.ids.shape[0]
    if grad.is_cuda:
        total = sum_rows(grad, groups, table_rows, padding_idx)
        return total.div_(_counts(groups)[:, None]) if by_freq else total
    if groups.order is not None and groups.starts is not None and grad.dtype == torch.float32:
        # Sums the gradients of each row in the order of the batch, in float32 twice as fast as index_add_.
        # The gradient of a sum is one value expanded.
        if not grad.is_contiguous():
            grad = buffers.empty(tuple(grad.shape), grad.dtype, grad.device).copy_(grad)
        total = F.embedding_bag(groups.order, grad, groups.starts[:-1], mode="sum")
    else:
        total = buffers.empty((num_rows, grad.shape[1]), grad.dtype, grad.device).zero_()
        total.index_add_(0, groups.inverse, grad)
    if groups.found >= 0:
        total[groups.found] = 0
    return total


def _counts(groups: UniqueRows) -> Tensor:
    """Return how often each unique row occurs, ``(n,)``, of padding once."""
    assert groups.starts is not None
    return groups.starts.diff().clamp_(min=1)


def lookup(active: ActiveRows, scale_grad_by_freq: bool = False, again: bool = False) -> Tensor:
    """Return the row of each id that `active` was made from, ``(*shape of the ids, dim)``.

    Parameters
    ----------
    active : ActiveRows
    scale_grad_by_freq : bool
        Divide the gradient of a row by the number of times that its id occurs.
    again : bool
        Backward may come more than once without ``retain_graph``, to rows of float32 or float64.
    """
    rows, inverse, padding = active.rows, active.inverse, active._groups.found
    if again or _is_ours(active, scale_grad_by_freq):
        return _Lookup.apply(rows, active, scale_grad_by_freq)
    # What F.embedding calls.
    return torch.embedding(rows, inverse, padding, scale_grad_by_freq, False)


def _is_ours(active: ActiveRows, by_freq: bool) -> bool:
    rows = active.rows
    if rows.is_cuda:
        return rows.dtype.is_floating_point
    large = active.inverse.numel() * rows.shape[1] * rows.element_size() >= buffers.SMALL_BYTES
    return large and not by_freq and rows.dtype in (torch.float32, torch.float64)


def frozen_lookup(handle: Handle, ids: Any, padding_idx: int | None, scale_grad_by_freq: bool = False) -> Tensor:
    """Return the row of each id without gradients, ``(*shape of the ids, dim)``; `ids` are as for `activate`."""
    rows = ids.rows if isinstance(ids, FoundRows) else ids
    if handle.looks_up_directly(rows):
        ticket = find_ticket(handle, ids) if handle.reads_ahead or isinstance(ids, Ticket) else None
        if ticket is None:
            return handle.rows.lookup(rows)
        # Those of a vocabulary may have got other rows since.
        ids = ticket if rows is ids else ids
    return lookup(activate(handle, ids, False, padding_idx=padding_idx, padded=True), scale_grad_by_freq)


def bag_lookup(
    active: ActiveRows,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    scale_grad_by_freq: bool,
    include_last_offset: bool,
    sparse: bool,
    beside: Any = None,
) -> Tensor:
    """Return the sum, mean or max of the rows of each bag of the ids that `active` was made from, ``(bags, dim)``.

    Parameters
    ----------
    sparse : bool
        Whether torch would make a sparse gradient, which it sums in another order in half precision.
    beside : UnseenValues or UnseenOnDevice, optional
        What ids read that have no row.
    """
    if type(offsets) is Tensor and active.inverse.dim() == 1:
        padded = active._padding_idx >= 0
        offsets = _checked_offsets(offsets, len(active.inverse), active._handle, include_last_offset, padded)
    rows, inverse, padding = apart_from_padding(active, beside)
    takes_last = include_last_offset and padding is None and active._padding_idx >= 0
    if offsets is not None and takes_last and offsets.dim() == 1 and not _reaches_beyond(offsets, len(inverse)):
        # With a padding row, among the ids or not, the last bag of torch extends to the end of the ids.
        offsets, include_last_offset = offsets[:-1], False
    as_sparse = (
        sparse and beside is None and active.rows.dtype.itemsize == 2 and mode != "max" and not scale_grad_by_freq
    )
    return F.embedding_bag(
        inverse,
        rows,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        sparse=as_sparse,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def check_bags(
    handle: Handle,
    ids: Any,
    offsets: Tensor | None,
    weights: Tensor | None,
    mode: str,
    freq: bool,
    last: bool,
    padded: bool,
) -> None:
    """Raise where `bag_lookup` would, for `ids` of some shape: before a lookup that shortens rows or admits ids."""
    shape = getattr(ids, "shape", None)
    if shape is None:
        return
    if type(offsets) is Tensor and len(shape) == 1:
        offsets = _checked_offsets(offsets, shape[0], handle, last, padded)
    row = torch.zeros(1, 1, dtype=handle.rows.dtype, device=handle.table.device)
    given = torch.zeros(tuple(shape), dtype=torch.int64, device=row.device)
    with torch.no_grad():
        F.embedding_bag(
            given,
            row,
            offsets,
            mode=mode,
            scale_grad_by_freq=freq,
            include_last_offset=last,
            per_sample_weights=weights,
            padding_idx=0 if padded else None,
        )


def apart_from_padding(active: ActiveRows, beside: Any) -> tuple[Tensor, Tensor, int | None]:
    """Return rows, the place in these of each id, and that of padding, if there is any; `beside` as for `bag_lookup`."""
    rows, inverse, padding = active.rows, active.inverse, active._groups.found
    if active._groups.known.length is not None and active._padding_idx >= 0:
        # The host does not know the place of the padding row: its ids are those of the last place, which no row has.
        padding = active.rows.shape[0] - 1
        inverse = inverse.masked_fill((active.ids == active._padding_idx)[inverse], padding)
    if beside is not None:
        rows, inverse = beside.beside(rows, inverse)
    return rows, inverse, padding if padding >= 0 else None


def _reaches_beyond(offsets: Tensor, count: int) -> bool:
    """Tell whether torch will refuse the last of `offsets`, as far as the host knows."""
    return not offsets.is_cuda and len(offsets) > 0 and int(offsets[-1]) > count


def _checked_offsets(offsets: Tensor, count: int, handle: Handle, last: bool, padded: bool) -> Tensor:
    """Return a copy of the offsets of bags of `count` ids, or raise: torch's kernels on the CPU address memory by them."""
    if offsets.device.type != "cpu" or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return offsets
    array = offsets.numpy().copy()
    if not len(array):
        if count:
            raise InvalidValueError(
                f"offsets of {handle} are empty but there are {count} ids; pass where each bag begins, the first at 0"
            )
        return offsets
    # Torch looks at the first and the last.
    check_order(array, str(handle))
    # With a padding row the last bag of torch extends to the end of the ids.
    if last and array[-1] < count and (not padded or len(array) == 1):
        raise InvalidValueError(
            f"offsets of {handle} end at {array[-1]} but there are {count} ids, and include_last_offset=True says that the "
            "last one is their end; pass input[: offsets[-1]]"
        )
    return torch.from_numpy(array)
