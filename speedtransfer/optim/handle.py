"""What ties a parameter to a table: the active rows with their gradient, and the parameter that holds them during a step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.optim.pending import PendingGradient
from speedtransfer.optim.table_param import as_tensor
from speedtransfer.rows import Rows
from speedtransfer.tables import Table

_KEY = "_speedtransfer_handle"  # in the __dict__ of a parameter
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def find_handle(param: Any) -> Handle | None:
    """Return the handle that `param` belongs to, or None for an ordinary parameter."""
    handle: Handle | None = getattr(param, "__dict__", {}).get(_KEY)
    return handle if handle is not None and handle.param_ref() is param else None


def any_handles() -> bool:
    """Tell whether there is any handle at all (lets the hooks of a process without tables cost nothing)."""
    return len(_handles) > 0


class Handle(PendingGradient):
    """Ties a parameter to a table.

    Outside of a step the parameter stands for the whole table (`kind` says how), and the active rows and their gradient are
    kept here. In the step of an optimizer it is an ordinary ``nn.Parameter``: its data the ``(active, dim)`` rows, its grad
    their gradient. It never enters autograd.

    Parameters
    ----------
    table : Table
    requires_grad : bool
        Whether the rows are trained.
    idle : {"auto", "exact", "lazy"}
        What becomes of rows that a step does not touch.
    rows : Rows, optional
        The way to the rows of `table`; by default they are stored as they are computed with.
    """

    def __init__(self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: Rows | None = None) -> None:
        super().__init__(table, requires_grad, idle, rows)
        _handles.add(self)

    def bind(self, param: nn.Parameter, kind: type[nn.Parameter], parted: bool = False) -> nn.Parameter:
        """Make `param` the parameter of this handle, a `kind` between steps, and return it.

        It stays the object that it is, so optimizers and modules that hold it go on to work; its values must be in the table.
        `parted`: the memory of the table has become another, and the parameter so far keeps the old one.
        """
        old = self.param_ref()
        if old is not None and old is not param:
            old.__dict__.pop(_KEY, None)
            if parted:
                old.__class__ = nn.Parameter  # with the memory that was the table's
        with as_tensor():
            given, param.grad = param.grad, None
            self.requires_grad = param.requires_grad
        self.param_ref, self._kind = weakref.ref(param), kind
        param.__dict__[_KEY] = self
        self.show()
        if given is not None:
            self.assign_gradient(given.to(self.table.device, self.rows.dtype))
        return param

    def new_param(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Make a parameter for this handle."""
        with torch.inference_mode(False):
            return self.bind(nn.Parameter(self.placeholder(), requires_grad=self.requires_grad), kind)

    def whole(self) -> Tensor:
        """Return all rows, up to date, on the compute device: the memory of the table where `aliased`, else a copy."""
        self.recover()
        values = self.rows.whole("weight").detach()
        # Who has the memory may write to it without a trace (NumPy), so that the next step must read its rows again.
        self._exposed = True
        if self.aliased:
            return self.give(values)
        try:
            with torch.inference_mode(False):  # an inference tensor tells of no writes
                moved = values.to(self.table.device, self.rows.dtype)
                return moved.clone() if moved is values else moved
        except torch.OutOfMemoryError as error:
            raise InvalidValueError(
                f"{self} is used as a whole, but its {self.table.num_rows} rows do not fit on {self.table.device}; use the "
                "rows that are needed (emb(ids)), or emb.table.torch(), where the rows live"
            ) from error

    def whole_leaf(self) -> Tensor:
        """Return all rows as a leaf of autograd; backward deposits the gradient of all of them."""
        if self._whole is not None:
            leaf = self._whole[0]()
            if leaf is not None and self._whole[1] == self.table.version:
                return leaf
        with torch.inference_mode(False):
            leaf = self.whole().detach().requires_grad_()
        handle = self

        @uncompiled
        def deposit(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            if handle.requires_grad:  # and not frozen since, where torch drops the gradient too
                handle.deposit_dense(grad)

        leaf.register_post_accumulate_grad_hook(deposit)
        self._whole = weakref.ref(leaf), self.table.version
        self.follow(leaf, None)
        return leaf

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(num_rows, dim)``, and keep the state of the optimizer."""
        self.rows.catch_up()
        self.table.wait()
        self.rows.load("weight", values.detach())

    def take_param(self, param: nn.Parameter, kind: type[nn.Parameter]) -> None:
        """Make an ordinary parameter the weight, with its values. The one so far is an ordinary one again, or of no use."""
        values, grad = param.detach(), self.gradient()
        self.drop_state("another weight was assigned to the module")
        self.clear()
        parted = self._can_take(values) and len(values) == self.table.num_rows and values.dtype == self.rows.dtype
        old = self.param_ref()
        if old is not None and parted:
            self.param_ref = lambda: None  # it keeps its memory
        self.set_whole(values)
        if old is not None:
            self.param_ref = weakref.ref(old)
        self.bind(param, kind, parted)
        if old is not None and parted:
            old.grad = grad  # others may hold and train it

    def set_whole(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(any, dim)``: of another number of rows they make a new table, without state.

        Their device, and where rows are stored as they are computed their dtype, become those of `values`, as in torch.
        """
        table, rows = self.table, self.rows
        if values.dim() != 2 or values.shape[1] != table.dim:
            raise InvalidValueError(
                f"{self} is {(table.num_rows, table.dim)} but the values assigned are {tuple(values.shape)}; pass rows of "
                f"{table.dim} values, or make a new module of that width (from_pretrained)"
            )
        resized, retyped = len(values) != table.num_rows, rows.storage_dtype is None and values.dtype != rows.dtype
        if table.path is not None and (resized or retyped):
            raise InvalidValueError(
                f"{self} is the file {str(table.path)!r} of {table.num_rows} rows of {rows.dtype}, which cannot become "
                f"{tuple(values.shape)} of {values.dtype}; make a new module with another path"
            )
        values = values.detach()
        for other in _handles:
            if other is not self and other.aliased and _shares(values, other.table.stored("weight")):
                raise InvalidValueError(
                    f"{self} is assigned the memory of {other}, another table, and one memory cannot be two tables; write its "
                    "values (weight.data.copy_(other)), or share the weight itself (module.weight = other.weight)"
                )
        if values.device != table.device:
            self.move(values.device)
        if not resized and not retyped and self._can_take(values):
            self.rows.catch_up()
            table.take(
                "weight", values
            )  # as torch: what held the memory so far keeps it, and `values` is the weight now
            self.show()
            return
        self._part_with_given()
        if resized or retyped:
            dtype = values.dtype if rows.storage_dtype is None else rows.storage_dtype
            made = Table(len(values), table.dim, dtype, table.memory, device=table.device)
            reason = f"the table got {len(values)} rows" if resized else f"the table became {values.dtype}"
            self.replace(Rows(made, rows.storage_dtype, rows.state_dtype), reason)
        self.store(values)

    def _can_take(self, values: Tensor) -> bool:
        """Tell whether the memory of `values` can become that of the table."""
        ordinary = values.is_contiguous() and not values.is_inference() and type(values) is Tensor
        own = self.table.memory == "pageable" and values.device.type == "cpu"
        own = own or (self.table.memory == "device" and values.device == self.table.device)
        return self.aliased and ordinary and own

    def _part_with_given(self) -> None:
        """Let tensors over the table keep the values that they have: others are about to be written there."""
        alive = [tensor for tensor in (reference() for reference in self._given) if tensor is not None]
        if alive:
            kept = self.whole().clone()
            for tensor in alive:
                if type(tensor) is Tensor:
                    tensor.data = kept
                else:
                    tensor.detach_from_table(kept)  # type: ignore[attr-defined]
        self._given = []

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the table to `dtype`. The state of its rows goes: an optimizer does not follow such a change either."""
        self.drop_state(f"the table became {dtype}")
        self.rows = self.rows.astype(dtype)
        self.clear()
        self.show()

    def move(self, device: torch.device) -> None:
        """Make `device` the compute device."""
        # Planes of state on the device move along, and the optimizer's views of them do not.
        if self.table.memory == "device" and len(self.table.planes) > len(self.rows.parts("weight")):
            self.drop_state(f"the table moved to {device}")
        self.table.to(device)
        if self.ids is not None and self.grad is not None:
            self.ids, self.grad = self.ids.to(self.table.device), self.grad.to(self.table.device)
            self.active, self.state_rows, self._grad_version = None, {}, self.grad._version
        self.show()

    def replace(self, rows: Rows, reason: str) -> None:
        """Let the rows be those of another table. The state of the rows goes, and the gradient."""
        self.drop_state(reason)
        self.rows = rows
        self.clear()
        self.show()

    def drop_state(self, reason: str) -> None:
        """Remove the state of the rows and remember, for the optimizer that had it, why."""
        if self.state is not None:
            self.rows.catch_up()
            self.state_rows = {}
            owner = self.state.optimizer()
            if owner is not None:
                self.lost[owner] = reason
            self.state.drop()
            self.state = None

    def check_not_lost(self, optimizer: Any) -> None:
        """Raise where `optimizer` had state of these rows that is gone."""
        if optimizer in self.lost:
            raise OptimizerError(
                f"this {type(optimizer).__name__} trained the table of {self} before and its row state is gone: "
                f"{self.lost[optimizer]}; train a table with one optimizer at a time, or make a new one"
            )

    def __reduce__(self) -> Any:
        """Pickle the rows, without their state, which is the optimizer's, and without a gradient, as torch does."""
        memory = "device" if self.table.memory == "device" else "auto"  # a file stays where it is, pinned may not exist
        arguments = (
            self.table.torch(),
            memory,
            str(self.table.device),
            self.requires_grad,
            self.idle,
            self.rows.pickled(),
        )
        return _unpickle, arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        # Without the planes of state: a copy of the optimizer, if there is one, brings its own.
        self.rows.catch_up()
        rows = self.rows.copy()
        duplicate = Handle(rows.table, self.requires_grad, self.idle, rows)
        duplicate.name = self.name
        memo[id(self)] = duplicate
        return duplicate


def _shares(values: Tensor, plane: Tensor) -> bool:
    """Tell whether two dense tensors are over the same memory: not of one storage alone, which a vector of all rows is."""
    if values.device != plane.device or not values.is_contiguous() or values.is_meta:
        return False
    ends = (tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in (values, plane))
    return all(start < end for start, end in zip((plane.data_ptr(), values.data_ptr()), ends, strict=True))


def _unpickle(
    weight: Tensor, memory: str, device: str, param: nn.Parameter | bool, idle: str, rows: dict[str, Any]
) -> Handle:
    table = Table.from_array(weight, memory, device=device, copy=False)
    trained = param if isinstance(param, bool) else param.requires_grad
    return Handle(table, trained, idle, Rows.unpickled(table, rows))
