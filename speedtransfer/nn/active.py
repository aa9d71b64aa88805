"""The unique rows that a batch touches, as a dense tensor; backward deposits its gradient for the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim import Handle
from speedtransfer.tables import UniqueRows, as_index, unique_rows


class ActiveRows:
    """The unique rows of some ids. With `training` backward deposits the gradient of `rows`.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, sorted.
    inverse : Tensor
        Position in `ids` of each of the original ids, in their shape.
    rows : Tensor
        ``(n, dim)`` on the compute device. With gradients a leaf of autograd: its gradient is deposited for the optimizer. The
        next step updates this memory in place.
    """

    __slots__ = ("_groups", "_handle", "_state_rows", "_version", "ids", "inverse", "rows")

    def __init__(
        self, handle: Handle, groups: UniqueRows, shape: tuple[int, ...], rows: dict[str, Tensor], training: bool
    ) -> None:
        self.ids, self.inverse, self.rows = groups.ids, groups.inverse.view(shape), rows.pop("weight")
        # `_groups` has the positions of the original ids grouped by row, and the position of the padding row.
        self._groups, self._handle, self._version, self._state_rows = groups, handle, handle.rows.table.version, rows
        if training:
            # A partial of self would be a cycle that keeps the rows alive.
            deposit = functools.partial(_deposit, handle, self.ids, self._version, rows)
            self.rows.requires_grad_()
            self.rows.register_post_accumulate_grad_hook(deposit)
            handle.track_leaf(self.rows, self.ids)

    def add_grad(self, grad: Tensor) -> None:
        """Deposit a gradient written by hand for ``optimizer.step()``, without autograd.

        Parameters
        ----------
        grad : Tensor
            ``(n, dim)``, dtype and device of `rows`; added to the gradient deposited since the last step. The step may use
            its memory.
        """
        if grad.shape != self.rows.shape:
            raise InvalidValueError(
                f"grad has shape {tuple(grad.shape)} but there are {tuple(self.rows.shape)} active rows; "
                "sum the gradient per unique row (index_add_ by .inverse)"
            )
        if grad.dtype != self.rows.dtype or grad.device != self.rows.device:
            raise InvalidTypeError(
                f"grad is {grad.dtype} on {grad.device} but the rows are {self.rows.dtype} on {self.rows.device}; "
                "pass grad.to(active.rows)"
            )
        with torch.no_grad():
            self._handle.deposit(self.ids, grad, self.rows.detach(), self._version, self._state_rows)


@uncompiled
def _deposit(handle: Handle, ids: Tensor, version: int, state_rows: dict[str, Tensor], leaf: Tensor) -> None:
    """Deposit the gradient of a leaf, ``(n, dim)``, for the rows `ids`."""
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    # Frozen since the forward pass: torch drops the gradient too.
    if handle.requires_grad:
        grad = grad.to_dense() if grad.is_sparse else grad
        handle.deposit(ids, grad, leaf.detach(), version, state_rows)


def activate(
    handle: Handle,
    ids: Any,
    training: bool,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    padding_idx: int | None = None,
) -> ActiveRows:
    """Read the unique rows of `ids`, which may be `UniqueRows` on the CPU already.

    Rows longer than `max_norm` are rescaled first, in the table too. With `training` they are a leaf of autograd.
    """
    if handle.state is not None and handle.state.running:
        handle.recover()
    table = handle.rows.table
    num_rows, device = table.num_rows, table.device
    if isinstance(ids, UniqueRows):
        groups, shape = ids, tuple(ids.inverse.shape)
        # Raises if an id is out of range.
        as_index(groups.ids, num_rows, device)
    else:
        flat, shape, _ = as_index(ids, num_rows, device, check=False)
        groups = unique_rows(flat, num_rows, ids, padding_idx)
    # The staged engine takes its ids on the host.
    if groups.ids.device != device and table.engine != "staged":
        groups = groups.to(device)
    # Rescaled rows are written back.
    if max_norm is not None:
        handle.rows.catch_up(groups.ids)
    rows = handle.rows.read(groups.ids)
    if groups.ids.device != device:
        groups = groups.to(device)
    if max_norm is not None and len(groups.ids):
        weight = rows["weight"]
        before = weight.clone()
        torch.embedding_renorm_(weight, torch.arange(len(weight), device=weight.device), max_norm, norm_type)
        changed = (weight != before).any(dim=1).nonzero().flatten()
        if len(changed):
            handle.rows.write(groups.ids[changed], {"weight": weight[changed]})
    return ActiveRows(handle, groups, shape, rows, training)
