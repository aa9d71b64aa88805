"""The two global hooks of torch.optim by which any optimizer trains rows: state in before its step, rows out after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedtransfer.errors import OptimizerError
from speedtransfer.optim import state_dicts
from speedtransfer.optim.handle import Handle, any_handles
from speedtransfer.optim.idle import Rule, rule_for
from speedtransfer.optim.probe import Findings, probe
from speedtransfer.optim.state import RowState

_installed = False


def install() -> None:
    """Register the hooks, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        state_dicts.install()
        _installed = True


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any_handles():
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):  # none, or an argument of another meaning
        _load(optimizer)
        return None
    wrapped = _Closure(closure, optimizer)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


class _Closure:
    """A closure, which runs forward and backward inside the step: rows are known, and loaded, only after it."""

    def __init__(self, closure: Callable[[], Any], optimizer: Optimizer) -> None:
        self._closure, self._optimizer = closure, optimizer
        self.called = False

    def __call__(self) -> Any:
        self.called = True
        loss = self._closure()
        _load(self._optimizer)
        return loss


@torch.no_grad()
def _load(optimizer: Optimizer) -> None:
    for handle, group in state_dicts.handles_of(optimizer):
        handle.check_gradient()
        if handle.ids is None or handle.param.grad is None:
            continue
        if handle.state is None or handle.state.optimizer() is not optimizer:
            _take_over(handle, optimizer, group)
        handle.make_dense()
        state: RowState = handle.state
        handle.refresh(again=state.in_step)  # a step that failed has left its marks on the rows
        state.load(optimizer, group)


def _take_over(handle: Handle, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Let `optimizer` train the table from now on, with fresh state."""
    if optimizer in handle.lost:
        raise OptimizerError(
            f"this {type(optimizer).__name__} trained the table before and its row state is gone: {handle.lost[optimizer]}; "
            "train a table with one optimizer at a time, or make a new one"
        )
    specs = probe(optimizer, group, handle.param, handle.sparse)  # may refuse, and then nothing has changed
    give_state(handle, optimizer, group, specs)


def give_state(handle: Handle, optimizer: Optimizer, group: dict[str, Any], specs: Findings) -> None:
    """Make planes of state for `optimizer`, in place of those that the table has."""
    rule, sparse = way_to_step(handle, optimizer, group, specs)  # may refuse too
    handle.drop_state(f"a new {type(optimizer).__name__} took it over")
    handle.state = RowState(handle, optimizer, specs, rule, sparse)
    state_dicts.watch(optimizer)


def way_to_step(
    handle: Handle, optimizer: Optimizer, group: dict[str, Any], specs: Findings
) -> tuple[Rule | None, bool]:
    """Return the rule for idle rows, if they need one, and whether steps get sparse gradients.

    Raises
    ------
    OptimizerError
        ``idle="exact"``, and what the optimizer does to idle rows is not known.
    """
    if handle.idle != "exact" or specs.gradient == "sparse":  # which leave idle rows alone in torch, too
        return None, specs.gradient == "sparse"
    try:
        return rule_for(optimizer, group, handle.rows.dtype), False
    except OptimizerError:
        if specs.gradient == "either":
            return None, True
        raise


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any_handles():
        ignored = any(isinstance(value, _Closure) and not value.called for value in (*args, *kwargs.values()))
        for handle, group in state_dicts.handles_of(optimizer):
            if ignored and handle.ids is not None and handle.param.grad is not None:
                raise OptimizerError(
                    f"{type(optimizer).__name__} did not call the closure that its step was given, so that the rows of a "
                    "table, which are loaded after it, did not take the step; call step() without a closure"
                )
            if handle.state is not None and handle.state.in_step and handle.state.optimizer() is optimizer:
                handle.state.store(optimizer, group)
