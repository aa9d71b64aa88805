"""The parameter that an optimizer sees in place of a table: the active rows and their gradient, for the time of one step."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.lazy import sparse_gradient
from speedtransfer.optim.store import RowStore
from speedtransfer.tables import Table, unique_rows

# Parameter -> weak reference to its handle. The handle holds the parameter, so a strong one would keep both for ever.
_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()


def find_handle(param: Tensor) -> Handle | None:
    """Return the handle that `param` belongs to, or None for an ordinary parameter."""
    reference = _handles.get(param)
    return None if reference is None else reference()


def any_handles() -> bool:
    """Tell whether there is any handle at all (lets the hooks of a process without tables cost nothing)."""
    return len(_handles) > 0


class Handle:
    """Ties `param` to a table.

    Between backward and step ``param.data`` is the ``(active, dim)`` rows that backward touched and ``param.grad`` their
    gradient; at any other time `param` is ``(0, dim)`` without gradient. The parameter never enters autograd, so clipping,
    unscaling, parameter groups and schedulers see an ordinary dense parameter.

    Parameters
    ----------
    table : Table
    requires_grad : bool
        Whether the rows are trained.
    idle : {"lazy", "exact"}
        What becomes of rows that a step does not touch.
    rows : RowStore, optional
        The way to the rows of `table`; by default they are stored as they are computed with.
    """

    def __init__(
        self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: RowStore | None = None
    ) -> None:
        self.rows = RowStore(table) if rows is None else rows
        self.idle = idle
        self.sparse = False  # the module was made with sparse=True: optimizers that tell may get sparse gradients
        self.padding_idx: int | None = None  # that of the module: a row which sparse gradients never name
        self.ids: Tensor | None = None  # active rows, sorted; None: idle
        self.state: Any = None  # optim.state.RowState of the optimizer that trains the rows
        # State of the active rows, by plane, where reading the weights took it along.
        self.state_rows: dict[str, Tensor] = {}
        # Optimizers whose state of these rows is gone, and why.
        self.lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._version = -1  # of the table when param.data was read
        self._grad: tuple[weakref.ref[Tensor], int] | None = None  # the gradient as this class left it
        self._dense_grad: Tensor | None = None  # that of the active rows where param.grad is sparse, within a step
        self._leaf: Tensor | None = (
            None  # shares memory with param.data and the version counter with the leaf of autograd
        )
        self._noticed: int | None = None  # version of the table when a lost write was noticed
        self.bind(nn.Parameter(self._no_rows(), requires_grad=requires_grad and self.rows.dtype.is_floating_point))

    @property
    def table(self) -> Table:
        """The table with all the rows."""
        return self.rows.table

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), known to be good, as the next step will find them: "weight", and maybe state."""
        return self.rows.read(ids, ["weight"]) if self.state is None else self.state.current(ids)

    def settle(self, ids: Tensor | None = None) -> None:
        """Bring the rows `ids` (n,), none twice, of the table up to date (exact idle rows lag behind); None: all of them."""
        if self.state is not None:
            self.state.settle(ids)

    def bind(self, param: nn.Parameter) -> None:
        """Make `param` the parameter of this handle."""
        self.param = param
        self._idle_version = param._version
        _handles[param] = weakref.ref(self)

    def _no_rows(self) -> Tensor:
        with torch.inference_mode(False):  # an inference tensor could never hold a gradient
            return torch.empty(0, self.table.dim, dtype=self.rows.dtype, device=self.table.device)

    def check_unwritten(self) -> None:
        """Raise where somebody wrote to the idle parameter: it holds no rows, and the write went nowhere.

        In-place writes through ``param.data`` leave no trace; those on the parameter and an assigned ``param.data`` do. The
        error stands until the rows are written through the table.
        """
        if self.ids is not None or (self.param._version == self._idle_version and len(self.param) == 0):
            return
        if self._noticed is None:
            self._noticed = self.table.version
        if self._noticed != self.table.version:
            self._noticed = None
            self.clear()
            return
        raise InvalidValueError(
            "weight was written (by nn.init, or as weight.data = ...) while it held no rows, so nothing changed; write "
            "the rows through the table: emb.table.uniform_(a, b), .normal_(mean, std), .init_(fn), or emb.table[ids] = rows"
        )

    def check_gradient(self) -> None:
        """Raise where the idle parameter has got a gradient: the loss uses it, not the rows, and part of it would be lost."""
        if self.ids is None and self.param.grad is not None:
            self.param.grad = None
            raise InvalidValueError(
                "weight got a gradient of its own while it held no rows: the loss uses the parameter (a penalty over "
                "model.parameters(), for instance); leave tables out there and use the rows: emb(ids), emb.activate(ids).rows"
            )

    def mark_stepped(self) -> None:
        """Tell autograd that a step wrote into rows that a graph may have saved: backward then raises, as in torch."""
        if self._leaf is not None:
            torch.autograd.graph.increment_version(self._leaf)

    def clear(self) -> None:
        """Make the parameter idle: no rows, no gradient."""
        self.ids = self._grad = self._leaf = self._dense_grad = None
        self.state_rows = {}
        self.param.grad = None
        self.param.data = self._no_rows()
        self._idle_version = self.param._version

    def deposit(
        self, ids: Tensor, grad: Tensor, rows: Tensor, version: int, state_rows: dict[str, Tensor] | None = None
    ) -> None:
        """Add the gradient of some rows to what the next step will apply.

        Parameters
        ----------
        ids : Tensor
            ``(n,)`` int64, sorted, no row twice.
        grad : Tensor
            ``(n, dim)``.
        rows : Tensor
            ``(n, dim)``, the rows as they were when the table's version was `version`.
        state_rows : dict of str to Tensor, optional
            Their state, as of then.
        """
        self.check_gradient()
        self.make_dense()  # a step that failed has left it sparse
        if self._discarded():
            self.clear()
        grad = grad.detach()
        for hook in (self.param._backward_hooks or {}).values():  # the parameter is in no graph: its hooks fire here
            changed = hook(grad)
            grad = grad if changed is None else changed
        if self.ids is None:
            if version != self.table.version:  # somebody wrote to the table between forward and backward
                state_rows, version = self.read(ids), self.table.version
                rows = state_rows.pop("weight")
            self.ids, self._version, self._leaf, self.state_rows = ids, version, rows, state_rows or {}
            self.param.data = rows.detach()
        else:
            grad = self._merge(ids, grad)
        self.param.grad = grad
        self._grad = weakref.ref(grad), grad._version
        for hook in list((self.param._post_accumulate_grad_hooks or {}).values()):
            hook(self.param)

    def make_sparse(self) -> None:
        """Let the gradient of the active rows be a sparse one, for a step: of all rows but that of padding, as in torch."""
        grad = self.param.grad
        assert grad is not None
        assert self.ids is not None
        self._dense_grad, rows = grad, None
        if self.padding_idx is not None:
            rows = (self.ids != self.padding_idx).nonzero().flatten()
            grad = grad[rows] if len(rows) < len(grad) else grad
        self.param.grad = sparse_gradient(grad, rows, len(self.ids))

    def make_dense(self) -> None:
        """Undo `make_sparse`."""
        if self._dense_grad is not None and self.param.grad is not None and self.param.grad.is_sparse:
            self.param.grad = self._dense_grad
        self._dense_grad = None

    def _merge(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Take `ids` into the active rows and return the summed gradient."""
        assert self.ids is not None
        assert self.param.grad is not None
        if torch.equal(ids, self.ids):
            return self.param.grad + grad
        union, position, *_ = unique_rows(torch.cat([self.ids, ids]))
        total = grad.new_zeros(len(union), grad.shape[1])
        total[position[: len(self.ids)]] = self.param.grad
        total[position[len(self.ids) :]] += grad  # ids holds no row twice
        self.param.grad = None
        self.ids, self._leaf = union, None
        self.refresh(again=True)
        return total

    def _discarded(self) -> bool:
        """Tell whether zero_grad (to None or to zero) or a hand has thrown away the gradient deposited before."""
        grad = self.param.grad
        if grad is None:
            return True
        if self._grad is None or self._grad[0]() is not grad:
            return False
        # Clipping and unscaling change a gradient in place too; only zero_grad(set_to_none=False) leaves nothing.
        return grad._version != self._grad[1] and grad.numel() > 0 and not bool(grad.any())

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the table to `dtype`. The state of its rows goes: an optimizer does not follow such a change either."""
        reason = f"the table became {dtype}"
        self.drop_state(reason)
        self.rows = self.rows.astype(dtype)
        self.clear()

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

    def refresh(self, again: bool = False) -> None:
        """Read the active rows `again`, or if the table has changed since: a step must not undo what was written meanwhile."""
        if self.ids is not None and (again or self._version != self.table.version):
            self.state_rows = self.read(self.ids)
            self.param.data, self._version = self.state_rows.pop("weight"), self.table.version

    def __reduce__(self) -> Any:
        """Pickle the rows, without their state, which is the optimizer's, and without a gradient, as torch does."""
        memory = "device" if self.table.memory == "device" else "auto"  # a file stays where it is, pinned may not exist
        return _unpickle, (
            self.table.torch(),
            memory,
            str(self.table.device),
            self.param,
            self.idle,
            self.rows.pickled(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        # Without the planes of state: a copy of the optimizer, if there is one, brings its own.
        rows = self.rows.copy()
        duplicate = Handle(rows.table, idle=self.idle, rows=rows)
        memo[id(self)] = duplicate
        duplicate.bind(copy.deepcopy(self.param, memo))
        duplicate.clear()
        return duplicate


def _unpickle(weight: Tensor, memory: str, device: str, param: nn.Parameter, idle: str, rows: dict[str, Any]) -> Handle:
    table = Table.from_array(weight, memory, device=device, copy=False)
    handle = Handle(table, param.requires_grad, idle, RowStore.unpickled(table, rows))
    handle.bind(param)
    handle.clear()
    return handle
