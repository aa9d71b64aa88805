"""State dicts of optimizers that train tables: whole planes, which stay in host memory on their way in and out.

Torch has hooks for the state dicts of one optimizer, and none for those of all optimizers. An optimizer must have them before
its first step, when it meets a table for the first time here; so its `state_dict` and `load_state_dict` look for tables first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.leaves import cloned, leaves, put
from speedtransfer.optim.placeholder import EncodedPlane
from speedtransfer.optim.probe import PlaneSpec, probe_optimizer
from speedtransfer.optim.state import check_shape

# Between the two hooks of a load: planes that torch must not copy to the device of the parameter, nor cast to its dtype.
_held: weakref.WeakKeyDictionary[Optimizer, list[tuple[nn.Parameter, dict[str, Tensor]]]] = weakref.WeakKeyDictionary()


load_plainly = Optimizer.load_state_dict  # without a look for tables


def install() -> None:
    """Make every optimizer look for tables before it saves, copies or loads its state."""
    Optimizer.state_dict = _watching(Optimizer.state_dict)  # type: ignore[method-assign]
    Optimizer.load_state_dict = _watching(Optimizer.load_state_dict)  # type: ignore[method-assign]
    Optimizer.__getstate__ = _saving(Optimizer.__getstate__)  # type: ignore[method-assign]


def _watching(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any_handles() and handles_of(self):
            watch(self)
        return method(self, *args, **kwargs)

    return watched


def _saving(method: Callable[..., Any]) -> Callable[..., Any]:
    """Copies and pickles get planes that are up to date, as state dicts do."""

    @functools.wraps(method)
    def saving(self: Optimizer) -> Any:
        if any_handles():
            _before_save(self)
        return method(self)

    return saving


def watch(optimizer: Optimizer) -> None:
    """Register the hooks of `optimizer`, once."""
    if (
        _before_load not in optimizer._optimizer_load_state_dict_pre_hooks.values()
    ):  # a copy may have brought them along
        optimizer.register_state_dict_pre_hook(_before_save)
        optimizer.register_state_dict_post_hook(_after_save)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_after_load)


def has_other_hooks(optimizer: Optimizer) -> bool:
    """Tell whether somebody else has registered hooks on what the optimizer loads."""
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return any(hook not in (_before_load, _after_load) for hook in (*before.values(), *after.values()))


def handles_of(optimizer: Optimizer) -> list[tuple[Handle, dict[str, Any]]]:
    """Return the handles among the parameters of `optimizer` with their groups."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            handle = find_handle(param)
            if handle is not None:
                found.append((handle, group))
    return found


def _entries(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Handle, dict[str, Any], Any]]:
    """Yield the handles with the group and the key that they have in `state_dict`."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for param, key in zip(group["params"], saved["params"], strict=False):
            handle = find_handle(param)
            if handle is not None and state_dict["state"].get(key):
                yield handle, {**group, **{k: v for k, v in saved.items() if k != "params"}}, key


def _planes(optimizer: Optimizer, group: dict[str, Any], handle: Handle) -> dict[str, PlaneSpec]:
    try:
        return probe_optimizer(optimizer, group, handle.param, handle.sparse)
    except OptimizerError:  # the first step will say why
        return {}


@torch.no_grad()
def _before_save(optimizer: Optimizer) -> None:
    """Give the whole planes, up to date, also where the last step failed (Ctrl-C, and then a checkpoint)."""
    for handle, _ in handles_of(optimizer):
        if handle.state is not None and handle.state.optimizer() is optimizer:
            handle.abort_step(optimizer)
            handle.rows.catch_up()
            handle.table.wait()


@torch.no_grad()
def _after_save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put values where the state, which is not itself changed, has something else.

    That is planes stored in 8 bits, and what a constructor made for a parameter without rows (Adagrad), where now stands what
    rows start from.
    """
    for handle, group, key in _entries(optimizer, state_dict):
        entry = state_dict["state"][key]
        encoded = {name: value.decode() for name, value in leaves(entry).items() if isinstance(value, EncodedPlane)}
        if encoded:
            state_dict["state"][key] = entry = cloned(entry, tensors=False)
            put(entry, encoded)
        # Of no rows, or one number in the shape of all, which a dense optimizer could not write to.
        empty = {
            name for name, value in leaves(entry).items() if value.dim() and (not len(value) or 0 in value.stride())
        }
        if not empty:
            continue
        whole, weight = {}, handle.rows.whole("weight")
        for name, spec in _planes(optimizer, group, handle).items():
            if name in empty:
                whole[name] = weight.new_empty(len(weight), *spec.tail, dtype=spec.dtype)
                whole[name].copy_(weight) if spec.initial is None else whole[name].fill_(spec.initial)
        state_dict["state"][key] = entry = cloned(entry, tensors=False)  # that of the optimizer stays as it is
        put(entry, whole)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Take the planes out of what torch will copy, once their shapes have been found to fit."""
    state, held = dict(state_dict["state"]), []
    for handle, group, key in _entries(optimizer, state_dict):
        found = leaves(state[key])
        planes = {name: spec for name, spec in _planes(optimizer, group, handle).items() if name in found}
        for name, spec in planes.items():
            if found[name].dim() == 0 or len(found[name]):
                check_shape(name, found[name], (handle.table.num_rows, *spec.tail))
        state[key] = cloned(state[key], tensors=False)
        put(state[key], {name: found[name].new_empty(0) for name in planes})
        held.append((handle.param, {name: found[name] for name in planes}))
    _held[optimizer] = held
    return {**state_dict, "state": state}


def _after_load(optimizer: Optimizer) -> None:
    """Hand the planes to the optimizer; the next step copies them into the table."""
    for param, planes in _held.pop(optimizer, []):
        put(optimizer.state[param], planes)
