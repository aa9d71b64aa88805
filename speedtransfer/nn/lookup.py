"""``F.embedding`` and ``F.embedding_bag`` of active rows, without the cost of fresh memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.eager import uncompiled
from speedtransfer.engines import gather_rows
from speedtransfer.nn.active import ActiveRows
from speedtransfer.tables import UniqueRows


class _Lookup(torch.autograd.Function):
    """``rows[inverse]``, in the shape of the ids: a view of the result could not be changed in place.

    Fresh pages cost the CPU several times the copy, in forward and in backward: use them again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: UniqueRows, shape: torch.Size, padding: int) -> Tensor:
        ctx.groups, ctx.num_rows, ctx.padding = groups, rows.shape[0], padding
        out = buffers.empty((*shape, rows.shape[1]), rows.dtype, rows.device)
        gather_rows([rows], groups.inverse, [out.view(groups.inverse.numel(), rows.shape[1])])
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        _, inverse, order, starts, _ = ctx.groups
        grad = grads[0].reshape(inverse.numel(), grads[0].shape[-1])
        if torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad):
            # Many gradients at once (is_grads_batched, vmap), which are written to no memory of one alone.
            total = grad.new_zeros(ctx.num_rows, grad.shape[1]).index_add(0, inverse, grad)
            if ctx.padding >= 0:
                total = total.index_fill(0, inverse.new_tensor([ctx.padding]), 0)
            return total, None, None, None
        if torch.is_grad_enabled():  # create_graph: a gradient of this gradient may follow
            total = torch.ops.aten.embedding_dense_backward(grad, inverse, ctx.num_rows, ctx.padding, False)
            return total, None, None, None
        if order is not None and grad.dtype == torch.float32:
            # Sums of each row's gradients, in the order of the batch: for float32 a kernel twice as fast as index_add_.
            if not grad.is_contiguous():  # a sum gives the same memory for every value
                grad = buffers.empty(tuple(grad.shape), grad.dtype, grad.device).copy_(grad)
            total = F.embedding_bag(order, grad, starts, mode="sum")
        else:
            total = buffers.empty((ctx.num_rows, grad.shape[1]), grad.dtype, grad.device).zero_()
            total.index_add_(0, inverse, grad)
        if ctx.padding >= 0:
            total[ctx.padding] = 0
        return total, None, None, None


def lookup(active: ActiveRows, scale_grad_by_freq: bool = False) -> Tensor:
    """Return the row of every id that `active` was made of, ``(*shape of the ids, dim)``.

    Parameters
    ----------
    active : ActiveRows
    scale_grad_by_freq : bool
        Divide the gradient of a row by the number of times that its id occurs.
    """
    rows, inverse, padding = active.rows, active.inverse, active._groups.found
    large = inverse.numel() * rows.shape[1] * rows.element_size() >= buffers.SMALL_BYTES and not rows.is_cuda
    if large and not scale_grad_by_freq and rows.dtype in (torch.float32, torch.float64):
        return _Lookup.apply(rows, active._groups, inverse.shape, padding)
    return F.embedding(inverse, rows, padding if padding >= 0 else None, scale_grad_by_freq=scale_grad_by_freq)


def bag_lookup(
    active: ActiveRows,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    scale_grad_by_freq: bool,
    include_last_offset: bool,
    has_padding: bool,
    sparse: bool = False,
) -> Tensor:
    """Return the sum, mean or max of the rows of each bag of the ids that `active` was made of, ``(bags, dim)``.

    Parameters
    ----------
    has_padding : bool
        Whether there is a padding row, be it among the ids or not.
    sparse : bool
        Whether torch would make a sparse gradient, whose sums of half precision it adds up in another order.
    """
    padding = active._groups.found
    if include_last_offset and padding < 0 and offsets is not None and offsets.dim() == 1 and has_padding:
        # With a padding row, torch lets the last bag reach to the end of the ids.
        offsets, include_last_offset = offsets[:-1], False
    as_sparse = sparse and active.rows.dtype.itemsize == 2 and mode != "max" and not scale_grad_by_freq
    return F.embedding_bag(
        active.inverse,
        active.rows,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        sparse=as_sparse,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding if padding >= 0 else None,
    )
