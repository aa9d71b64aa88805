"""State dicts of optimizers that train tables: saved and loaded with whole planes, which stay in host memory.

Torch has hooks for the state dicts of one optimizer, but none for those of all. A state dict may be loaded before the first
step, so `state_dict` and `load_state_dict` of all optimizers register the hooks if there are tables.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.leaves import APART, cloned, leaves, put
from speedtransfer.optim.plane_view import PlaneView
from speedtransfer.optim.probe import PlaneSpec, probe_optimizer
from speedtransfer.optim.state_planes import check_shape
from speedtransfer.tables import Placement

# Planes between the two hooks of a load: torch must not copy them to the device of the parameter, nor cast them to its dtype.
# With `optimizer.state` as it was before, in the place of which torch puts another.
_held: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[tuple[nn.Parameter, dict[str, Tensor]]]]]
_held = weakref.WeakKeyDictionary()

_without_rows: ContextVar[bool] = ContextVar("without_rows", default=False)

# The method of torch, which does not look for tables.
load_plainly = Optimizer.load_state_dict


def preparing(*steps: Callable[[Optimizer], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a method of all optimizers call `steps` first, where an optimizer has tables."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if any_handles() and handles_of(self):
                for step in steps:
                    step(self)
            try:
                return method(self, *args, **kwargs)
            except BaseException:
                # Where it was loaded, and something came into what follows.
                _after_load(self)
                raise

        return called

    return wrap


@contextmanager
def without_rows() -> Iterator[None]:
    """Let state dicts be saved and loaded where several processes own rows; planes are saved as views."""
    token = _without_rows.set(True)
    try:
        yield
    finally:
        _without_rows.reset(token)


def begin(optimizer: Optimizer) -> None:
    """Raise if several processes own the rows of a table; else register the hooks of `optimizer`."""
    for handle, _ in () if _without_rows.get() else handles_of(optimizer):
        if not handle.owners.has_whole:
            raise OptimizerError(
                f"a state dict of {type(optimizer).__name__} is saved or loaded, but the rows of {handle} and their state are "
                f"owned by {handle.owners.exchange.ranks} processes; call st.save_checkpoint(path, model, optimizer) and "
                "st.load_checkpoint in all of them"
            )
    watch(optimizer)


def watch(optimizer: Optimizer) -> None:
    """Register the hooks of `optimizer`, so that those of others see whole planes in every state dict."""
    for kind, hook, last in (
        ("state_dict_pre", show_planes, False),
        ("state_dict_post", _after_save, False),
        ("load_state_dict_pre", _before_load, True),
        ("load_state_dict_post", _after_load, False),
    ):
        hooks = getattr(optimizer, f"_optimizer_{kind}_hooks")
        # A copy of an optimizer has its hooks.
        number = next((number for number, registered in hooks.items() if registered is hook), None)
        if number is None:
            number = getattr(optimizer, f"register_{kind}_hook")(hook).id
        hooks.move_to_end(number, last=last)


def has_other_hooks(optimizer: Optimizer) -> bool:
    """Tell whether there are other hooks for loading a state dict."""
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
    except OptimizerError:
        # The first step will raise it.
        return {}


@torch.no_grad()
def show_planes(optimizer: Optimizer) -> None:
    """Put whole planes, caught up, into the state, also after a step that failed (Ctrl-C, then a checkpoint)."""
    for handle, group in handles_of(optimizer):
        if handle.state is not None and handle.state.optimizer() is optimizer:
            handle.step.abort(optimizer)
            # A child of fork copies the rows of its parent, after the save; and who streams them beside sees to it.
            if handle.table.writable and not _without_rows.get():
                handle.rows.catch_up()
            handle.table.wait()
        else:
            handle.check_not_lost(optimizer)
            _begin_anew(optimizer, group, handle)


def _begin_anew(optimizer: Optimizer, group: dict[str, Any], handle: Handle) -> None:
    """Give rows that are those of new ids by now their initial state, in loaded state that no step has taken yet."""
    state, fresh = optimizer.state.get(handle.param), handle.id_space.fresh_rows()
    if not state or fresh is None or not len(fresh):
        return
    found, changed = leaves(state), dict[str, Tensor]()
    for name, spec in _planes(optimizer, group, handle).items():
        value = found.get(name)
        if type(value) is Tensor and value.dim():
            # A copy: it may be that of the dict that was loaded.
            changed[name], rows = value.clone(), fresh[fresh < len(value)].to(value.device)
            initial = handle.rows.read(rows.to(handle.table.device))["weight"] if spec.initial is None else spec.initial
            changed[name][rows] = torch.as_tensor(initial, dtype=value.dtype, device=value.device)
    put(state, changed)


@torch.no_grad()
def _after_save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace views of planes in a state dict by plain tensors; the state itself is not changed.

    State that a constructor made for no rows (Adagrad) gets its initial value. Strided planes (layout "rows") become
    contiguous: fused optimizers of torch on the CPU do not look at strides.
    """
    for handle, group, key in [*_entries(optimizer, state_dict)]:
        entry, own = state_dict["state"][key], handle.state
        if own is not None and own.optimizer() is optimizer:
            # Later steps must not put the state of their active rows there.
            state_dict["state"][key] = entry = own.between_steps(entry)
            if not entry:
                del state_dict["state"][key]
        streamed = own.stored(entry) if own is not None and _without_rows.get() else {}
        found = {name: value for name, value in leaves(entry).items() if name not in streamed}
        copied = {name: value.decode() for name, value in found.items() if isinstance(value, PlaneView)}
        copied |= {
            name: value.contiguous()
            for name, value in (found | copied).items()
            if not value.is_contiguous() and 0 not in value.stride()
        }
        if copied:
            state_dict["state"][key] = entry = cloned(entry, tensors=False)
            put(entry, copied)
        found |= copied
        # Without rows, or one value expanded, which a dense optimizer could not write to; or of before the table grew.
        empty = {name for name, value in found.items() if value.dim() and (not len(value) or 0 in value.stride())}
        if handle.has_grown and (own is None or own.optimizer() is not optimizer):
            empty |= {name for name, value in found.items() if value.dim() and len(value) in handle.rows.grown_from}
        if not empty:
            continue
        whole, weight = {}, handle.rows.whole("weight")
        for name, spec in _planes(optimizer, group, handle).items():
            if name in empty:
                whole[name] = weight.new_empty(len(weight), *spec.tail, dtype=spec.dtype)
                whole[name].copy_(weight) if spec.initial is None else whole[name].fill_(spec.initial)
                whole[name][: len(found[name])] = found[name]
        state_dict["state"][key] = entry = cloned(entry, tensors=False)
        put(entry, whole)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check the shapes of planes, and keep them from being copied by torch."""
    state, held = dict(state_dict["state"]), []
    for handle, group, key in _entries(optimizer, state_dict):
        if APART in state[key] and handle.features is None:
            raise OptimizerError(
                f"the state to load for {handle} is that of the features of a MultiEmbedding, each with its own steps, "
                "but this is none; load it for a MultiEmbedding of the same features"
            )
        found = leaves(state[key])
        planes = {name: spec for name, spec in _planes(optimizer, group, handle).items() if name in found}
        _expect(handle, [found[name] for name in planes])
        for name, spec in planes.items():
            if found[name].dim() == 0 or len(found[name]):
                num_rows = handle.rows.num_loadable
                if handle.id_space.come_and_go and handle.rows.placement is None and found[name].dim():
                    # Of a table whose ids may be loaded next; the step will tell.
                    num_rows = len(found[name])
                check_shape(name, found[name], (num_rows, *spec.tail))
        lengths = {len(found[name]) for name in planes if found[name].dim()} or {handle.rows.num_loadable}
        # Also planes that the optimizer does not use now.
        rows = [name for name, value in found.items() if name in planes or (value.dim() and len(value) in lengths)]
        state[key] = cloned(state[key], tensors=False)
        put(state[key], {name: found[name].new_empty(0) for name in rows})
        held.append((handle.param, {name: found[name] for name in rows}))
    _held[optimizer] = optimizer.state, held
    return {**state_dict, "state": state}


def _expect(handle: Handle, planes: list[Tensor]) -> None:
    """Note whose state is loaded for a table whose rows belong to ids: those loaded with the model, or present ones."""
    lengths, rows = {len(plane) for plane in planes if plane.dim()}, handle.rows
    expected = None if rows.placement is None else rows.placement.num_saved
    if handle.id_space.come_and_go and expected not in lengths and handle.table.num_rows in lengths:
        rows.placement = Placement(handle.table.num_rows)


def _after_load(optimizer: Optimizer) -> None:
    """Put the planes into the optimizer's state; the next step copies them into the table."""
    before, held = _held.get(optimizer, (optimizer.state, []))
    for param, planes in held if optimizer.state is not before else ():
        put(optimizer.state[param], planes)
        handle = find_handle(param)
        if handle is not None:
            handle.lost.pop(optimizer, None)
            handle.id_space.note_loaded_state(optimizer)
    _held.pop(optimizer, None)
