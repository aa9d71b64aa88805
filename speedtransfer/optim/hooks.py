"""Hooks of torch.optim that let any optimizer train rows: load rows and their state before its step, store them after it."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from speedtransfer.eager import uncompiled
from speedtransfer.errors import OptimizerError
from speedtransfer.idle import Rule, choose_rule, has_rule
from speedtransfer.interrupts import is_interrupt
from speedtransfer.optim import replicas, sent, state_dicts
from speedtransfer.optim.gradient_exchange import described, exchange_gradients
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.leaves import leaves, put
from speedtransfer.optim.pending import count_step
from speedtransfer.optim.plane_view import PlaneView
from speedtransfer.optim.probe import Findings, Known, leaves_idle_rows, one_step, probe_optimizer
from speedtransfer.optim.state import RowState
from speedtransfer.tables import have_same_rows, overlap


def guarding_steps(hooking: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Optimizer.profile_hook_step``, by which torch wraps the steps of a class, so that they end if they raise.

    Torch calls no hook then, and the parameter would stay the active rows.
    """

    @functools.wraps(hooking)
    def hook(step: Callable[..., Any]) -> Callable[..., Any]:
        hooked: Any = hooking(step)
        # As torch marks the methods that it wraps: the probe looks for the original step.
        hooked.hooked = True
        return _recovering(hooked)

    return hook


def guard_steps() -> None:
    """Guard the steps that torch has wrapped, of classes whose optimizers there have been."""
    kinds: list[type[Optimizer]] = [Optimizer]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        step: Any = vars(kind).get("step")
        if getattr(step, "hooked", False):
            kind.step = _recovering(step)  # type: ignore[method-assign]


