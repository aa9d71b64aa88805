"""Tie a parameter to the rows of a table. The way of a row, from forward to step and back:

forward
    `nn.active.activate` finds the unique ids of a batch. `Rows.read` gathers their rows (`fetch`), decodes them and applies
    the steps that they have missed (`finish`). They become `ActiveRows.rows`, in the graph of autograd, which
    `nn.lookup.lookup` indexes.
backward
    The node between them and the parameter, `graph.TableRows`, calls `PendingGradient.deposit`, which adds their gradient to
    the pending one. Where hooks look at the parameter, they get it first, and `graph.receive` deposits.
step
    Before it `hooks._load` probes an optimizer that is new to the table (`give_state` adds planes for its state) and calls
    `Step.begin`: `PendingGradient.refresh` reads the active rows again if the table has changed, `RowState.load` puts their
    state into `optimizer.state`, and `_enter` makes the parameter an ordinary one that holds active rows and gradient.
    The optimizer updates them. After it `hooks._after_step` calls `Step.end`: `RowState.store` writes rows and state
    (`Rows.write`: encode, scatter, record the step for idle rows), and `_leave` makes the parameter a placeholder again.
    Where `fused_step.plan_step` says so, one kernel reads, updates and writes the state instead.
    A step that raises ends in `Step.abort`, or in `recover` when the table is used next; neither writes to the table.
zero_grad
    ``weight.grad = None`` calls `PendingGradient.assign_gradient`, which calls `clear`.

What differs between tables a handle asks of two objects. `owners` say who has which rows: this process alone
(`owners.Owners`), or several, each some (`sharded.Sharded`), all in one memory (`shared.SharedOwners`), or each a copy
(`replicas.Replicas`). `id_space` says what an id means: the number of a row (`id_space.IdSpace`), or something that gets a row
when it comes (`vocabulary_ids.VocabularyIds`).

A handle has three parts: `pending`, the gradient from backward to step; `step`, which lends the parameter to an optimizer;
`views`, what graphs and callers have of the weight beside lookups.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speedtransfer.cuda import check_not_capturing, is_capturing
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.interrupts import to_its_end
from speedtransfer.optim.anchor import Anchor
from speedtransfer.optim.assignment import assign_rows
from speedtransfer.optim.features import Features
from speedtransfer.optim.graph import KEY, as_tensor, listen
from speedtransfer.optim.id_space import IdSpace
from speedtransfer.optim.owners import Owners
from speedtransfer.optim.pending import PendingGradient
from speedtransfer.optim.state import RowState
from speedtransfer.optim.stepping import Step
from speedtransfer.optim.views import Views
from speedtransfer.rows import Rows
from speedtransfer.tables import Table, padded_anew

# What crosses a bus in five microseconds, less than the time of a launch.
_FEW_BYTES = 1 << 18

_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def find_handle(param: Any) -> Handle | None:
    """Return the handle of `param`, or None for an ordinary parameter."""
    handle: Handle | None = getattr(param, "__dict__", {}).get(KEY)
    return handle if handle is not None and handle.param_ref() is param else None


def handles_over(table: Table) -> list[Handle]:
    """Return the handles whose rows are those of `table`."""
    return [handle for handle in _handles if handle.rows.table is table]


def all_handles() -> list[Handle]:
    """Return all handles that there are."""
    return list(_handles)


def any_handles() -> bool:
    """Tell whether there is any handle: without one the hooks do nothing."""
    return len(_handles) > 0


class Handle:
    """Tie a parameter to a table.

    Between steps the parameter is a placeholder for the whole table, of a class that reads and writes the table
    (`nn.weight.TableWeight`); the active rows and their gradient are kept here. In the step of an optimizer it is an ordinary
    ``nn.Parameter``: its data the active rows, ``(n, dim)``, its grad their gradient. It never enters autograd.

    Parameters
    ----------
    table : Table
    requires_grad : bool
        Whether the rows are trained.
    idle : {"auto", "exact", "lazy"}
        What happens to rows that a step does not touch.
    rows : Rows, optional
        Reads and writes the rows of `table`; by default without a codec.
    """

    def __init__(self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: Rows | None = None) -> None:
        self.rows = Rows(table) if rows is None else rows
        self.idle = idle
        self.requires_grad = requires_grad and self.rows.dtype.is_floating_point

        # Of the module: its name, where known; `sparse`, with which optimizers may get sparse gradients; whether lookups
        # shorten rows; the row that sparse gradients leave out.
        self.name: str | None = None
        self.sparse = self.renormalizes = False
        self.padding_idx: int | None = None
        # Whether the table has more rows than once, which padded ids from before may name.
        self.has_grown = False
        # Whether rows have ever been read ahead.
        self.reads_ahead = False
        # Whether it is a copy of that of another process, on the same device.
        self.is_sent = False
        # Those that share this table, each of which a step may leave out.
        self.features: Features | None = None
        # Who has which rows, and what ids mean.
        self.owners = Owners(self)
        self.id_space = IdSpace()

        # The parameter; not a strong reference, as it holds this object: a cycle would keep the table until the next gc.
        self.param_ref: Callable[[], nn.Parameter | None] = lambda: None
        # Its class and data between steps.
        self.kind: type[nn.Parameter] = nn.Parameter
        self.shown_as: Tensor | None = None
        # What compiled graphs hold of this table.
        self.anchor = Anchor(self)

        # The state of the optimizer that trains the rows; other optimizers whose state of them was dropped, and why.
        self.state: RowState | None = None
        self.lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

        self.pending = PendingGradient(self)
        self.step = Step(self, self.pending)
        self.views = Views(self)
        _handles.add(self)

    @property
    def table(self) -> Table:
        """The table with all the rows; of several processes that own rows, with those of this process."""
        return self.rows.table

    @property
    def late_hooks(self) -> bool:
        """Whether hooks of the parameter get its gradient at the end of backward, and not at its node in the graph."""
        return not self.owners.is_alone or self.id_space.come_and_go

    @property
    def num_rows(self) -> int:
        """The number of rows of the weight."""
        partition = self.owners.partition
        return self.rows.table.num_rows if partition is None else partition.num_rows

    @property
    def is_whole(self) -> bool:
        """Whether this process has all rows, each of which belongs to one id for good."""
        return self.owners.has_whole and not self.id_space.come_and_go

    @property
    def num_saved(self) -> int:
        """The number of rows that a checkpoint has."""
        partition = self.owners.partition
        return self.num_rows if partition is None else partition.num_saved

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
        """Whether a tensor on the compute device can alias the memory of the table, which then has every row."""
        if not self.is_whole:
            return False
        table = self.table
        near = table.memory == "device" or table.device.type == "cpu"
        apart = table.cache_rows is None and table.max_rows is None and not table.in_parts and not table.in_records
        return near and apart and self.rows.plain

    def has_hooks(self) -> bool:
        """Tell whether the parameter has hooks for its gradient."""
        param = self.param_ref()
        if param is None:
            return False
        with as_tensor():
            # One of the latter is `receive`.
            return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1

    def placeholder(self) -> Tensor:
        """Return the data of the parameter between steps, ``(num_rows, dim)``: the memory of the table, or NaN expanded.

        Code that bypasses __torch_function__ and reads it gets NaN, and no wrong numbers.
        """
        # An inference tensor could never hold a gradient.
        with torch.inference_mode(False):
            if self.aliased:
                return self.table.stored("weight").detach()
            dtype = self.rows.dtype
            one = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.table.device)
            return one.expand(self.num_rows, self.table.dim)

    def reset_param(self) -> None:
        """Make the parameter a placeholder for the whole table."""
        param, leaf = self.param_ref(), self.anchor.leaf
        if (leaf.dtype, leaf.device) != (self.rows.dtype, self.table.device):
            self.anchor.follow(self.rows.dtype, self.table.device)
        # Weak, as this object holds the table.
        self.table._handle = weakref.ref(self)
        if param is not None:
            # Else it would be an ordinary parameter, of NaN.
            to_its_end(lambda: self._set_placeholder(param))

    def _set_placeholder(self, param: nn.Parameter) -> None:
        param.__class__ = nn.Parameter
        param.grad = None
        self.shown_as = self.placeholder()
        if param.shape != self.shown_as.shape:
            # Another dtype for a moment gives it a new node in the graph: the old one expects gradients of the old shape.
            other = torch.float16 if param.dtype != torch.float16 else torch.float32
            param.data = param.new_empty(0, dtype=other)
        param.data = self.shown_as
        param.requires_grad_(self.requires_grad)
        listen(param)
        param.__class__ = self.kind

    def check_capturable(self, writes: bool) -> None:
        """Raise unless rows of this table can be read in a CUDA graph that is being captured, and written if `writes`."""
        table, rows = self.table, self.rows
        if table.cache_rows is not None:
            check_not_capturing(f"{self}, whose table has a cache,", "make it without cache_rows")
        if not table.takes_padding:
            memory = (
                "memory='pinned' or 'device'" if table.memory not in ("pinned", "device") else "table.engine = 'mapped'"
            )
            check_not_capturing(f"{self}, whose rows the host moves (memory={table.memory!r}),", f"use {memory}")
        if rows.lag is not None:
            check_not_capturing(
                f"{self} with idle={self.idle!r}, where the host records steps for idle rows,", "use idle='lazy'"
            )
        if writes and rows.rounds:
            check_not_capturing(
                f"training {self} with storage_dtype or state_dtype",
                "leave those out, or train without a graph",
                "as a replay would round with the same random numbers again",
            )

    def looks_up_directly(self, ids: Any) -> bool:
        """Tell whether a lookup without gradients should read a row for each of `ids`.

        Across a bus reading each of the unique rows once is faster, unless they are few: to find them takes several kernels.
        """
        table = self.rows.table
        if self.rows.lag or not self.owners.has_whole:
            return False
        if table.device.type == "cpu" or table.memory == "device":
            return True
        if not isinstance(ids, Tensor) or table.cache_rows is not None:
            return False
        few = ids.numel() * table.dim * table.dtype.itemsize <= _FEW_BYTES
        return few and (not is_capturing() or (ids.is_cuda and table.takes_padding))

    def named_rows(self, ids: Tensor) -> Tensor:
        """Return the numbers of rows of the table here, (n,), in the table of all processes."""
        return ids if self.rows.name_rows is None else self.rows.name_rows(ids)

    def check_whole(self) -> None:
        """Raise unless this process may read all rows of the weight by itself."""
        self.owners.check_whole(
            "is used as a whole",
            "look up the rows needed (emb(ids)), set rows by emb.table.scatter, get all by st.full_state_dict(model), "
            "leave it out of fully_shard: ignored_params=st.table_parameters(model)",
        )

    def check_equal(self, values: Tensor) -> None:
        """Raise unless the rows, which are only read, are `values`, ``(num_rows, dim)``: what is loaded there."""
        differs = self.rows.first_difference("weight", lambda rows: values[rows])
        if differs is not None:
            raise InvalidValueError(
                f"{self} is read in place and cannot be loaded, and row {differs} of what is to be loaded is another one; "
                "leave its key out (strict=False), or copy the table (from_pretrained(table, memory='pageable'))"
            )

    def normal_(self, start: int = 0, stop: int | None = None) -> None:
        """Draw the weights of the rows from `start` to `stop` from N(0, 1): the numbers of ``torch.nn`` with the same seed.

        Rows of ids that have initial values get these.
        """
        if self.id_space.reset_rows():
            return
        self.table.check_writable()
        self.owners.normal_(start, stop)

    def load(self, values: Tensor, start: int = 0) -> None:
        """Set rows, from `start` on, to `values`, ``(n, dim)``, rounded to nearest; each process keeps its own."""
        self.id_space.check_written("written as a whole")
        self.owners.load(values, start)

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(num_rows, dim)``, and keep the state of the optimizer; each process keeps its own."""
        self.id_space.check_written("written as a whole")
        self.owners.store(values)

    def shown(self) -> str:
        """Return all rows as text, or what there is of them here."""
        return self.owners.shown()

    # --- what a weight asks, of this or of a view of some of the rows (`nn.feature_view`) ----------------------------------

    # Whether the weight is a part of that of another handle, from row `start` on, and the number of its feature.
    is_part: ClassVar[bool] = False
    start: ClassVar[int] = 0
    number: ClassVar[int] = 0

    @property
    def stop(self) -> int:
        """The row after the last of the weight."""
        return self.num_rows

    @property
    def of(self) -> Handle:
        """The handle that optimizers step with."""
        return self

    def whole(self, ids: Tensor | None = None) -> Tensor:
        """Return all rows, as `Views.whole`."""
        return self.views.whole(ids)

    def set_whole(self, values: Tensor) -> None:
        """Set all rows, or have others, as `assign_rows`."""
        assign_rows(self, values, _handles)

    def whole_in_graph(self) -> Tensor:
        """Return all rows for a graph, as `Views.whole_in_graph`."""
        return self.views.whole_in_graph()

    def note_use(self, ids: Tensor, version: int) -> None:
        """Note a use of rows, as `Views.note_use`."""
        self.views.note_use(ids, version)

    def track_alias(self, alias: Tensor) -> Tensor:
        """Remember a tensor over the table's memory, as `Views.track_alias`."""
        return self.views.track_alias(alias)

    def gradient(self) -> Tensor | None:
        """Return the gradient of all rows, as `PendingGradient.gradient`."""
        return self.pending.gradient()

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set the gradient of all rows, as `PendingGradient.assign_gradient`."""
        self.pending.assign_gradient(grad)

    def receive(self, grad: Tensor) -> None:
        """Deposit what has reached the node of the weight, as `PendingGradient.receive`."""
        self.pending.receive(grad)

    def set_padding(self, padding_idx: int | None) -> None:
        """Keep the row that sparse gradients leave out, if this process has it: that of the padding of the module."""
        self.padding_idx = self.owners.own_row(self.id_space.padding_row(padding_idx))

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
        self.param_ref, self.kind = weakref.ref(param), kind
        param.__dict__[KEY] = self
        self.reset_param()
        if given is not None:
            self.pending.assign_gradient(given.to(self.table.device, self.rows.dtype))
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
        self.pending.convert(dtype)
        self.reset_param()
        self.owners.share_rows()
        self.id_space.rows_replaced()

    def move(self, device: torch.device) -> None:
        """Make `device` the compute device."""
        self.is_sent = self.is_sent and device == self.table.device
        if device != self.table.device:
            # Padding is known only where the ids are.
            self.pending.trim()
        self.table.to(device)
        if self.table.memory == "device" and self.state is not None:
            self.state.follow_move()
        pending, device = self.pending, self.table.device
        if pending.ids is not None and pending.grad is not None:
            pending.set_gradient(pending.ids.to(device), pending.grad.to(device), pending.known)
        self.reset_param()

    def replace(self, rows: Rows, reason: str) -> None:
        """Use the rows of another table; drop the state of the rows, and, if there are more or fewer, the gradient."""
        self.drop_state(reason)
        if rows.table.num_rows == self.rows.table.num_rows:
            self.pending.convert(rows.dtype)
        else:
            self.pending.clear()
        self.rows = rows
        self.reset_param()

    def drop_state(self, reason: str) -> None:
        """Remove the state of the rows, and keep the reason for the optimizer that had it."""
        self.id_space.forget_state()
        if self.state is not None:
            self.rows.catch_up()
            self.pending.state_rows = {}
            owner, param = self.state.optimizer(), self.param_ref()
            had = owner.state.get(param, {}) if owner is not None and param is not None else {}
            if owner is not None and any(value is not None for value in had.values()):
                self.lost[owner] = reason
            self.state.drop()
            self.state = None

    def check_not_lost(self, optimizer: Any) -> None:
        """Raise if `optimizer` had state of these rows that was dropped."""
        if optimizer in self.lost:
            raise OptimizerError(
                f"this {type(optimizer).__name__} trained the table of {self} before and its row state is gone: "
                f"{self.lost[optimizer]}; train a table with one optimizer at a time, make a new one, or load its state"
            )

    def grow(self, num_rows: int) -> None:
        """Give the weight more rows, zero, as `Table.grow`; the pending gradient and the optimizer's state stay.

        Raises
        ------
        OptimizerError
            A step runs.
        InvalidValueError
            Several processes, or several weights, have this table; or as `Table.grow`.
        """
        with self.rows.lock:
            if self.state is not None and self.state.running:
                raise OptimizerError(
                    f"{self} cannot grow to {num_rows} rows while an optimizer steps; grow it before the step, or after it"
                )
            # Where ids come and go each process grows its own rows, without a collective call.
            alone = self.owners.is_alone or self.id_space.come_and_go
            if not alone or len(handles_over(self.table)) > 1:
                what = "weights" if alone else "processes"
                raise InvalidValueError(
                    f"{self} cannot grow to {num_rows} rows, as several {what} have its table; make it of one (without "
                    "process_group, with a table of its own)"
                )
            before = self.table.num_rows
            try:
                self.rows.grow(num_rows)
            finally:
                # After an interrupt the table may have grown.
                to_its_end(lambda: self._follow_growth(before))

    def _follow_growth(self, before: int) -> None:
        """Show as many rows as the table has, which had `before`."""
        if self.table.num_rows == before:
            return
        self.has_grown = True
        if self.pending.ids is not None and self.pending.grad is not None:
            self.pending.ids = padded_anew(self.pending.ids, self.pending.known, self.table.num_rows)
        for parts in self.pending.arriving.values():
            parts[:] = [(padded_anew(ids, known, self.table.num_rows), grad, known) for ids, grad, known in parts]
        self.show_growth()
        self.id_space.follow_growth()

    def show_growth(self) -> None:
        """Let the weight, and its gradient, have as many rows as there are by now."""
        self.views.forget_whole()
        self.pending._shown = self.pending._parts = None
        self.reset_param()

    def __reduce__(self) -> Any:
        """Pickle the rows without their state, which is the optimizer's, and without a gradient, as torch does."""
        self.owners.check_whole("is pickled", "use st.save_checkpoint, or st.full_state_dict(model)")
        # The copy uses no file, and may be unpickled where memory cannot be pinned.
        memory, device = "device" if self.table.memory == "device" else "auto", str(self.table.device)
        weight, rows = self.rows.pickled()
        arguments = weight, memory, device, self.requires_grad, self.idle, rows
        return self.id_space.pickled((_unpickle, arguments, self._of_module()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        self.owners.begin_copy()
        # Without the planes of state, which a copy of the optimizer has.
        rows = self.rows.copy()
        duplicate = Handle(rows.table, self.requires_grad, self.idle, rows)
        self.owners.copy_to(duplicate)
        self.id_space.copy_to(duplicate, memo)
        duplicate.__dict__.update(self._of_module())
        if self.features is not None:
            duplicate.features = Features(self.features.names, self.features.starts, duplicate.id_space)
        memo[id(self)] = duplicate
        return duplicate

    def _of_module(self) -> dict[str, Any]:
        """Return the attributes that the module has set, which copies keep."""
        names = ["name", "sparse", "renormalizes", "padding_idx"]
        # Ids that come and go are pickled by themselves.
        names += ["id_space"] if not (self.id_space.by_row or self.id_space.come_and_go) else []
        return {name: getattr(self, name) for name in names}


def _unpickle(
    weight: Tensor, memory: Any, device: str, param: nn.Parameter | bool, idle: str, rows: dict[str, Any]
) -> Handle:
    # An older version named no dtype.
    weight = weight.view(rows.get("stored", weight.dtype))
    table = Table.from_array(weight, memory, device=device, copy=False)
    trained = param if isinstance(param, bool) else param.requires_grad
    handle = Handle(table, trained, idle, Rows.unpickled(table, rows))
    if not isinstance(param, bool):
        # That of the module, which looks whether it has another.
        handle.param_ref = weakref.ref(param)
    return handle
