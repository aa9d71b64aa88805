"""The parameter of a table between steps: a placeholder for the whole table, which never enters autograd itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.cuda import check_not_capturing, is_capturing
from speedtransfer.errors import DeviceError
from speedtransfer.interrupts import to_its_end
from speedtransfer.optim.anchor import Anchor, Joined, kept
from speedtransfer.optim.features import Features
from speedtransfer.optim.fused_step import FusedStep
from speedtransfer.optim.graph import TableRows, apply_plainly, as_tensor, listen
from speedtransfer.optim.id_space import IdSpace
from speedtransfer.optim.owners import Owners
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.state import MadeStep, RowState
from speedtransfer.rows import Rows
from speedtransfer.tables import Table, num_unique

# What crosses a bus in five microseconds, less than the time of a launch.
_FEW_BYTES = 1 << 18


class TableParam:
    """The part of a :class:`Handle` that ties a parameter to a table; its arguments are those of that class."""

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
        # Those that share this table, each of which a step may leave out.
        self.features: Features | None = None
        # Who has which rows, and what ids mean.
        self.owners = Owners(self)
        self.id_space = IdSpace()

        # The parameter; not a strong reference, as it holds this object: a cycle would keep the table until the next gc.
        self.param_ref: Callable[[], nn.Parameter | None] = lambda: None
        # Its class and data between steps; its version, and that of the table, when a step began.
        self._kind: type[nn.Parameter] = nn.Parameter
        self._placeholder: Tensor | None = None
        self._entered = self._entered_at = 0
        # Whether a step has it; the step that was made, until it is written.
        self._lent = False
        self._made: MadeStep | None = None

        # The state of the optimizer that trains the rows; other optimizers whose state of them was dropped, and why.
        self.state: RowState | None = None
        self.lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

        # The pending gradient: the active rows, (n,) sorted, and their gradient, (n, dim). None: there is none.
        self.ids: Tensor | None = None
        self.grad: Tensor | None = None
        # The active rows, (n, dim), as read at version `_version` of the table, and their state by plane, if read along.
        # None: the step reads them.
        self.active: Tensor | None = None
        self.state_rows: dict[str, Tensor] = {}
        self._version = -1
        # Whether `active` is the memory of the table.
        self.in_place = False
        # How a kernel makes the running step, instead of the optimizer.
        self._fused: FusedStep | None = None
        # Whether some of the gradient comes from a use of all rows.
        self.used_whole = False
        # Whether some of it was made by ``backward(create_graph=True)``.
        self._of_graph = False
        # The version of `grad` as last written here.
        self._grad_version = 0
        # Number of the CUDA graph capture that `grad` was made in: replays write to its memory. None: of none.
        self._capture: int | None = None
        # Set while every row counts as active because the gradient was made dense: the active rows before that.
        self._touched: Tensor | None = None
        # A dense gradient that was assigned to the weight: the caller may go on writing to it.
        self._assigned: Tensor | None = None
        # The RowGradient that ``weight.grad`` has returned last; whether it will show the next gradient, after zero_grad.
        self._shown: weakref.ref[RowGradient] | None = None
        self._reused = False
        # What `clear` forgot last: `used_whole`, whether the gradient was assigned, `_touched`.
        self._cleared: tuple[bool, bool, Tensor | None] | None = None
        # By number of a running backward: ids and gradient so far, kept until it ends for the hooks of the parameter.
        self._arriving: dict[int, tuple[Tensor, Tensor]] = {}
        # Number of steps of all optimizers when the gradient came that no step has taken since; whether it was warned of.
        self._waiting_since: int | None = None
        self._warned = False

        # What compiled graphs hold of this table.
        self.anchor = Anchor(self)
        # The nodes by which graphs have rows.
        self.joined: list[weakref.ref[Any]] = []
        # Whether others know the node of the parameter in the graph; how many calls of torch.autograd.grad ask for it.
        self.node_known = False
        self.askers = 0
        # All rows as a graph has them, and the version of the table that they show.
        self._whole: tuple[weakref.ref[Tensor], int] | None = None
        # Tensors over the memory of the table that the caller may hold and write to; whether any was made since the last step.
        self._aliases: list[weakref.ref[Tensor]] = []
        self._exposed = False
        # The rows, (n,), of which such tensors show no others.
        self._exposed_rows: list[Tensor] = []

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
        return near and self.rows.plain and table.cache_rows is None and table.max_rows is None and not table.in_parts

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
        self._placeholder = self.placeholder()
        if param.shape != self._placeholder.shape:
            # Another dtype for a moment gives it a new node in the graph: the old one expects gradients of the old shape.
            other = torch.float16 if param.dtype != torch.float16 else torch.float32
            param.data = param.new_empty(0, dtype=other)
        param.data = self._placeholder
        param.requires_grad_(self.requires_grad)
        listen(param)
        param.__class__ = self._kind

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

    def track_alias(self, alias: Tensor) -> Tensor:
        """Remember a tensor that reads and writes the table, and return it."""
        if len(self._aliases) > 16:
            self._aliases = [reference for reference in self._aliases if reference() is not None]
        self._aliases.append(weakref.ref(alias))
        return alias

    def join(
        self,
        rows: Tensor,
        ids: Tensor | None,
        deposit: Callable[..., None],
        features: Callable[[], int] | None = None,
        guarded: bool = True,
    ) -> Tensor:
        """Return `rows`, ``(n, dim)``, as what a graph made of the weight; `deposit` takes their gradient, `grad`.

        `ids`, (n,), name the rows; None: all. `features` returns those that the gradient is of.
        What is `guarded` cannot be changed in place.
        """
        if self.id_space.come_and_go:
            self.id_space.pin(rows, ids)
        if kept.joins is not None and ids is not None:
            kept.joins.append(Joined(self, rows.detach().requires_grad_(), ids, deposit, features))
            return kept.joins[-1].rows
        if len(self.joined) > 16:
            self.joined = [reference for reference in self.joined if reference() is not None]
        # Hooks that get the gradient later would be called with None.
        late = (not self.owners.is_alone or self.id_space.come_and_go) and self.has_hooks()
        leaf = self.anchor.leaf if late else self.param_ref()
        apply = TableRows.apply if torch._C._are_functorch_transforms_active() else apply_plainly
        with as_tensor():
            made: Tensor = apply(leaf, rows, (self, ids, deposit, features, guarded))
        return made

    def alive(self) -> list[Any]:
        """Return the nodes by which graphs have rows, of the graphs that are alive."""
        return [node for node in (reference() for reference in self.joined) if node is not None]

    def has_hooks(self) -> bool:
        """Tell whether the parameter has hooks for its gradient."""
        param = self.param_ref()
        if param is None:
            return False
        with as_tensor():
            # One of the latter is `receive`.
            return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1

    def _set_gradient(self, ids: Tensor, grad: Tensor) -> None:
        """Make `grad`, ``(n, dim)``, the pending gradient of the rows `ids` (n,), which the step has to read."""
        self.ids, self.grad, self._grad_version = ids, grad, grad._version
        self.active, self.state_rows = None, {}

    def trim(self) -> None:
        """Drop the padding of the pending gradient, for which the host waits."""
        if self.ids is not None and self.grad is not None:
            if self._capture is not None:
                raise DeviceError(
                    f"the gradient of {self} was made by a CUDA graph, where the number of its rows is not known, so that it "
                    "cannot be sparse; make the embedding with sparse=False, or use an optimizer for dense gradients"
                )
            count = num_unique(self.ids)
            if count is not None:
                self._take_trimmed(self.ids[: int(count)], self.grad[: int(count)])

    def _take_trimmed(self, ids: Tensor, grad: Tensor) -> None:
        n, before, shown = len(ids), self.grad, None if self._shown is None else self._shown()
        self.ids, self.grad = ids, grad
        self.active = None if self.active is None else self.active[:n]
        self.state_rows = {name: part[:n] for name, part in self.state_rows.items()}
        # It remains the gradient that was shown.
        if shown is not None and shown.rows is before:
            shown.ids, shown.rows = ids, grad