def _recovering(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            _recover(args[0], is_interrupt(error))
            raise

    return called


# Functions that a step runs in: as torch wraps it, and around that as we do, which is what a compiled step keeps. By names, as
# compiled code is another object.
_AROUND_STEPS = {
    function.__code__.co_name: function.__code__.co_filename
    for function in (Optimizer.profile_hook_step(print), _recovering(print))
}


def _frame_of_step() -> FrameType | None:
    """Return the frame of the step whose hook runs; None within a function that is compiled as a whole."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _AROUND_STEPS.get(code.co_name) == code.co_filename:
            break
        frame = frame.f_back
    return frame


def _recover(optimizer: Optimizer, interrupted: bool) -> None:
    _forget_closure(optimizer)
    for handle, _ in state_dicts.handles_of(optimizer):
        if handle.state is not None and not handle.state.stepping():
            handle.step.abort(optimizer, interrupted)


@uncompiled
def before_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make `_before_step` the last hook before the steps of `optimizer`, and `_after_step` the first after them.

    The hooks of others see the whole table, and gradients before they are lent.
    """
    if not any_handles():
        return
    count_step()
    if len(optimizer._optimizer_step_pre_hooks) > 1 or len(_global_optimizer_pre_hooks) > 1:
        _show_whole(optimizer)
    # OrderedDicts. Torch comes to the hooks of one optimizer after those of all.
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    is_last = next(reversed(before.values()), None) is _before_step
    if (is_last and next(iter(after.values()), None) is _after_step) or not state_dicts.handles_of(optimizer):
        return
    _remove(before, _before_step)
    _remove(after, _after_step)
    optimizer.register_step_pre_hook(_before_step)
    handle = optimizer.register_step_post_hook(_after_step)
    after.move_to_end(handle.id, last=False)


@torch.no_grad()
def _show_whole(optimizer: Optimizer) -> None:
    """Write what a step has changed so far, before hooks of others come to a step within it: these look at the table."""
    for handle, group in state_dicts.handles_of(optimizer):
        state = handle.state
        if state is not None and state.running and state.optimizer() is optimizer and state.stepping():
            handle.step.end(optimizer, group)


def _remove(hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> None:
    for number in [number for number, registered in hooks.items() if registered is hook]:
        del hooks[number]


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    frame = _frame_of_step()
    # Even if there is a closure, which the step need not call. An argument that is not callable is something else.
    if not _load(optimizer, frame) or not callable(closure):
        return None
    wrapped = _closures[optimizer] = _Closure(closure, optimizer, frame)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


class _Closure:
    """A closure, which runs forward and backward inside the step: the active rows are known after it."""

    def __init__(self, closure: Callable[[], Any], optimizer: Optimizer, frame: FrameType | None) -> None:
        self._closure, self._optimizer, self.frame = closure, optimizer, frame
        self._watch()

    def __call__(self) -> Any:
        _unload(self._optimizer)
        loss = self._closure()
        _load(self._optimizer, self.frame)
        self._watch()
        return loss

    def _watch(self) -> None:
        """Have changes before the next call seen that torch does not count; those of torch begin with their one call."""
        if not has_rule(self._optimizer):
            for handle, _ in state_dicts.handles_of(self._optimizer):
                handle.step.watch()


# The closures of running steps. Each holds the frame of its step, which holds it: the end of the step breaks this cycle.
_closures: weakref.WeakKeyDictionary[Optimizer, _Closure] = weakref.WeakKeyDictionary()


def _forget_closure(optimizer: Optimizer) -> None:
    closure = _closures.pop(optimizer, None)
    if closure is not None:
        closure.frame = None


@torch.no_grad()
def _load(optimizer: Optimizer, frame: FrameType | None) -> bool:
    """Begin the step of `optimizer` for the tables among its parameters; return whether there are any."""
    found = state_dicts.handles_of(optimizer)
    if len(found) > 1:
        _check_once(optimizer, [handle for handle, _ in found])
    for handle, _ in found:
        if handle.rows.table.open_views.made and handle.rows.table.has_views:
            _check_alone(optimizer, handle)
        # Before anything has changed.
        if handle.pending.grad is not None and handle.rows.table._place.refuses_writes:
            handle.table.check_writable()
    shared = [handle.owners for handle, _ in found if not handle.owners.is_alone]
    if shared:
        # Gradients that were written by hand, and not by backward.
        exchange_gradients(shared)
        for owners in shared:
            owners.before_step()
    tried: Known = {}
    for handle, group in found:
        # The lock: of two threads one begins. Not where other processes have to answer meanwhile.
        with handle.rows.lock if handle.owners.is_alone else contextlib.nullcontext():
            if handle.state is not None and handle.state.running:
                handle.step.check_steps_here(f"a step of {type(optimizer).__name__} begins")
                # A step within a step, super().step(): it updates the rows that the outer one has.
                if handle.state.optimizer() is optimizer and handle.state.stepping():
                    continue
                handle.step.recover()
            if handle.pending.grad is None:
                continue
            if handle.is_sent:
                sent.check_trained_here(handle)
            if handle.id_space.come_and_go:
                handle.id_space.check_loaded_state(optimizer)
            if handle.pending.grad.is_cuda:
                handle.step.check_capturable(optimizer)
            if handle.state is None or handle.state.optimizer() is not optimizer:
                handle.check_not_lost(optimizer)
                replicas.check_same_in_all(handle, optimizer)
                # If this raises nothing has changed.
                with one_step(tried):
                    _begin_to_train(handle, optimizer, group)
            assert handle.state is not None
            if handle.state.is_assumed_otherwise(optimizer, group):
                # Raises or warns if `idle` does not allow that idle rows move now.
                way_to_step(handle, optimizer, group, Findings())
                handle.state.assume(optimizer, group)
            handle.step.begin(optimizer, group, frame)
    return bool(found)


def _check_once(optimizer: Optimizer, handles: list[Handle]) -> None:
    """Raise if a table is there twice: torch would make two steps."""
    if len(set(handles)) < len(handles):
        twice = next(handle for handle in handles if handles.count(handle) > 1)
        raise OptimizerError(
            f"{type(optimizer).__name__} has {twice} twice among its parameters, but a table makes one step at a time; pass "
            "each parameter once: list(dict.fromkeys(params))"
        )


def _check_alone(optimizer: Optimizer, handle: Handle) -> None:
    """Raise if another parameter has the memory of the table: the step of the one would overwrite that of the other."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            other = find_handle(param)
            if other is handle or not param.requires_grad or (other is None and type(param) is not nn.Parameter):
                continue
            if other is None:
                is_same = overlap(param, handle.table.stored("weight"))
            else:
                is_same = have_same_rows(handle.table, other.table)
            if is_same:
                raise OptimizerError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} in the memory of {handle}, and "
                    "the step of the one would overwrite that of the other; share the parameter itself (head.weight = "
                    "emb.weight)"
                )


def _begin_to_train(handle: Handle, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Give the rows state for `optimizer`; in all processes that train them, or in none."""

    def begin() -> None:
        give_state(handle, optimizer, group, probe_optimizer(optimizer, group, handle.param, handle.sparse))
        if handle.rows.own is not None and handle.rows.lag is not None:
            # Now, that no process fills it while another writes to it.
            handle.rows.mark_steps()

    if handle.owners.is_alone:
        begin()
        return
    try:
        handle.owners.exchange.in_all("begins to train", begin, lambda _: described(handle))
    except BaseException:
        if handle.state is not None and handle.state.optimizer() is optimizer:
            handle.drop_state("another process could not begin to train it")
            handle.lost.pop(optimizer, None)
        raise


def _unload(optimizer: Optimizer) -> None:
    """Undo `_load` before a closure runs the model."""
    for handle, _ in state_dicts.handles_of(optimizer):
        if handle.state is not None and handle.state.running and handle.state.optimizer() is optimizer:
            if handle.step.is_changed():
                raise OptimizerError(
                    f"{type(optimizer).__name__} changed the active rows of {handle} before it called its closure, which "
                    "would not see them; call its parts by hand (first_step, backward, second_step), or use another optimizer"
                )
            handle.step.abort(optimizer)


def give_state(handle: Handle, optimizer: Optimizer, group: dict[str, Any], specs: Findings) -> RowState:
    """Replace the state of the rows by new planes for `optimizer`, and return it."""
    rule, sparse = way_to_step(handle, optimizer, group, specs)
    given = _given_by_another(handle, optimizer)
    handle.drop_state(f"a new {type(optimizer).__name__} took it over")
    handle.rows.begin_anew()
    if given:
        # Both may have one mapping: `new.state = old.state`.
        optimizer.state[handle.param] = given
    handle.state = RowState(handle, optimizer, specs, rule, sparse)
    if rule is None and not sparse and handle.idle != "lazy":
        handle.state.assume(optimizer, group)
    state_dicts.watch(optimizer)
    return handle.state


def _given_by_another(handle: Handle, optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the state in `optimizer` while the rows have that of another, whose planes may be among it and go."""
    state = handle.state
    if state is None or state.optimizer() is optimizer:
        return None
    given: dict[str, Any] | None = optimizer.state.get(handle.param)
    views = {n: v for n, v in leaves(given or {}).items() if isinstance(v, PlaneView) and not v.has_memory}
    if given and views:
        handle.rows.catch_up()
        put(given, copy.deepcopy(views))
    return given


@torch.no_grad()
def take_loaded(optimizer: Optimizer) -> None:
    """Write state that was loaded for ids to their rows, which they may lose to others before the next step."""
    for handle, group in state_dicts.handles_of(optimizer):
        entries = optimizer.state.get(handle.param)
        if handle.rows.placement is None or not entries or (handle.state is not None and handle.state.running):
            continue
        state = handle.state
        if state is None or state.optimizer() is not optimizer:
            try:
                specs = probe_optimizer(optimizer, group, handle.param, handle.sparse)
                state = give_state(handle, optimizer, group, specs)
            except OptimizerError:
                # The first step will raise it.
                continue
        state.take_loaded(optimizer)


def way_to_step(
    handle: Handle, optimizer: Optimizer, group: dict[str, Any], specs: Findings
) -> tuple[Rule | None, bool]:
    """Return the rule for idle rows, or None, and whether steps get sparse gradients.

    Raises
    ------
    OptimizerError
        ``idle="exact"``, and what the optimizer does to idle rows is not known.
    """
    # Sparse gradients leave idle rows alone in torch too.
    if specs.gradient == "sparse":
        return None, True
    if handle.idle != "lazy" and not has_rule(optimizer):
        if specs.gradient == "either":
            return None, True
        if leaves_idle_rows(optimizer, group, handle.param):
            return None, False
    return choose_rule(handle.idle, optimizer, group, handle.rows.dtype), False


def _has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether others than we have hooks after the steps of `optimizer`."""
    return len(optimizer._optimizer_step_post_hooks) > 1 or len(_global_optimizer_post_hooks) > 0


@uncompiled
@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    frame = _frame_of_step()
    if optimizer in _closures and _closures[optimizer].frame is frame:
        _forget_closure(optimizer)
    ended = []
    for handle, group in state_dicts.handles_of(optimizer):
        state = handle.state
        if state is None or not state.running or state.optimizer() is not optimizer:
            continue
        # Else the end of a step within a step: the outer one goes on with the rows, unless hooks will look at the table.
        if state.running.frame is frame or not state.stepping() or _has_hooks(optimizer):
            ended.append((handle, group))
    try:
        for handle, group in ended:
            handle.step.end(optimizer, group)
    except BaseException as error:
        if is_interrupt(error):
            # The optimizer has made the step of all.
            for handle, group in ended:
                if handle.state is not None and handle.state.running:
                    handle.step.end(optimizer, group)
        raise
    # What may raise comes when all tables have made their step.
    for handle, _ in ended:
        if handle.id_space.come_and_go:
            handle.id_space.step_ended()
