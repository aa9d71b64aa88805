"""Lend the parameter of a table to the step of an optimizer: it holds the active rows, and the optimizer their state."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.cuda import WARM_UP, capture_number, check_not_capturing, is_capturing
from speedtransfer.errors import DeviceError, OptimizerError
from speedtransfer.optim.fused_step import make_step, plan_step
from speedtransfer.optim.probe import sparse_gradient
from speedtransfer.optim.state import RowState
from speedtransfer.optim.table_param import TableParam
from speedtransfer.tables import is_padded


class Stepping(TableParam):
    """The part of a :class:`Handle` that lends the parameter to a step."""

    def check_step_capturable(self, optimizer: Optimizer) -> None:
        """Raise if a CUDA graph is being captured, and the step of `optimizer` cannot be part of it."""
        if not is_capturing():
            return
        self.check_capturable(writes=True)
        state = self.state
        if self._capture is None:
            raise DeviceError(
                f"{self} has a gradient from before the capture of a CUDA graph, and replays would not see later ones; "
                "capture forward and backward with the step, after zero_grad(set_to_none=True)"
            )
        if state is None or state.optimizer() is not optimizer or not state.has_stepped():
            check_not_capturing(f"the first step of this {type(optimizer).__name__} for {self}", WARM_UP)
        elif state.sparse:
            check_not_capturing(f"a step with the sparse gradient of {self}", "use an optimizer for dense gradients")

    def begin_step(self, optimizer: Optimizer, group: dict[str, Any], frame: FrameType | None) -> None:
        """Make the parameter hold the active rows and their gradient, and `optimizer` their state.

        `group` is the parameter group of the table; `frame` that of the function which runs the step.
        """
        state = self.state
        assert state is not None
        with self.rows.lock:
            if state.sparse:
                # A sparse gradient has as many rows as it says.
                self.trim()
            if self.features is not None:
                self.features.begin(self, optimizer)
            self.refresh()
            fuses = not self.in_place and self.table.runs_kernels and not self._is_apart()
            self._fused = plan_step(state, optimizer, group) if fuses else None
            if self._fused is None:
                state.load(optimizer, group, frame, None if self.in_place else self.ids, self.state_rows)
                # A probe may have assigned the gradient anew.
                if self.active is None:
                    self.refresh()
            else:
                state.begin_elsewhere(optimizer, frame)
            self._enter(state.sparse)
            if self.features is not None:
                self.features.lend(self, optimizer, group)

    def end_step(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state to the table, and make the parameter a placeholder again.

        Once `_made` is set there is a step: what interrupts `_complete` has it called again, at the latest by the next use.
        """
        state = self.state
        assert state is not None
        with self.rows.lock:
            late = self.id_space.late_rows() if self.id_space.come_and_go else None
            state.has_ended = True
            if self.features is not None:
                self.features.take_back(self, optimizer)
            if self.rows.table.watched:
                self.table.discount(self._entered_at, self.param._version - self._entered)
            if self._fused is None:
                self._made = state.made(optimizer, group, None if self.in_place else self.ids)
            else:
                self._make_fused_step(state)
            try:
                self._complete(state)
            except BaseException:
                try:
                    self._complete(state)
                except Exception:
                    # It cannot be written: there is no step.
                    self._made = None
                    raise
                raise
            if self.rows.lag is not None and self.rows.lag.is_long:
                self.rows.catch_up()
            if not self.owners.is_alone:
                self.owners.steps += 1
                self.owners.after_step()
            if self.id_space.come_and_go:
                self.id_space.count_step(late)

    def _make_fused_step(self, state: RowState) -> None:
        assert self._fused is not None
        assert self.ids is not None
        assert self.grad is not None
        assert self.active is not None
        make_step(self._fused, state, self.ids, self.grad, self.active)
        before = self.table.version if self.rows.table.watched else 0
        # As by an optimizer.
        torch.autograd.graph.increment_version(self.param)
        self.table.discount(before, 1)

    def _complete(self, state: RowState) -> None:
        """Write the step that was made, and leave it; called again after an interrupt it goes on."""
        if self._made is not None:
            state.store(self._made)
        # A graph may have saved rows that were written: its backward raises, as in torch.
        torch.autograd.graph.increment_version([node.values for node in self.alive()])
        self.joined.clear()
        self._leave()
        state.running = None
        self._made = None

    def abort_step(self, optimizer: Optimizer, interrupted: bool = False) -> None:
        """End a step that failed and restore the state in `optimizer`; nothing was written to the table.

        The step of another thread goes on.
        """
        state = self.state
        if state is None or not state.running or state.stepping_elsewhere():
            return
        if self._made is not None:
            self._complete(state)
        elif state.optimizer() is optimizer:
            if self.features is not None:
                self.features.restore(self, optimizer)
            self._leave()
            state.recover(optimizer, interrupted)

    def recover(self) -> None:
        """End a step that failed without calling a hook, or one that runs and has changed nothing, if there is one.

        The step of another thread goes on: here the rows are those before it.
        """
        state = self.state
        if state is not None and state.running and not state.stepping_elsewhere():
            if self._made is None and self.is_changed() and state.stepping():
                raise OptimizerError(
                    f"{self} is used in the middle of a step, when an optimizer has changed some of its rows and not written "
                    "them to the table yet; use it before the step or after it"
                )
            optimizer = state.optimizer()
            if optimizer is not None:
                self.abort_step(optimizer)

    def check_steps_here(self, what: str) -> None:
        """Raise if another thread steps: what it has of the rows and their gradient must not change meanwhile."""
        if self.state is not None and self.state.stepping_elsewhere():
            raise OptimizerError(
                f"{what} for {self} in the middle of a step of another thread; let one thread at a time run backward, step "
                "and zero_grad for a table (with a lock), or give each thread a model of its own"
            )

    def _enter(self, sparse: bool) -> None:
        param = self.param_ref()
        assert param is not None
        assert self.active is not None
        param.__class__ = nn.Parameter
        param.grad = None
        # Without a gradient the optimizer leaves it alone.
        if self._fused is None:
            param.data = self.active
            param.grad = self._sparse_gradient() if sparse else self.grad
        self._lent = True
        self._entered, table = param._version, self.rows.table
        self._entered_at = table.version if table.watched else 0

    def _is_apart(self) -> bool:
        return self.features is not None and self.features.is_apart

    def is_changed(self) -> bool:
        """Tell whether the optimizer has changed the active rows since the step began."""
        return self.param._version != self._entered or (self.features is not None and self.features.is_changed())

    def _sparse_gradient(self) -> Tensor:
        """Return the gradient as a sparse tensor over the active rows, without the padding row, as in torch."""
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
        """Make the parameter a placeholder again. The gradient stays until it is cleared."""
        param = self.param_ref()
        assert param is not None
        # Each line may be the last before an interrupt, after which all is called again.
        if self._lent:
            grad = param.grad
            if self._fused is None and (grad is None or not grad.is_sparse):
                self.grad = grad
            if self.grad is None:
                self.ids = self._assigned = None
            elif self._assigned is not None:
                self._use_assigned()
            else:
                self._grad_version = self.grad._version
            self._lent = False
        if self.features is not None:
            self.features.end()
        self.active, self.state_rows, self.in_place, self._waiting_since = None, {}, False, None
        self._fused = None
        assert self._placeholder is not None
        if param.__class__ is not self._kind:
            param.grad, param.data = None, self._placeholder
            param.__class__ = self._kind

    def _use_assigned(self) -> None:
        """Take every row of the assigned gradient as active until the step, which looks for zeros."""
        assert self._assigned is not None
        ids = torch.arange(len(self._assigned), device=self._assigned.device)
        self._set_gradient(ids, self._assigned)
        self._touched = ids[:0]

    def is_active(self, ids: Tensor) -> bool:
        """Tell whether one of the rows `ids` (n,) has a pending gradient."""
        # Another thread may make a step.
        active = self.ids
        if active is None or not len(active):
            return False
        ids = ids.to(active.device)
        places = torch.searchsorted(active, ids).clamp_(max=len(active) - 1)
        return bool((active[places] == ids).any())

    def refresh(self) -> None:
        """Read the active rows again if the table has changed since: a step must not undo those writes."""
        if self.ids is None:
            return
        # A gradient given for all rows is one of rows that are not trained, too.
        given = self.id_space.come_and_go and (
            self._touched is not None or self._assigned is not None or self.has_hooks()
        )
        if self._touched is not None and self.rows.lag is None:
            assert self.grad is not None
            touched = (self.grad != 0).any(dim=1)
            touched[self._touched] = True
            ids = touched.nonzero().flatten()
            self._set_gradient(ids, self.grad[ids])
        self._touched = None
        self._exposed, exposed = False, self._exposed
        exposed = exposed or any(reference() is not None for reference in self._aliases)
        rows, self._exposed_rows = self._exposed_rows, []
        exposed = exposed or any(map(self.is_active, rows))
        # Rows that another graph, or none, has read may have changed.
        exposed = exposed or (self.ids.is_cuda and self._capture != capture_number())
        if exposed or self.active is None or self._version != self.rows.table.version:
            every = len(self.ids) == self.table.num_rows > 0 and not is_padded(self.ids)
            # A step of all rows can update them where they are stored.
            every = every and not self._is_apart()
            self.in_place = every and self.aliased and self.state is not None and self.state.steps_in_place()
            if self.in_place:
                self.rows.catch_up()
                self.active, self.state_rows = self.table.stored("weight").detach(), {}
            else:
                self.state_rows = self.rows.read(self.ids)
                self.active = self.state_rows.pop("weight")
            self._version = self.table.version
        if given and self.grad is not None:
            self.grad = self.id_space.own_gradient(self.ids, self.grad)
            self._grad_version = self.grad._version
