"""Lend the parameter of a table to the step of an optimizer: it holds the active rows, and the optimizer their state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.cuda import WARM_UP, check_not_capturing, is_capturing
from speedtransfer.errors import DeviceError, OptimizerError, RowIndexError
from speedtransfer.optim.features import differ
from speedtransfer.optim.fused_step import FusedStep, make_step, plan_step
from speedtransfer.optim.pending import PendingGradient
from speedtransfer.optim.probe import sparse_gradient
from speedtransfer.optim.state import MadeStep, RowState

# From how many bytes on all idle rows of a table take so long to catch up that people should know why.
_LARGE = 1 << 26


class Step:
    """The step of an optimizer that runs, if one does: its parameter is that of the table, for as long as it runs.

    Parameters
    ----------
    handle : Handle
        Of the table, which has this object.
    pending : PendingGradient
        Of the same table: the active rows and their gradient.
    """

    def __init__(self, handle: Any, pending: PendingGradient) -> None:
        # Weak: a cycle would keep the table until the next gc.
        self._handle: Callable[[], Any] = weakref.ref(handle)
        self.pending = pending
        # How a kernel makes the step, instead of the optimizer.
        self._fused: FusedStep | None = None
        # Whether the optimizer has the parameter; the step that was made, until it is written.
        self._lent = False
        self._made: MadeStep | None = None
        # How many steps have ended.
        self.count = 0
        # The version of the parameter, and that of the table, when the step began; the active rows then, for `watch`.
        self._entered = self._entered_at = 0
        self._before: Tensor | None = None

    def check_capturable(self, optimizer: Optimizer) -> None:
        """Raise if a CUDA graph is being captured, and the step of `optimizer` cannot be part of it."""
        handle = self._handle()
        if not is_capturing():
            return
        handle.check_capturable(writes=True)
        state = handle.state
        if self.pending.capture is None:
            raise DeviceError(
                f"{handle} has a gradient from before the capture of a CUDA graph, and replays would not see later ones; "
                "capture forward and backward with the step, after zero_grad(set_to_none=True)"
            )
        if state is None or state.optimizer() is not optimizer or not state.has_stepped():
            check_not_capturing(f"the first step of this {type(optimizer).__name__} for {handle}", WARM_UP)
        elif state.sparse:
            check_not_capturing(f"a step with the sparse gradient of {handle}", "use an optimizer for dense gradients")

    def begin(self, optimizer: Optimizer, group: dict[str, Any], frame: FrameType | None) -> None:
        """Make the parameter hold the active rows and their gradient, and `optimizer` their state.

        `group` is the parameter group of the table; `frame` that of the function which runs the step.
        """
        handle, pending = self._handle(), self.pending
        state = handle.state
        assert state is not None
        with handle.rows.lock:
            if state.sparse:
                # A sparse gradient has as many rows as it says.
                pending.trim()
            if handle.features is not None:
                handle.features.begin(handle, optimizer)
            pending.refresh()
            apart = handle.features is not None and handle.features.is_apart
            fuses = not pending.in_place and handle.rows.table.runs_kernels and not apart
            self._fused = plan_step(state, optimizer, group, pending.state_rows) if fuses else None
            if self._fused is None:
                ids = None if pending.in_place else pending.ids
                state.load(optimizer, group, frame, ids, pending.state_rows, pending.known)
                # A probe may have assigned the gradient anew.
                if pending.active is None:
                    pending.refresh()
            else:
                state.begin_elsewhere(optimizer, group, frame)
            self._enter(state.sparse)
            if handle.features is not None:
                handle.features.lend(handle, optimizer, group)

    def end(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state to the table, and make the parameter a placeholder again.

        Once `_made` is set there is a step: what interrupts `_complete` has it called again, at the latest by the next use.
        """
        handle = self._handle()
        state = handle.state
        assert state is not None
        with handle.rows.lock:
            late = handle.id_space.late_rows() if handle.id_space.come_and_go else None
            state.has_ended = True
            if handle.features is not None:
                handle.features.take_back(handle, optimizer)
            if handle.rows.table.watched:
                handle.table.discount(self._entered_at, handle.param._version - self._entered)
            if self._fused is None:
                ids = None if self.pending.in_place else self.pending.ids
                self._made = state.made(optimizer, group, ids, self.pending.known)
            else:
                self._make_fused_step(state, optimizer, group)
            try:
                self._complete(state)
            except RowIndexError:
                # Of a lookup that a device has made, and tells of before anything is written: no step is made of its gradient.
                self._made = None
                raise
            except BaseException:
                try:
                    self._complete(state)
                except Exception:
                    # It cannot be written: there is no step.
                    self._made = None
                    raise
                raise
            if handle.rows.lag is not None and handle.rows.lag.is_long:
                handle.rows.catch_up()
            if handle.rows.table.open_views.made:
                self._show_rows()
            if not handle.owners.is_alone:
                handle.owners.steps += 1
                handle.owners.after_step()
            if handle.id_space.come_and_go:
                handle.id_space.count_step(late)

    def _show_rows(self) -> None:
        """Write what rows have missed, and what a cache has of them, to where somebody may look."""
        rows = self._handle().rows
        # Not by processes together, each of which would have to.
        if not rows.table.has_views or rows.own is not None or is_capturing():
            return
        if rows.lag and rows.table.nbytes > _LARGE:
            warnings.warn(
                f"a tensor over all rows of {self._handle()} is kept (weight.data, state_dict(), what it was made of): "
                f"each step moves all {rows.table.nbytes:,} bytes; drop it, or keep a copy (.clone())",
                stacklevel=3,
            )
        rows.catch_up()
        rows.table.wait()

    def _make_fused_step(self, state: RowState, optimizer: Optimizer, group: dict[str, Any]) -> None:
        handle, pending = self._handle(), self.pending
        assert self._fused is not None
        assert pending.ids is not None
        assert pending.grad is not None
        assert pending.active is not None
        rows = pending.ids, pending.grad, pending.active, pending.state_rows
        make_step(self._fused, state, optimizer, group, *rows, pending.known)
        before = handle.table.version if handle.rows.table.watched else 0
        # As by an optimizer.
        torch.autograd.graph.increment_version(handle.param)
        handle.table.discount(before, 1)

    def _complete(self, state: RowState) -> None:
        """Write the step that was made, and leave it; called again after an interrupt it goes on."""
        handle = self._handle()
        if self._made is not None:
            state.store(self._made)
        # A graph may have saved rows that were written: its backward raises, as in torch.
        torch.autograd.graph.increment_version([node.values for node in handle.views.alive()])
        handle.views.joined.clear()
        self.count += 1
        self._leave()
        state.running = None
        self._made = None

    def abort(self, optimizer: Optimizer, interrupted: bool = False) -> None:
        """End a step that failed and restore the state in `optimizer`; nothing was written to the table.

        The step of another thread goes on.
        """
        handle = self._handle()
        state = handle.state
        if state is None or not state.running or state.stepping_elsewhere():
            return
        if self._made is not None:
            self._complete(state)
        elif state.optimizer() is optimizer:
            if handle.features is not None:
                handle.features.restore(handle, optimizer)
            self._leave()
            state.recover(optimizer, interrupted)

    def recover(self) -> None:
        """End a step that failed without calling a hook, or one that runs and has changed nothing, if there is one.

        The step of another thread goes on: here the rows are those before it.
        """
        handle = self._handle()
        state = handle.state
        if state is not None and state.running and not state.stepping_elsewhere():
            if self._made is None and self.is_changed() and state.stepping():
                raise OptimizerError(
                    f"{handle} is used in the middle of a step, when an optimizer has changed some of its rows and not "
                    "written them to the table yet; use it before the step or after it"
                )
            optimizer = state.optimizer()
            if optimizer is not None:
                self.abort(optimizer)

    def check_steps_here(self, what: str) -> None:
        """Raise if another thread steps: what it has of the rows and their gradient must not change meanwhile."""
        handle = self._handle()
        if handle.state is not None and handle.state.stepping_elsewhere():
            raise OptimizerError(
                f"{what} for {handle} in the middle of a step of another thread; let one thread at a time run backward, step "
                "and zero_grad for a table (with a lock), or give each thread a model of its own"
            )

    def _enter(self, sparse: bool) -> None:
        handle = self._handle()
        param = handle.param_ref()
        assert param is not None
        assert self.pending.active is not None
        param.__class__ = nn.Parameter
        param.grad = None
        # Without a gradient the optimizer leaves it alone.
        if self._fused is None:
            param.data = self.pending.active
            param.grad = self._sparse_gradient() if sparse else self.pending.grad
        self._lent = True
        self._entered, table = param._version, handle.rows.table
        self._entered_at = table.version if table.watched else 0

    def is_changed(self) -> bool:
        """Tell whether the optimizer has changed the active rows since the step began: by torch's count, or since `watch`."""
        handle, before = self._handle(), self._before
        if handle.param._version != self._entered or (before is not None and differ(handle.param.data, before)):
            return True
        return handle.features is not None and handle.features.is_changed(before)

    def watch(self) -> None:
        """Keep the active rows, to tell whether the optimizer writes to them in a way that torch does not count: .data."""
        if self._lent and self._fused is None:
            self._before = self._handle().param.data.clone()

    def _sparse_gradient(self) -> Tensor:
        """Return the gradient as a sparse tensor over the active rows, without the padding row, as in torch."""
        handle, pending = self._handle(), self.pending
        assert pending.ids is not None
        assert pending.grad is not None
        if pending.used_whole:
            raise OptimizerError(
                f"{handle} was made with sparse=True and used as a whole (in a product, a penalty), or given a dense "
                "gradient; make the embedding with sparse=False, or use the rows that are needed (emb(ids))"
            )
        grad, rows = pending.grad, None
        if handle.padding_idx is not None:
            rows = (pending.ids != handle.padding_idx).nonzero().flatten()
            grad = grad[rows] if len(rows) < len(grad) else grad
        return sparse_gradient(grad, rows, len(pending.ids))

    def _leave(self) -> None:
        """Make the parameter a placeholder again. The gradient stays until it is cleared."""
        handle, pending = self._handle(), self.pending
        param = handle.param_ref()
        assert param is not None
        # Each line may be the last before an interrupt, after which all is called again.
        if self._lent:
            grad = param.grad
            if self._fused is None and (grad is None or not grad.is_sparse):
                pending.grad = grad
            if pending.grad is None:
                pending.ids = pending.assigned = None
            elif pending.assigned is not None:
                pending.use_assigned()
            else:
                pending.grad_version, pending.zeroed_at = pending.grad._version, -1
            self._lent = False
        self._before = None
        if handle.features is not None:
            handle.features.end()
        pending.active, pending.state_rows, pending.in_place, pending.waiting_since = None, {}, False, None
        self._fused = None
        assert handle.shown_as is not None
        if param.__class__ is not handle.kind:
            param.grad, param.data = None, handle.shown_as
            param.__class__ = handle.kind
