"""Bind a parameter to a table, and change the table under it: its dtype, its device, its rows."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.graph import KEY, as_tensor
from speedtransfer.optim.pending import PendingGradient
from speedtransfer.rows import Rows


class Binding(PendingGradient):
    """The part of a :class:`Handle` that binds a parameter, and follows changes of the table."""

    def bind(self, param: nn.Parameter, kind: type[nn.Parameter], release: bool = False) -> nn.Parameter:
        """Make `param`, whose values the table has, the parameter of this handle, of class `kind` between steps; return it.

        It stays the same object, for optimizers and modules that hold it. `release`: the parameter so far becomes an ordinary
        one, with the memory that was that of the table.
        """
        old = self.param_ref()
        if old is not None and old is not param:
            old.__dict__.pop(KEY, None)
            if release:
                old.__class__ = nn.Parameter
        with as_tensor():
            given, param.grad = param.grad, None
            self.requires_grad = param.requires_grad
        self.param_ref, self._kind = weakref.ref(param), kind
        param.__dict__[KEY] = self
        self.reset_param()
        if given is not None:
            self.assign_gradient(given.to(self.table.device, self.rows.dtype))
        return param

    def new_param(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Make a parameter for this handle."""
        with torch.inference_mode(False):
            return self.bind(nn.Parameter(self.placeholder(), requires_grad=self.requires_grad), kind)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the table to `dtype`, and drop the state of its rows."""
        self.id_space.check_dtype(dtype)
        self.drop_state(f"the table became {dtype}")
        self.rows = self.rows.astype(dtype)
        self.clear()
        self.reset_param()
        self.owners.share_rows()
        self.id_space.rows_replaced()

    def move(self, device: torch.device) -> None:
        """Make `device` the compute device."""
        # Planes of state on the device would move, but not the optimizer's views of them.
        if self.table.memory == "device" and len(self.table.planes) > len(self.rows.part_specs("weight")):
            self.drop_state(f"the table moved to {device}")
        if device != self.table.device:
            # Padding is known only where the ids are.
            self.trim()
        self.table.to(device)
        if self.ids is not None and self.grad is not None:
            self._set_gradient(self.ids.to(self.table.device), self.grad.to(self.table.device))
        self.reset_param()

    def replace(self, rows: Rows, reason: str) -> None:
        """Use the rows of another table; drop the state of the rows, and the gradient."""
        self.drop_state(reason)
        self.rows = rows
        self.clear()
        self.reset_param()

    def drop_state(self, reason: str) -> None:
        """Remove the state of the rows, and keep the reason for the optimizer that had it."""
        self.id_space.forget_state()
        if self.state is not None:
            self.rows.catch_up()
            self.state_rows = {}
            owner = self.state.optimizer()
            if owner is not None:
                self.lost[owner] = reason
            self.state.drop()
            self.state = None

    def check_not_lost(self, optimizer: Any) -> None:
        """Raise if `optimizer` had state of these rows that was dropped."""
        if optimizer in self.lost:
            raise OptimizerError(
                f"this {type(optimizer).__name__} trained the table of {self} before and its row state is gone: "
                f"{self.lost[optimizer]}; train a table with one optimizer at a time, or make a new one"
            )
