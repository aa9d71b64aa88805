"""Make a fresh optimizer like a given one, with the same hyperparameters, and step it on a few rows."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.interrupts import pass_on_interrupt
from speedtransfer.optim.graph import KEY
from speedtransfer.optim.leaves import cloned, leaves

_PLAIN = (bool, int, float, str, enum.Enum, torch.dtype, type(None), FunctionType)
_CONTENTS = ("defaults", "state", "param_groups")
OWN = ("step", "grad_scale", "found_inf", *_CONTENTS)  # schedulers wrap step


class StateError(ValueError):
    """State that a table cannot hold, or whose value in an untouched row is unknown."""


class FirstEntries(dict[Any, Any]):
    """State of one parameter; keeps a copy of what each entry was when the optimizer first set it."""

    def __init__(self, entries: Any = ()) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}
        self.update(entries)

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.first.get(key)
        if before is None or (isinstance(before, list | tuple | dict) and not before):  # a place kept for later
            self.first[key] = cloned(value)
        super().__setitem__(key, value)

    # By way of the above.
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


class FirstStates(defaultdict[Any, Any]):
    """``optimizer.state`` that keeps what its entries first were."""

    def __init__(self, states: dict[Any, Any]) -> None:
        super().__init__(FirstEntries)
        MutableMapping.update(self, states)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, FirstEntries(value) if type(value) is dict else value)


@dataclass(frozen=True)
class Seen:
    """A tensor of state when it was first there."""

    # As the optimizer first set it, before it updated it in place, and after that step.
    first: Tensor | None
    value: Tensor
    # The weights before and after that step.
    before: Tensor
    after: Tensor
    # It was not there after the first step.
    late: bool


class Trial:
    """A fresh optimizer like `optimizer` with the hyperparameters of `group` on a copy of `weights`."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> None:
        self.param = nn.Parameter(weights.clone())
        self.optimizer = _like(optimizer, group, self.param)
        self.optimizer.state = FirstStates(self.optimizer.state)
        self.seen: dict[str, Seen] = {}
        self._steps = 0

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the parameter."""
        state: dict[Any, Any] = self.optimizer.state[self.param]
        return state

    @property
    def first(self) -> dict[Any, Any]:
        """The entries of the state as they were first set."""
        return getattr(self.state, "first", {})

    def step(self, grad: Tensor) -> dict[str, Tensor]:
        """Step with a copy of `grad` and return the tensors of the state."""
        before = self.param.detach().clone()
        self.param.grad = grad.clone()
        step: Any = type(self.optimizer).step
        # Without the hooks that others have registered for all optimizers: this step is no business of theirs.
        while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):  # torch wraps it, and `hooks` once more
            step = step.__wrapped__
        step(self.optimizer)
        found = leaves(self.state)
        new = [name for name in found if name not in self.seen]
        first, after = (leaves(self.first), self.param.detach().clone()) if new else ({}, before)
        for name in new:
            self.seen[name] = Seen(first.get(name), found[name].detach().clone(), before, after, self._steps > 0)
        self._steps += 1
        return found


@contextlib.contextmanager
def without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Hide the gradients of the optimizer's own parameters: a trial that gets at them must not move them."""
    with contextlib.ExitStack() as restored:
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            grad, handle = param.grad, vars(param).get(KEY)
            if grad is None:
                continue
            # A table whose step has begun is an ordinary parameter now.
            if handle is not None and type(param) is handle.kind:
                restored.enter_context(handle.pending.hidden())
            else:
                restored.callback(setattr, param, "grad", grad)
                param.grad = None
        yield


def _like(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> Optimizer:
    """Return a fresh optimizer of the same class with the hyperparameters of `group`."""
    hyper = {key: cloned(value) for key, value in group.items() if key not in ("params", "param_names")}
    accepted = inspect.signature(type(optimizer).__init__).parameters
    own = {k: v for k, v in optimizer.__dict__.items() if k not in OWN}
    try:
        # `defaults` may hold what the constructor does not take (AdamW's decoupled_weight_decay, a scheduler's initial_lr).
        trial = type(optimizer)([param], **{key: value for key, value in hyper.items() if key in accepted})
    except Exception as error:
        pass_on_interrupt(error)
        # A constructor of another form: a copy of the instance without its parameters, state, hooks and GradScaler.
        trial = object.__new__(type(optimizer))
        trial.__dict__.update({k: OrderedDict() if k.endswith("_hooks") else _copied(v) for k, v in own.items()})
        trial.defaults = optimizer.defaults
        trial.state = defaultdict(dict)
        trial.param_groups = [{"params": [param]}]
    else:  # hyperparameters may also be attributes of the instance
        trial.__dict__.update({k: v for k, v in own.items() if _plain(v)})
    trial.param_groups[0].update(hyper)  # also those that a constructor takes as **kwargs
    return trial


def _plain(value: Any) -> bool:
    return all(map(_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    """Copy containers and tensors, so that a trial leaves the real ones alone; parameters stay what they are."""
    if isinstance(value, nn.Parameter):
        return value
    if type(value) in (list, set, tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value.copy()
    return value.detach().clone() if isinstance(value, Tensor) else value


def words(error: Exception) -> str:
    """Return what `error` says, on one line: torch may list every backend that lacks an operator."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def outside_state(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> list[str]:
    """Return the attributes and group entries whose tensors follow the rows of the parameter: so one row fewer tells."""
    shapes = []
    for rows in (weights, weights[1:]):
        trial = Trial(optimizer, group, rows)
        trial.step(torch.ones_like(rows))
        values = {**trial.optimizer.param_groups[0], **vars(trial.optimizer)}
        shapes.append({key: _shapes(value) for key, value in values.items() if key not in ("params", *_CONTENTS)})
    return sorted(key for key, value in shapes[0].items() if value != shapes[1].get(key, value))


def _shapes(value: Any, depth: int = 4) -> list[Any]:
    """Return the shapes of the tensors within `value`."""
    if isinstance(value, Tensor):
        return [tuple(value.shape)]
    if depth == 0 or isinstance(value, str | type) or value is None:
        return []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        value = getattr(value, "__dict__", {}).values()
    return [shape for item in list(value) for shape in _shapes(item, depth - 1)]
