"""The weight of one feature of a `MultiEmbedding`: some rows of a table, which read and write as a weight of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from speedtransfer.eager import uncompiled, unseen
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.weight import TableWeight
from speedtransfer.optim import Handle
from speedtransfer.optim.assignment import check_of_no_other
from speedtransfer.optim.graph import KEY, listen
from speedtransfer.optim.handle import all_handles
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.row_parts import place_of, slice_of
from speedtransfer.optim.views import detach_from, outside_of_transforms
from speedtransfer.optim.whole_gradient import rows_of
from speedtransfer.rows import Rows
from speedtransfer.tables import NOTHING, Table


class FeatureWeight(TableWeight):
    """The weight of a feature, which is made anew for each use."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name) and not name.startswith("_"):
            raise InvalidTypeError(
                f"the weight of a feature is given {name!r}, but is made anew for each use, so that this would be lost; mark "
                "the weight of the MultiEmbedding, or know the feature by its name"
            )
        super().__setattr__(name, value)


class FeatureView:
    """What a weight asks a :class:`Handle`, for the rows from `start` to `stop` of the weight that is the handle's.

    Optimizers cannot step with it: anything else that they ask a handle for raises.

    Parameters
    ----------
    of : Handle
    start, stop : int
    number : int
        Of the feature.
    name : str
    """

    is_part = True

    def __init__(self, of: Handle, start: int, stop: int, number: int, name: str) -> None:
        self.of, self.start, self.stop, self.number, self.name = of, start, stop, number, name
        self.param_ref: Callable[[], nn.Parameter | None] = lambda: None

    @uncompiled
    def weight(self, of: nn.Parameter | None = None) -> nn.Parameter:
        """Make a weight that reads and writes the rows, of a new parameter or `of` one, whose values the table has."""
        with unseen(), torch.inference_mode(False):
            made = nn.Parameter(self.placeholder(), requires_grad=self.requires_grad) if of is None else of
            if of is not None:
                of.data = self.placeholder()
        made.__dict__[KEY], self.param_ref = self, weakref.ref(made)
        listen(made)
        made.__class__ = FeatureWeight
        return made

    def __str__(self) -> str:
        return f"{self.path}.weight"

    @property
    def path(self) -> str:
        """The name of the feature in the model, where known."""
        return str(self.of).removesuffix("weight") + self.name

    @property
    def rows(self) -> Rows:
        """The rows of all features, for their dtype."""
        return self.of.rows

    @property
    def table(self) -> Table:
        """The table with the rows of all features."""
        return self.of.table

    @property
    def num_rows(self) -> int:
        """The number of rows of the feature."""
        return self.stop - self.start

    @property
    def aliased(self) -> bool:
        """Whether a tensor on the compute device can alias the rows."""
        return self.of.aliased

    @property
    def requires_grad(self) -> bool:
        """Whether the rows of all features are trained."""
        return self.of.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad != self.of.requires_grad:
            raise InvalidValueError(
                f"{self} is part of the parameter {self.of}, which is frozen and trained as a whole; leave this feature "
                "out of the MultiEmbedding, or use requires_grad_ of all"
            )

    def placeholder(self) -> Tensor:
        """Return what stands for the rows in the parameter, as `Handle.placeholder`."""
        return self.of.placeholder()[self.start : self.stop]

    def whole(self, ids: Tensor | None = None) -> Tensor:
        """Return the rows, caught up, ``(n, dim)`` on the compute device, as `Handle.whole` of all features."""
        handle = self.of
        if ids is not None and self.aliased:
            return handle.whole(ids + self.start)[self.start : self.stop]
        handle.step.recover()
        handle.check_whole()
        with outside_of_transforms(), torch.inference_mode(False):
            values = handle.rows.whole("weight", self.start, self.stop).detach()
            handle.views.exposed = True
            if self.aliased:
                return self.track_alias(values)
            return torch.empty_like(values, device=handle.table.device, dtype=handle.rows.dtype).copy_(values)

    def shown(self) -> str:
        """Return the rows as text."""
        return repr(self.whole())

    def note_use(self, ids: Tensor, version: int) -> None:
        """Note a use of the rows `ids`, as `Handle.note_use`."""
        self.of.note_use(ids + self.start, version)

    def whole_in_graph(self) -> Tensor:
        """Return the rows as what a graph made of the weight of all features; backward deposits their gradient."""
        with torch.inference_mode(False):
            rows = self.whole().detach()
        ids = torch.arange(self.start, self.stop, device=rows.device)
        return self.of.views.join(rows, ids, self._deposit, lambda: 1 << self.number)

    def receive(self, grad: Tensor) -> None:
        """Deposit what has reached the node of the weight of the feature in the graph: the gradient of all its rows."""
        self._deposit(grad, 1 << self.number)

    def _deposit(self, grad: Tensor, features: int | None) -> None:
        ids, rows, _ = rows_of(self.of, grad.detach())
        self.of.pending.deposit(ids + self.start, rows, whole=True, features=features)

    def gradient(self) -> Tensor | None:
        """Return the gradient of the rows, over the memory of that of all; None where nothing came to this feature."""
        whole = self._own_gradient()
        if whole is None:
            return None
        features = self.of.features
        assert features is not None
        shown, parts = features.shown.get(self.number), features.parts.get(self.number)
        if parts is None or parts.of is not whole.parts:
            parts = features.parts[self.number] = slice_of(whole.parts, self.start, self.stop)
        if shown is None or shown.parts is not parts or shown.sparse != whole.sparse:
            shown = RowGradient(self.num_rows, parts.ids, parts.rows, self._refuse_dense, whole.sparse)
            shown.parts, features.shown[self.number] = parts, shown
        return shown

    def _own_gradient(self) -> Any:
        """Return the gradient of all rows if this feature has one."""
        if not self.of.owners.has_whole:
            raise InvalidTypeError(
                f"{self} is part of {self.of}, whose rows several processes own, each with their gradient; use the "
                "gradient of the MultiEmbedding"
            )
        whole, features = self.of.gradient(), self.of.features
        if whole is None or features is None or not features.touched >> self.number & 1:
            return None
        return whole.trim()  # type: ignore[attr-defined]

    def _refuse_dense(self, *args: Any) -> None:
        if args[-1] == "zeroed":
            return
        raise InvalidValueError(
            f"the gradient of {self} would become one of all its rows, which may be written to; use a copy "
            f"(weight.grad.to_dense()), or the gradient of {self.of}"
        )

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set the gradient of the rows to None, that of other features stays; raise for another."""
        if grad is not None and grad is not self.gradient():
            raise InvalidTypeError(
                f"{self} is part of one parameter, {self.of}, and is assigned a gradient of its own; change weight.grad "
                "in place, or assign that of the MultiEmbedding"
            )
        whole = self._own_gradient() if grad is None else None
        if whole is not None:
            assert self.of.features is not None
            at, ids, rows = place_of(whole.ids, self.start, self.stop), whole.ids, whole.rows
            others = self.of.features.touched & ~(1 << self.number)
            self.of.step.recover()
            if not others:
                self.of.pending.clear()
                return
            parts = self.of.features.parts.get(self.number)
            if parts is not None:
                # Who has kept it goes on seeing it, as in torch, and that of others what becomes of theirs.
                parts.freeze()
            ids, rows = (torch.cat([part[: at.start], part[at.stop :]]) for part in (ids, rows))
            self.of.pending.set_gradient(ids, rows)
            whole.parts.set(ids, rows, NOTHING)
            self.of.features.touched = others

    def store(self, values: Tensor) -> None:
        """Set the rows to `values`, ``(n, dim)``, and keep the state of the optimizer."""
        self.of.rows.catch_up()
        self.of.table.wait()
        self.of.load(values.detach(), self.start)

    def set_whole(self, values: Tensor) -> None:
        """Set the rows to a copy of `values`, ``(n, dim)``."""
        shape = self.stop - self.start, self.of.table.dim
        if tuple(values.shape) != shape:
            raise InvalidValueError(
                f"{self} is {shape} but the values assigned are {tuple(values.shape)}; make a new MultiEmbedding for another "
                "number of rows"
            )
        self.of.step.recover()
        own = self.of.table.stored("weight")[self.start : self.stop]
        if values.is_meta or values.data_ptr() != own.data_ptr():
            check_of_no_other(values, self, all_handles())
            detach_from(self, self._aliases())
        self.store(values)

    def _aliases(self) -> list[Callable[[], Any]]:
        assert self.of.features is not None
        return self.of.features.aliases.pop(self.number, [])

    def track_alias(self, alias: Tensor) -> Tensor:
        """Remember a tensor that reads and writes the rows, and return it."""
        assert self.of.features is not None
        alive = [reference for reference in self._aliases() if reference() is not None]
        self.of.features.aliases[self.number] = [*alive, weakref.ref(alias)]
        return alias

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidTypeError(
            f"{self} is part of one parameter, {self.of}, and has no gradient and no optimizer of its own; give the "
            "optimizer, or whatever reads gradients, the parameters() of the MultiEmbedding or of the model"
        )

    def new_param(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Make a parameter for these rows."""
        return self.weight()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle | FeatureView:
        """Copy the rows to a table of their own, or, where all rows are copied, too, take theirs of that copy."""
        if id(self.of) in memo:
            return FeatureView(memo[id(self.of)], self.start, self.stop, self.number, self.name)
        memory: Any = "pageable" if self.of.table.device.type == "cpu" else "device"
        values = self.whole().detach().clone()
        made = Table.from_array(values, memory, device=self.of.table.device, copy=False)
        memo[id(self)] = copied = Handle(made, self.requires_grad, self.of.idle)
        copied.sparse = self.of.sparse
        return copied

    def __reduce__(self) -> Any:
        return self.__deepcopy__({}).__reduce__()
