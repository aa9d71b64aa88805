"""The two global hooks of torch.optim by which any optimizer trains rows: state in before its step, rows out after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.state import RowState

_installed = False
_replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def install() -> None:
    """Register the hooks, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def _active_handles(optimizer: Optimizer) -> Iterator[tuple[Handle, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                handle = find_handle(param)
                if handle is not None and handle.ids is not None:
                    yield handle, group


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any_handles():
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _load(optimizer)
        return None
    # The closure runs forward and backward inside the step: rows are known only after it.
    wrapped = _then_load(closure, optimizer)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _then_load(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    def wrapped() -> Any:
        loss = closure()
        _load(optimizer)
        return loss

    return wrapped


@torch.no_grad()
def _load(optimizer: Optimizer) -> None:
    for handle, group in _active_handles(optimizer):
        state: RowState | None = handle.state
        owner = state.optimizer() if state is not None else None
        if state is None or owner is not optimizer:
            if optimizer in _replaced:
                raise OptimizerError(
                    f"this {type(optimizer).__name__} trained the table before another optimizer took it over, and its row "
                    "state is gone; train a table with one optimizer at a time, or make a new one"
                )
            if state is not None:
                if owner is not None:
                    _replaced.add(owner)
                state.drop()
            handle.state = state = RowState(handle, optimizer, group)
        handle.refresh()
        state.load(optimizer)


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any_handles():
        for handle, group in _active_handles(optimizer):
            handle.state.store(optimizer, group)
