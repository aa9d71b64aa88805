"""The gradient of a table from backward to the step that applies it: of the active rows, which it knows and reads."""

from __future__ import annotations

import warnings
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError
from speedtransfer.optim.probe.trajectories import sparse_gradient
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.table_param import TableParam, as_tensor
from speedtransfer.tables import unique_rows

_UNTRAINED_STEPS = 100  # of other optimizers, after which a growing gradient is worth a warning
_steps_made = 0


def count_step() -> None:
    """Take note of a step of any optimizer."""
    global _steps_made
    _steps_made += 1


class PendingGradient(TableParam):
    """The part of a :class:`Handle` that collects gradients and lends the parameter to a step."""

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
        if self.state is not None and self.state.in_step:
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

    def deposit_dense(self, grad: Tensor) -> None:
        """Add a gradient of all rows, ``(num_rows, dim)``. With lazy idle rows those without any stay idle."""
        ids, rows = self._rows_of(grad.detach())
        self.deposit(ids, rows, whole=True)

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

    def _rows_of(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the active rows of a dense gradient and their values."""
        if isinstance(grad, RowGradient):
            return grad.ids, grad.rows
        if grad.is_sparse:
            grad = grad.coalesce()
            return grad.indices()[0], grad.values()
        if self.rows.lag is not None:  # an idle row and one with a gradient of zero go the same way
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

    def begin_step(self, optimizer: Optimizer, group: dict[str, Any], frame: FrameType | None) -> None:
        """Let the parameter hold the active rows and their gradient, and `optimizer` their state, for a step.

        `group` is that of the parameter, `frame` that of the function which runs the step.
        """
        state = self.state
        assert state is not None
        with self.rows.lock:
            self.refresh()
            state.load(optimizer, group, frame, None if self.in_place else self.ids, self.state_rows)
            if self.active is None:  # a probe has hidden the gradient meanwhile
                self.refresh()
            self._enter(state.sparse)

    def end_step(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state into the table, and make the parameter idle."""
        state = self.state
        assert state is not None
        with self.rows.lock:
            state.store(optimizer, group, None if self.in_place else self.ids)
            self._mark_stepped()
            self._leave()
            if self.rows.lag is not None and self.rows.lag.is_long:
                self.rows.catch_up()

    def abort_step(self, optimizer: Optimizer) -> None:
        """End a step that failed, and undo what it has left in `optimizer`: the table it has not reached."""
        state = self.state
        if state is not None and state.in_step and state.optimizer() is optimizer:
            self._leave()
            state.recover(optimizer)

    def recover(self) -> None:
        """End a step that failed, of which nobody has told."""
        state = self.state
        if state is not None and state.in_step and not state.stepping():
            optimizer = state.optimizer()
            if optimizer is not None:
                self.abort_step(optimizer)

    def _enter(self, sparse: bool) -> None:
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

    def _leave(self) -> None:
        """Let the parameter stand for the whole table again. The gradient stays until somebody clears it."""
        param = self.param
        grad = param.grad
        if grad is None or not grad.is_sparse:
            self.grad = grad
        self._grad_version = -1 if self.grad is None else self.grad._version
        if self.grad is None:
            self.ids = self._assigned = None
        elif self._assigned is not None:
            self._use_assigned()
        self.active, self.state_rows, self.in_place, self._waiting_since = None, {}, False, None
        assert self._placeholder is not None
        param.grad, param.data = None, self._placeholder
        param.__class__ = self._kind

    def refresh(self, again: bool = False) -> None:
        """Read the active rows `again`, or if the table has changed since: a step must not undo what was written meanwhile."""
        if self.ids is None:
            return
        if self._touched is not None and self.rows.lag is None:
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
                self.rows.catch_up()
                self.active, self.state_rows = self.table.stored("weight").detach(), {}
            else:
                self.state_rows = self.rows.read(self.ids)
                self.active = self.state_rows.pop("weight")
            self._version = self.table.version

    def _steps_in_place(self) -> bool:
        """Tell whether the next step is one of all rows, which it can take where they are stored."""
        assert self.ids is not None
        every = len(self.ids) == self.table.num_rows > 0
        return every and self.aliased and self.state is not None and self.state.steps_in_place()


def _writable(grad: Tensor) -> Tensor:
    """Return a gradient that can be written in place: not one number that stands for many."""
    expanded = grad.layout == torch.strided and not isinstance(grad, RowGradient) and 0 in grad.stride()
    return grad.clone(memory_format=torch.contiguous_format) if expanded else grad
