"""``F.embedding`` of active rows, without the cost of fresh memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer import buffers


class _Lookup(torch.autograd.Function):
    """``rows[inverse]``. Fresh pages cost the CPU several times the copy, in forward and in backward: use them again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows, ctx.padding = rows.shape[0], padding
        out = buffers.empty((inverse.numel(), rows.shape[1]), rows.dtype, rows.device)
        torch.index_select(rows, 0, inverse.reshape(-1), out=out)
        return out.view(*inverse.shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,), grad = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():  # create_graph: a gradient of this gradient may follow
            dense = torch.ops.aten.embedding_dense_backward(grad, inverse, ctx.num_rows, ctx.padding, False)
            return dense, None, None
        total = buffers.empty((ctx.num_rows, grad.shape[-1]), grad.dtype, grad.device).zero_()
        total.index_add_(0, inverse.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        if ctx.padding >= 0:
            total[ctx.padding] = 0
        return total, None, None


def lookup(rows: Tensor, inverse: Tensor, padding: int = -1, scale_grad_by_freq: bool = False) -> Tensor:
    """Return ``rows[inverse]``, ``(*inverse.shape, dim)``.

    Parameters
    ----------
    rows : Tensor
        ``(n, dim)``.
    inverse : Tensor
        int64, any shape, every value in ``[0, n)``.
    padding : int
        Row whose gradient is zero; -1: none.
    scale_grad_by_freq : bool
        Divide the gradient of a row by the number of times that it occurs in `inverse`.
    """
    if rows.device.type == "cpu" and not scale_grad_by_freq and rows.dtype in (torch.float32, torch.float64):
        return _Lookup.apply(rows, inverse, padding)  # type: ignore[no-any-return]
    return F.embedding(inverse, rows, padding if padding >= 0 else None, scale_grad_by_freq=scale_grad_by_freq)
