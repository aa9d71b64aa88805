"""The rows a batch touches: unique, dense and small, with the way back for their gradient."""

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
    """The unique rows named by some ids; `training`: backward deposits the gradient of `rows`.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, sorted.
    inverse : Tensor
        Where each of the original ids is in `ids`; the shape of the original.
    rows : Tensor
        ``(n, dim)`` on the compute device. A leaf of autograd where gradients are wanted: what backward leaves there is
        deposited for the optimizer. The next step updates this memory in place.
    """

    __slots__ = ("_groups", "_handle", "_state_rows", "_version", "ids", "inverse", "rows")

    def __init__(
        self, handle: Handle, groups: UniqueRows, shape: tuple[int, ...], rows: dict[str, Tensor], training: bool
    ) -> None:
        # `_groups`: the positions of the original ids grouped by row, and where the padding row is.
        self.ids, self.inverse, self._groups, self.rows = (
            groups.ids,
            groups.inverse.view(shape),
            groups,
            rows.pop("weight"),
        )
        self._handle, self._version, self._state_rows = handle, handle.rows.table.version, rows
        if training:
            # Not self: the cycle would keep the rows alive.
            deposit = functools.partial(_deposit, handle, self.ids, self._version, rows)
            self.rows.requires_grad_()
            self.rows.register_post_accumulate_grad_hook(deposit)
            handle.follow(self.rows, self.ids)

    def add_grad(self, grad: Tensor) -> None:
        """Deposit a gradient written by hand for ``optimizer.step()``, without autograd.

        Parameters
        ----------
        grad : Tensor
            ``(n, dim)``, dtype and device of `rows`; added to what was deposited since the last step. The step may use its
            memory.
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
    """Deposit the gradient that backward has left at a leaf of active rows."""
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    if handle.requires_grad:  # and not frozen since, where torch drops the gradient too
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
    """Gather the unique rows of `ids`, which may be `UniqueRows` of the host already.

    Rows longer than `max_norm` are shortened first, in the table too. `training`: they will want gradients.
    """
    if handle.state is not None and handle.state.in_step:
        handle.recover()
    table = handle.rows.table
    with torch.no_grad():
        if isinstance(ids, UniqueRows):
            groups, shape = ids, tuple(ids.inverse.shape)
            as_index(groups.ids, table.num_rows, table.device)  # may refuse
        else:
            flat, shape, _ = as_index(ids, table.num_rows, table.device, check=False)
            groups = unique_rows(flat, table.num_rows, ids, padding_idx)
        if groups.ids.device != table.device and table.engine != "staged":  # which wants the ids on the host
            groups = groups.to(table.device)
        if max_norm is not None:
            handle.rows.catch_up(groups.ids)  # shortened rows are written back
        rows = handle.rows.read(groups.ids)
        if groups.ids.device != table.device:
            groups = groups.to(table.device)
        if max_norm is not None and len(groups.ids):
            weight = rows["weight"]
            before = weight.clone()
            torch.embedding_renorm_(weight, torch.arange(len(weight), device=weight.device), max_norm, norm_type)
            changed = (weight != before).any(dim=1).nonzero().flatten()
            if len(changed):
                handle.rows.write(groups.ids[changed], {"weight": weight[changed]})
    return ActiveRows(handle, groups, shape, rows, training)
