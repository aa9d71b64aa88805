"""What ties a parameter to a table: the active rows with their gradient, and the parameter that holds them during a step."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError
from speedtransfer.optim.lazy import sparse_gradient
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.store import RowStore
from speedtransfer.tables import Table, unique_rows

_UNTRAINED_STEPS = 100  # of other optimizers, after which a growing gradient is worth a warning
_KEY = "_speedtransfer_handle"  # in the __dict__ of a parameter
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def find_handle(param: Any) -> Handle | None:
    """Return the handle that `param` belongs to, or None for an ordinary parameter."""
    handle: Handle | None = getattr(param, "__dict__", {}).get(_KEY)
    return handle if handle is not None and handle._param() is param else None


def any_handles() -> bool:
    """Tell whether there is any handle at all (lets the hooks of a process without tables cost nothing)."""
    return len(_handles) > 0


_steps_made = 0


def count_step() -> None:
    """Take note of a step of any optimizer."""
    global _steps_made
    _steps_made += 1


# Within, the parameter of a table is the tensor that torch sees, and not the whole table.
as_tensor = torch._C.DisableTorchFunctionSubclass


class Handle:
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
    rows : RowStore, optional
        The way to the rows of `table`; by default they are stored as they are computed with.
    """

    def __init__(
        self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: RowStore | None = None
    ) -> None:
        self.rows = RowStore(table) if rows is None else rows
        self.idle = idle
        self.requires_grad = requires_grad and self.rows.dtype.is_floating_point
        self.name: str | None = None  # of the module, where somebody has told
        self.sparse = False  # the module was made with sparse=True: optimizers that tell may get sparse gradients
        self.padding_idx: int | None = None  # that of the module: a row which sparse gradients never name
        self.state: Any = None  # optim.state.RowState of the optimizer that trains the rows
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
        # Another thread may evaluate the model while this one trains it: what brings rows up to date takes turns.
        self.lock = threading.RLock()
        self._reused = False  # the gradient was set to zero: what `_shown` is will be the next one
        # Leaves of autograd that deposit here, with the rows they hold (None: all), while they live.
        self._leaves: list[tuple[weakref.ref[Tensor], Tensor | None]] = []
        self._given: list[weakref.ref[Tensor]] = []  # tensors over the table that others may hold, and write to
        self._whole: tuple[weakref.ref[Tensor], int] | None = None  # the leaf over the whole table, and its version
        # What a backward has deposited so far, by its number, where hooks wait for all of it: ids, gradient.
        self._arriving: dict[int, tuple[Tensor, Tensor]] = {}
        # Not the parameter itself, which holds this object: a cycle would keep the table until the next gc.
        self._param: Callable[[], nn.Parameter | None] = lambda: None
        self._kind: type[nn.Parameter] = nn.Parameter
        _handles.add(self)

    @property
    def table(self) -> Table:
        """The table with all the rows."""
        return self.rows.table

    def __str__(self) -> str:
        return "weight" if self.name is None else f"{self.name}.weight" if self.name else "weight"

    # --- the parameter ------------------------------------------------------------------------------------------------

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        param = self._param()
        assert param is not None
        return param

    def param_or_none(self) -> nn.Parameter | None:
        """Return the parameter, if it still lives."""
        return self._param()

    def bind(self, param: nn.Parameter, kind: type[nn.Parameter], parted: bool = False) -> nn.Parameter:
        """Make `param` the parameter of this handle, a `kind` between steps, and return it.

        It stays the object that it is, so optimizers and modules that hold it go on to work; its values must be in the table.
        `parted`: the memory of the table has become another, and the parameter so far keeps the old one.
        """
        old = self._param()
        if old is not None and old is not param:
            old.__dict__.pop(_KEY, None)
            if parted:
                old.__class__ = nn.Parameter  # with the memory that was the table's
        with as_tensor():
            given, param.grad = param.grad, None
            self.requires_grad = param.requires_grad
        self._param, self._kind = weakref.ref(param), kind
        param.__dict__[_KEY] = self
        self.show()
        if given is not None:
            self.assign_gradient(given.to(self.table.device, self.rows.dtype))
        return param

    def new_param(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Make a parameter for this handle."""
        with torch.inference_mode(False):
            return self.bind(nn.Parameter(self.standing(), requires_grad=self.requires_grad), kind)

    @property
    def follows_idle_rows(self) -> bool:
        """Whether idle rows receive the steps that they miss."""
        return self.state is not None and self.state.follows_idle_rows

    @property
    def aliased(self) -> bool:
        """Whether a tensor on the compute device can be over the memory of the table."""
        return self.rows.plain and (self.table.memory == "device" or self.table.device.type == "cpu")

    def standing(self) -> Tensor:
        """Return what the parameter holds between steps: the memory of the table, or one number in the shape of the table.

        That is NaN: what comes to read it, past every function that is given the whole table, does not go unnoticed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # an inference tensor could never hold a gradient
                return self.standing()
        if self.aliased:
            return self.table.stored("weight").detach()
        dtype = self.rows.dtype
        one = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.table.device)
        return one.expand(self.table.num_rows, self.table.dim)

    def show(self) -> None:
        """Let the parameter stand for the whole table."""
        param = self._param()
        if param is not None:
            param.__class__ = nn.Parameter
            param.grad = None
            param.data = self.standing()
            param.requires_grad_(self.requires_grad)
            param.__class__ = self._kind

    def enter(self, sparse: bool = False) -> None:
        """Let the parameter hold the active rows and their gradient, maybe as a sparse one, for a step."""
        param = self.param
        assert self.active is not None
        param.__class__ = nn.Parameter
        param.grad = None
        param.data = self.active
        param.grad = self._sparse_gradient() if sparse else self.grad
        self._entered = param._version

    def is_changed(self) -> bool:
        """Tell whether the optimizer has written to the active rows since the step began."""
        return self.param._version != self._entered

    def _sparse_gradient(self) -> Tensor:
        """Return the gradient as a sparse one of the active rows, without that of padding, which torch leaves out too."""
        assert self.ids is not None
        assert self.grad is not None
        if self.used_whole:
            raise OptimizerError(
                f"{self} was made with sparse=True and used as a whole (in a product, a penalty), or given a dense gradient; "
                "make the embedding with sparse=False, or use the rows that are needed (emb(ids))"
            )
        grad, rows = self.grad, None
        if self.padding_idx is not None:
            rows = (self.ids != self.padding_idx).nonzero().flatten()
            grad = grad[rows] if len(rows) < len(grad) else grad
        return sparse_gradient(grad, rows, len(self.ids))

    def leave(self) -> None:
        """End a step: the parameter stands for the whole table again. The gradient stays until somebody clears it."""
        grad = self.param.grad
        if grad is None or not grad.is_sparse:
            self.grad = grad
        self._grad_version = -1 if self.grad is None else self.grad._version
        if self.grad is None:
            self.ids = self._assigned = None
        elif self._assigned is not None:
            self._use_assigned()
        self.active, self.state_rows, self.in_place, self._waiting_since = None, {}, False, None
        self.show()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), known to be good, as the next step will find them: "weight", and maybe state."""
        return self.rows.read(ids, ["weight"]) if self.state is None else self.state.current(ids)

    @property
    def lags(self) -> bool:
        """Whether there may be rows with steps to come, so that reading the table itself is not enough."""
        return self.state is not None and self.state.lags

    def settle(self, ids: Tensor | None = None) -> None:
        """Bring the rows `ids` (n,), none twice, of the table up to date (exact idle rows lag behind); None: all of them."""
        if self.state is not None:
            self.state.settle(ids)

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

    def give(self, alias: Tensor) -> Tensor:
        """Remember a tensor that reads and writes as the table, and return it."""
        if len(self._given) > 16:
            self._given = [reference for reference in self._given if reference() is not None]
        self._given.append(weakref.ref(alias))
        return alias

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
        self.settle()
        self.table.wait()
        self.rows.load("weight", values.detach())

    def take_param(self, param: nn.Parameter, kind: type[nn.Parameter]) -> None:
        """Make an ordinary parameter the weight, with its values. The one so far is an ordinary one again, or of no use."""
        values, grad = param.detach(), self.gradient()
        self.drop_state("another weight was assigned to the module")
        self.clear()
        parted = self._can_take(values) and len(values) == self.table.num_rows and values.dtype == self.rows.dtype
        old = self._param()
        if old is not None and parted:
            self._param = lambda: None  # it keeps its memory
        self.set_whole(values)
        if old is not None:
            self._param = weakref.ref(old)
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
            self.settle()
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
            self.replace(RowStore(made, rows.storage_dtype, rows.state_dtype), reason)
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
                    tensor.part(kept)  # type: ignore[attr-defined]
        self._given = []

    def follow(self, leaf: Tensor, ids: Tensor | None) -> None:
        """Remember a leaf of autograd that deposits the gradient of the rows `ids` (None: all) here."""
        if len(self._leaves) > 16:
            self._leaves = [entry for entry in self._leaves if entry[0]() is not None]
        self._leaves.append((weakref.ref(leaf), ids))

    def leaves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves of autograd that a graph may still lead to, with their rows."""
        found = [(reference(), ids) for reference, ids in self._leaves]
        return [(leaf, ids) for leaf, ids in found if leaf is not None]

    # --- the gradient -------------------------------------------------------------------------------------------------

    def deposit(
        self,
        ids: Tensor,
        grad: Tensor,
        rows: Tensor | None = None,
        version: int = -1,
        state_rows: dict[str, Tensor] | None = None,
        whole: bool = False,
    ) -> None:
        """Add the gradient of some rows to what the next step will apply.

        Parameters
        ----------
        ids : Tensor
            ``(n,)`` int64, sorted, no row twice.
        grad : Tensor
            ``(n, dim)``.
        rows : Tensor, optional
            ``(n, dim)``, the rows as they were when the table's version was `version`; the step writes to this memory.
        state_rows : dict of str to Tensor, optional
            Their state, as of then.
        whole : bool
            Whether it is that of a use of all rows, which torch makes dense.
        """
        self.recover()
        if self.grad is not None and self._assigned is None and self._discarded():
            reused = self._followed() is not None
            self.clear()
            self._reused = reused
        self.used_whole = self.used_whole or whole
        grad = grad.detach()
        if self._has_hooks():
            self._arrive(ids, grad)
        else:
            self._accumulate(ids, grad, rows, version, state_rows)

    def _accumulate(
        self,
        ids: Tensor,
        grad: Tensor,
        rows: Tensor | None = None,
        version: int = -1,
        state_rows: dict[str, Tensor] | None = None,
    ) -> None:
        grad = _writable(grad)
        shown = self._followed()
        if self.ids is None:
            self.ids, self.active, self.state_rows, self._version = ids, rows, state_rows or {}, version
        else:
            assert self.grad is not None
            ids, grad = self._merged((self.ids, self.grad), (ids, grad))
            self.ids, self.active, self.state_rows = ids, None, {}
        self.grad, self._grad_version, self._reused = grad, grad._version, False
        if shown is not None:  # as in torch, where a gradient stays the object that it is until it is set to None
            shown.ids, shown.rows = ids, grad
        self._warn_untrained()

    def _followed(self) -> RowGradient | None:
        """Return the gradient that somebody has got from here and holds, if it is still that of the weight."""
        shown = None if self._shown is None else self._shown()
        return shown if shown is not None and (self._reused or shown.rows is self.grad) else None

    # Hooks of the parameter, which is itself in no graph. As in torch they see the sum over all uses of the weight in a
    # backward, once: a step or a clipping of each part would be something else.

    def _has_hooks(self) -> bool:
        param = self._param()
        if param is None:
            return False
        with as_tensor():
            return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)

    def _arrive(self, ids: Tensor, grad: Tensor) -> None:
        """Add a part of the gradient that hooks will see at the end of the backward that runs, if one does."""
        task = torch._C._current_graph_task_id()
        if task < 0:  # written by hand
            self._finish(ids, grad)
        elif task in self._arriving:
            self._arriving[task] = self._merged(self._arriving[task], (ids, grad))
        else:
            self._arriving[task] = ids, grad
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(*self._arriving.pop(task)))

    @torch.no_grad()
    def _finish(self, ids: Tensor, grad: Tensor) -> None:
        """Run the hooks on the gradient of one backward, and accumulate it between them."""
        param = self._param()
        if param is not None and param._backward_hooks:
            shown = RowGradient(self.table.num_rows, ids, grad, sparse=self.sparse and not self.used_whole)
            ids, grad = self._rows_of(self._hooked(param, shown).detach())
        self._accumulate(ids, grad)
        if param is not None:
            with as_tensor():
                hooks = list((param._post_accumulate_grad_hooks or {}).values())
            for hook in hooks:
                hook(param)

    def _warn_untrained(self) -> None:
        """Warn, once, of a gradient that grows while optimizers without this weight step."""
        if self._waiting_since is None:
            self._waiting_since = _steps_made
        elif _steps_made - self._waiting_since >= _UNTRAINED_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self} has received gradients for {_UNTRAINED_STEPS} optimizer steps, none of which trained it, and they "
                "pile up: no optimizer that steps has this weight; make it from model.parameters() as they are now, or call "
                "requires_grad_(False) on the module",
                stacklevel=2,
            )

    def deposit_dense(self, grad: Tensor) -> None:
        """Add a gradient of all rows, ``(num_rows, dim)``. With lazy idle rows those without any stay idle."""
        ids, rows = self._rows_of(grad.detach())
        self.deposit(ids, rows, whole=True)

    def _rows_of(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the active rows of a dense gradient and their values."""
        if isinstance(grad, RowGradient):
            return grad.ids, grad.rows
        if grad.is_sparse:
            grad = grad.coalesce()
            return grad.indices()[0], grad.values()
        if self.follows_idle_rows:  # an idle row and one with a gradient of zero go the same way
            return torch.arange(len(grad), device=grad.device), grad
        if grad.shape[1] and bool((grad[:, 0] != 0).all()):  # as that of a softmax over all rows: one column tells
            return torch.arange(len(grad), device=grad.device), grad
        ids = (grad != 0).any(dim=1).nonzero().flatten()
        return ids, grad if len(ids) == len(grad) else grad[ids]

    def hooked(self, grad: Tensor) -> Tensor:
        """Return what the hooks of the parameter make of the gradient of the whole table."""
        param = self._param()
        return grad if param is None or not param._backward_hooks else self._hooked(param, grad)

    def _hooked(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        for hook in list(param._backward_hooks.values()):  # type: ignore[union-attr]
            changed = hook(grad)
            if changed is not None:
                self._check_gradient(changed)
                grad = changed
        return grad

    def _merged(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows and the sum of two gradients: in the memory of the first where that has all the rows."""
        (ids, grad), (more_ids, more) = one, other
        if more_ids.shape == ids.shape and torch.equal(more_ids, ids):
            return ids, grad.add_(more)
        if len(ids) == self.table.num_rows:
            return ids, grad.index_add_(0, more_ids, more)
        if len(more_ids) == self.table.num_rows:
            return more_ids, more.index_add(0, ids, grad)
        union, position, *_ = unique_rows(torch.cat([ids, more_ids]))
        total = grad.new_zeros(len(union), grad.shape[1])
        total[position[: len(ids)]] = grad
        total[position[len(ids) :]] += more  # which holds no row twice
        return union, total

    def _discarded(self) -> bool:
        """Tell whether the gradient deposited before has been set to zero."""
        grad = self.grad
        if grad is None:
            return True
        # Clipping and unscaling change a gradient in place too; only zero_grad(set_to_none=False) leaves nothing.
        return grad._version != self._grad_version and grad.numel() > 0 and not bool(grad.any())

    def gradient(self) -> Tensor | None:
        """Return the gradient of the whole table, or None."""
        if self.grad is None:
            return None
        assert self.ids is not None
        shown = None if self._shown is None else self._shown()
        sparse = self.sparse and not self.used_whole
        if shown is None or shown.rows is not self.grad or shown.sparse != sparse:
            shown = RowGradient(self.table.num_rows, self.ids, self.grad, self._densified, sparse)
            self._shown = weakref.ref(shown)
        return shown

    def _densified(self, ids: Tensor, grad: Tensor) -> None:
        """Take over a gradient that somebody has made dense to write to it."""
        if self.grad is not None:
            self._touched, self.ids, self.grad = self.ids, ids, grad
            self.active, self.state_rows, self._grad_version = None, {}, grad._version

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Make `grad` the gradient of the whole table; None: there is none."""
        self.recover()
        if grad is None or grad is self.gradient():
            if grad is None:
                self.clear()
            return
        self._check_gradient(grad)
        given = grad
        grad = grad if isinstance(grad, RowGradient) else _writable(grad.detach())
        if isinstance(grad, RowGradient) or grad.is_sparse:
            self.used_whole = not grad.is_sparse
            again = grad is given and self._shown is not None and given is self._shown() and self.grad is None
            (self.ids, self.grad), self._touched, self._assigned = self._rows_of(grad), None, None
            if again and self._cleared is not None:  # put back, by a probe for one
                self.used_whole, was_assigned, self._touched = self._cleared
                self._assigned = self.grad if was_assigned else None
        else:  # others may write to this memory before the step, which finds out what rows there are
            self._assigned, self.used_whole = grad, True
            self._use_assigned()
        assert self.grad is not None
        self.active, self.state_rows, self._grad_version = None, {}, self.grad._version

    def _use_assigned(self) -> None:
        assert self._assigned is not None
        self.ids, self.grad = torch.arange(len(self._assigned), device=self._assigned.device), self._assigned
        self._touched = self.ids[:0]

    def _check_gradient(self, grad: Any) -> None:
        shape = (self.table.num_rows, self.table.dim)
        if not isinstance(grad, Tensor) or tuple(grad.shape) != shape:
            what = tuple(grad.shape) if isinstance(grad, Tensor) else f"a {type(grad).__name__}"
            raise InvalidValueError(
                f"the gradient of {self} is {what} but the table is {shape}; pass a tensor of that shape"
            )
        if grad.dtype != self.rows.dtype or grad.device != self.table.device:
            raise InvalidTypeError(
                f"the gradient of {self} is {grad.dtype} on {grad.device} but its rows are {self.rows.dtype} on "
                f"{self.table.device}; pass grad.to({str(self.table.device)!r}, {self.rows.dtype})"
            )

    def clear(self) -> None:
        """Forget the gradient and the active rows."""
        if self.grad is not None:
            self._cleared = self.used_whole, self._assigned is not None, self._touched
        self.ids = self.grad = self.active = self._touched = None
        self._reused, self._assigned = False, None
        self.state_rows, self.used_whole, self.in_place, self._waiting_since = {}, False, False, None

    # --- steps --------------------------------------------------------------------------------------------------------

    def refresh(self, again: bool = False) -> None:
        """Read the active rows `again`, or if the table has changed since: a step must not undo what was written meanwhile."""
        if self.ids is None:
            return
        if self._touched is not None and not self.follows_idle_rows:
            assert self.grad is not None
            touched = (self.grad != 0).any(dim=1)
            touched[self._touched] = True
            self.ids = touched.nonzero().flatten()
            self.grad = self.grad[self.ids]
            self.active, self.state_rows, self._grad_version = None, {}, self.grad._version
        self._touched = None
        self._exposed, exposed = False, self._exposed
        again = again or exposed or any(reference() is not None for reference in self._given)
        if again or self.active is None or self._version != self.table.version:
            self.in_place = self._steps_in_place()
            if self.in_place:
                self.settle()
                self.active, self.state_rows = self.table.stored("weight").detach(), {}
            else:
                self.state_rows = self.read(self.ids)
                self.active = self.state_rows.pop("weight")
            self._version = self.table.version

    def _steps_in_place(self) -> bool:
        """Tell whether the next step is one of all rows, which it can take where they are stored."""
        assert self.ids is not None
        every = len(self.ids) == self.table.num_rows > 0
        return every and self.aliased and self.state is not None and self.state.steps_in_place()

    def mark_stepped(self) -> None:
        """Tell autograd that a step wrote to rows that a graph may have saved: backward then raises, as in torch."""
        for leaf, _ in self.leaves():
            torch.autograd.graph.increment_version(leaf)
        self._leaves.clear()

    def recover(self) -> None:
        """End a step that failed: the table it has not reached."""
        if self.state is not None and self.state.in_step and not self.state.stepping():
            optimizer = self.state.optimizer()
            if optimizer is not None:
                self.state.recover(optimizer)

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

    def replace(self, rows: RowStore, reason: str) -> None:
        """Let the rows be those of another table. The state of the rows goes, and the gradient."""
        self.drop_state(reason)
        self.rows = rows
        self.clear()
        self.show()

    def drop_state(self, reason: str) -> None:
        """Remove the state of the rows and remember, for the optimizer that had it, why."""
        if self.state is not None:
            self.state.settle()  # what it still owes to idle rows
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

    # --- copies -------------------------------------------------------------------------------------------------------

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
        self.settle()
        rows = self.rows.copy()
        duplicate = Handle(rows.table, self.requires_grad, self.idle, rows)
        duplicate.name = self.name
        memo[id(self)] = duplicate
        return duplicate


def _writable(grad: Tensor) -> Tensor:
    """Return a gradient that can be written in place: not one number that stands for many."""
    expanded = grad.layout == torch.strided and not isinstance(grad, RowGradient) and 0 in grad.stride()
    return grad.clone(memory_format=torch.contiguous_format) if expanded else grad


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
    return Handle(table, trained, idle, RowStore.unpickled(table, rows))
