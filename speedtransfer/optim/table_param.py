"""The parameter of a table between steps: it stands for the whole table, and never enters autograd itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.state import RowState
from speedtransfer.rows import Rows
from speedtransfer.tables import Table

# Within, the parameter of a table is the tensor that torch sees, and not the whole table.
as_tensor = torch._C.DisableTorchFunctionSubclass


class TableParam:
    """The part of a :class:`Handle` that ties a parameter to a table; its own parameters are those of that class."""

    def __init__(self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: Rows | None = None) -> None:
        self.rows = Rows(table) if rows is None else rows
        self.idle = idle
        self.requires_grad = requires_grad and self.rows.dtype.is_floating_point
        self.name: str | None = None  # of the module, where it is known
        self.sparse = False  # the module was made with sparse=True: optimizers that tell may get sparse gradients
        self.padding_idx: int | None = None  # that of the module: a row which sparse gradients never name
        self.state: RowState | None = None  # that of the optimizer that trains the rows
        # Optimizers whose state of these rows is gone, and why.
        self.lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.ids: Tensor | None = None  # active rows, sorted; None: there is no gradient
        self.grad: Tensor | None = None  # theirs, (active, dim)
        self.active: Tensor | None = None  # the rows themselves, as they were when the table's version was `_version`
        # State of the active rows, by plane, where reading the weights took it along.
        self.state_rows: dict[str, Tensor] = {}
        self._waiting_since: int | None = (
            None  # number of steps made when the first gradient came that no step has taken
        )
        self._warned = False
        self._exposed = False  # somebody has had the memory of the table since the last step
        self._entered = 0  # version of the parameter when a step began
        self.in_place = False  # `active` is the memory of the table
        self._version = -1
        self._grad_version = 0  # of `grad` as this class left it
        self.used_whole = False  # some of the gradient comes from a use of all rows
        self._touched: Tensor | None = None  # the active rows before somebody made the gradient dense
        self._shown: weakref.ref[RowGradient] | None = None
        self._assigned: Tensor | None = None  # the gradient, where others gave the memory to accumulate it in
        self._cleared: tuple[bool, bool, Tensor | None] | None = None  # what `clear` has forgotten beside the gradient
        self._reused = False  # the gradient was set to zero: what `_shown` is will be the next one
        # Leaves of autograd that deposit here, with the rows they hold (None: all), while they live.
        self._leaves: list[tuple[weakref.ref[Tensor], Tensor | None]] = []
        self._given: list[weakref.ref[Tensor]] = []  # tensors over the table that others may hold, and write to
        self._whole: tuple[weakref.ref[Tensor], int] | None = None  # the leaf over the whole table, and its version
        # What a backward has deposited so far, by its number, where hooks wait for all of it: ids, gradient.
        self._arriving: dict[int, tuple[Tensor, Tensor]] = {}
        # Not the parameter itself, which holds this object: a cycle would keep the table until the next gc.
        self.param_ref: Callable[[], nn.Parameter | None] = lambda: None
        self._placeholder: Tensor | None = None  # what the parameter holds between steps
        self._kind: type[nn.Parameter] = nn.Parameter

    @property
    def table(self) -> Table:
        """The table with all the rows."""
        return self.rows.table

    def __str__(self) -> str:
        return "weight" if self.name is None else f"{self.name}.weight" if self.name else "weight"

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        param = self.param_ref()
        assert param is not None
        return param

    @property
    def aliased(self) -> bool:
        """Whether a tensor on the compute device can be over the memory of the table."""
        return self.rows.plain and (self.table.memory == "device" or self.table.device.type == "cpu")

    def placeholder(self) -> Tensor:
        """Return what the parameter holds between steps: the memory of the table, or one number in the shape of the table.

        That is NaN: what comes to read it, past every function that is given the whole table, does not go unnoticed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # an inference tensor could never hold a gradient
                return self.placeholder()
        if self.aliased:
            return self.table.stored("weight").detach()
        dtype = self.rows.dtype
        one = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.table.device)
        return one.expand(self.table.num_rows, self.table.dim)

    def show(self) -> None:
        """Let the parameter stand for the whole table."""
        param = self.param_ref()
        if param is not None:
            param.__class__ = nn.Parameter
            param.grad = None
            param.data = self._placeholder = self.placeholder()
            param.requires_grad_(self.requires_grad)
            param.__class__ = self._kind

    def looks_up_directly(self) -> bool:
        """Tell whether a lookup without gradients may read the table, a row for each id, also where several are the same.

        Across a bus one row for all that share it is faster.
        """
        return (self.table.device.type == "cpu" or self.table.memory == "device") and not self.rows.lags

    def give(self, alias: Tensor) -> Tensor:
        """Remember a tensor that reads and writes as the table, and return it."""
        if len(self._given) > 16:
            self._given = [reference for reference in self._given if reference() is not None]
        self._given.append(weakref.ref(alias))
        return alias

    def follow(self, leaf: Tensor, ids: Tensor | None) -> None:
        """Remember a leaf of autograd that deposits the gradient of the rows `ids` (None: all) here."""
        if len(self._leaves) > 16:
            self._leaves = [entry for entry in self._leaves if entry[0]() is not None]
        self._leaves.append((weakref.ref(leaf), ids))

    def leaves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves of autograd that a graph may still lead to, with their rows."""
        found = [(reference(), ids) for reference, ids in self._leaves]
        return [(leaf, ids) for leaf, ids in found if leaf is not None]

    def _mark_stepped(self) -> None:
        """Tell autograd that a step wrote to rows that a graph may have saved: backward then raises, as in torch."""
        for leaf, _ in self.leaves():
            torch.autograd.graph.increment_version(leaf)
        self._leaves.clear()
