"""The two global hooks of torch.optim by which any optimizer trains rows: state in before its step, rows out after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.encoded import EncodedPlane
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.probe import probe
from speedtransfer.optim.state import RowState

_installed = False
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that call _before_state_dict


def install() -> None:
    """Register the hooks, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def _handles_of(optimizer: Optimizer) -> Iterator[tuple[Handle, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            handle = find_handle(param)
            if handle is not None:
                yield handle, group


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any_handles():
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):  # none, or an argument of another meaning
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
    for handle, group in _handles_of(optimizer):
        handle.check_gradient()
        if handle.ids is None or handle.param.grad is None:
            continue
        if handle.state is None or handle.state.optimizer() is not optimizer:
            _take_over(handle, optimizer, group)
        state: RowState = handle.state
        handle.refresh(again=state.in_step)  # a step that failed has left its marks on the rows
        state.load(optimizer)


def _take_over(handle: Handle, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Let `optimizer` train the table from now on, with fresh state."""
    if optimizer in handle.lost:
        raise OptimizerError(
            f"this {type(optimizer).__name__} trained the table before and its row state is gone: {handle.lost[optimizer]}; "
            "train a table with one optimizer at a time, or make a new one"
        )
    specs = probe(optimizer, group, handle.param)  # may refuse, and then nothing has changed
    handle.drop_state(f"a new {type(optimizer).__name__} took it over")
    handle.state = RowState(handle, optimizer, specs)
    if optimizer not in _watched:
        optimizer.register_state_dict_pre_hook(_before_state_dict)
        optimizer.register_state_dict_post_hook(_after_state_dict)
        _watched.add(optimizer)


@torch.no_grad()
def _before_state_dict(optimizer: Optimizer) -> None:
    """Give the whole planes, up to date, also where the last step failed (Ctrl-C, and then a checkpoint)."""
    for handle, _ in _handles_of(optimizer):
        if handle.state is not None and handle.state.optimizer() is optimizer:
            handle.state.recover(optimizer)
            handle.table.wait()


@torch.no_grad()
def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put the values of planes that are stored in 8 bits into the state dict, and not into the optimizer's own state."""
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict) and any(isinstance(value, EncodedPlane) for value in entry.values()):
            state_dict["state"][key] = {
                name: value.decode() if isinstance(value, EncodedPlane) else value for name, value in entry.items()
            }


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any_handles():
        for handle, group in _handles_of(optimizer):
            if handle.state is not None and handle.state.in_step and handle.state.optimizer() is optimizer:
                handle.state.store(optimizer, group)
