"""Gradients of all rows of a weight: to and from those of some rows, through the hooks of its parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim.merge import Part
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.tables import NOTHING, Known


def of_all_rows(handle: Any, ids: Tensor | None, grad: Tensor, known: Known, num_rows: int) -> Tensor:
    """Return the gradient ``(num_rows, dim)`` that is `grad`, ``(*, n, dim)``, at the rows `ids` (n,); None: at all."""
    grad = handle.id_space.own_gradient(ids, grad)
    if ids is None:
        return grad
    # One that can be differentiated again, or many at once (is_grads_batched).
    if torch.is_grad_enabled() or grad.dim() != 2 or torch._C._functorch.is_legacy_batchedtensor(grad):
        # What pads the rows adds zero to the last one.
        ids = ids.to(grad.device).clamp(max=num_rows - 1)
        return grad.new_zeros(*grad.shape[:-2], num_rows, grad.shape[-1]).index_add(-2, ids, grad)
    return RowGradient(num_rows, ids, grad, sparse=handle.sparse, known=known)


def rows_of(handle: Any, grad: Tensor) -> Part:
    """Return the active rows (n,) of a gradient ``(num_rows, dim)``, their gradient (n, dim), and what is known of them.

    With lazy idle rows those whose gradient is zero are not active.
    """
    if isinstance(grad, RowGradient):
        if grad.elsewhere:
            grad.make_dense()
        return grad.ids, grad.rows, grad.known
    if grad.is_sparse:
        return (*_rows_of_sparse(handle, grad), NOTHING)
    # With exact idle rows a zero gradient and none are the same. After a softmax over all rows, where no row is zero, one
    # column shows that.
    if handle.rows.lag is not None or (grad.shape[1] and bool((grad[:, 0] != 0).all())):
        return torch.arange(len(grad), device=grad.device), grad, NOTHING
    ids = (grad != 0).any(dim=1).nonzero().flatten()
    return ids, grad if len(ids) == len(grad) else grad[ids], NOTHING


def _rows_of_sparse(handle: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    # A copy: torch itself checks indices only where a sparse tensor is made, and not always (check_invariants=False).
    places, shape = grad._indices().clone(), tuple(grad.shape)
    for at, size in zip(places, shape, strict=False):
        if len(at) and not (int(at.min()) >= 0 and int(at.max()) < size):
            raise InvalidValueError(
                f"the gradient of {handle} is a sparse tensor of shape {shape} with indices from {int(at.min())} to "
                f"{int(at.max())}, which are not all in 0 to {size - 1}; make it with check_invariants=True"
            )
    values = grad._values()
    grad = torch.sparse_coo_tensor(places, values, shape, device=values.device, check_invariants=False).coalesce()
    ids, values = grad.indices()[0], grad.values()
    if grad.sparse_dim() == 1:
        return ids, values
    rows, inverse = ids.unique_consecutive(return_inverse=True)
    return rows, values.new_zeros(len(rows), shape[1]).index_put_((inverse, grad.indices()[1]), values)


def hooked(handle: Any, grad: Tensor) -> Tensor:
    """Return the gradient of the whole table, ``(num_rows, dim)``, as the hooks of the parameter change it."""
    param = handle.param_ref()
    hooks = None if param is None else param._backward_hooks
    for hook in list((hooks or {}).values()):
        changed = hook(grad)
        if changed is not None:
            check_gradient(handle, changed)
            grad = changed
    return grad


def check_gradient(handle: Any, grad: Any) -> None:
    """Raise unless `grad` can be the gradient of all rows, ``(num_rows, dim)``: by its shape, dtype and device."""
    shape = (handle.num_rows, handle.table.dim)
    if not isinstance(grad, Tensor) or tuple(grad.shape) != shape:
        what = tuple(grad.shape) if isinstance(grad, Tensor) else f"a {type(grad).__name__}"
        raise InvalidValueError(
            f"the gradient of {handle} is {what} but the table is {shape}; pass a tensor of that shape"
        )
    if grad.dtype != handle.rows.dtype or grad.device != handle.table.device:
        raise InvalidTypeError(
            f"the gradient of {handle} is {grad.dtype} on {grad.device} but its rows are {handle.rows.dtype} on "
            f"{handle.table.device}; pass grad.to({str(handle.table.device)!r}, {handle.rows.dtype})"
        )
