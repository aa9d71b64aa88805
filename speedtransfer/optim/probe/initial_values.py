"""Infer the initial optimizer state of an untouched row by stepping with zero gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.dtypes import TABLE_DTYPES
from speedtransfer.optim.leaves import cloned, leaves, put
from speedtransfer.optim.probe.trajectories import ROWS, STEPS, InitialValue, close, sparse_gradient
from speedtransfer.optim.probe.trial import Seen, StateError, Trial

# The initial values of the state that follows the rows, by name, and the names of the other state.
Found = tuple[dict[str, InitialValue], set[str]]


def initial_values(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> Found:
    """Return the initial values of the state that follows the rows `weights` (ROWS, dim), and the names of the other state.

    Raises
    ------
    StateError
        State that cannot be moved by row, or has no one initial value.
    """
    seen, follow = _seen(optimizer, group, weights, torch.zeros_like)
    shared, found = seen.keys() - set(follow), dict[str, float | None]()
    if follow:
        # Decay moves the state of rows without a gradient too, and hides its initial value.
        numbers = {k: v for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        decays = {k: 0.0 for k, v in numbers.items() if "weight_decay" in k and v}
        calm = {**group, **decays}
        if decays:
            seen = {**seen, **_still(optimizer, calm, weights, _last(seen), torch.zeros_like)}
        found = _values(optimizer, calm, weights, {name: seen[name] for name in follow})
        for name, value in found.items():
            if value and _zero_does_as_well(optimizer, group, weights, name, value):
                found[name] = 0.0  # zero pages take no memory: Adamax's exp_inf would be eps all over
    return {name: InitialValue(seen[name].value, found[name], seen[name].late) for name in follow}, shared


def initial_values_of_sparse(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> Found:
    """Return the same for steps with sparse gradients: the state of rows that those do not name.

    Raises
    ------
    StateError
        State that cannot be moved by row, or has no one initial value.
    """
    seen, follow = _seen(optimizer, group, weights, _of_first_row)
    result = {}
    for name in follow:
        entry = seen[name]
        rest = Seen(None, entry.value[1:], entry.before[1:], entry.after[1:], entry.late)
        choices = _choices(rest)
        if not choices:
            raise _unknown(name)
        result[name] = InitialValue(entry.value, choices[0], entry.late)
    return result, seen.keys() - set(follow)


def _of_first_row(weights: Tensor) -> Tensor:
    """Return a sparse gradient that names the first row alone."""
    first = weights.new_zeros(1, dtype=torch.int64)
    return sparse_gradient(torch.ones_like(weights[:1]), first, len(weights))


def _seen(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, gradient: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Seen], list[str]]:
    """Return the state that steps make, and which of it has the rows as its first dimension: so one row fewer tells."""
    seen = _still(optimizer, group, weights, STEPS, gradient)
    for name, entry in seen.items():
        if entry.value.layout != torch.strided:
            raise StateError(f"its state {name!r} is a sparse tensor")
    fewer = _still(optimizer, group, weights[1:], _last(seen), gradient)
    follow = []
    for name, entry in seen.items():
        shape = tuple(entry.value.shape)
        other = tuple(fewer[name].value.shape) if name in fewer else None
        if other == shape:
            continue
        if not shape or other != (ROWS - 1, *shape[1:]) or shape[0] != ROWS:
            raise StateError(
                f"its state {name!r} is {shape} for {ROWS} rows and {other} for {ROWS - 1}, not one entry a row, rows first"
            )
        if entry.value.dtype not in (*TABLE_DTYPES, torch.bool):
            raise StateError(f"its state {name!r} is {entry.value.dtype}, which no table can hold")
        follow.append(name)
    return seen, follow


def _still(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, steps: int, gradient: Callable[[Tensor], Tensor]
) -> dict[str, Seen]:
    """Return the state that `steps` steps make with a `gradient` made for the weights."""
    # With the learning rate as it is, zero too: Rprop's step_size starts from it.
    trial = Trial(optimizer, group, weights)
    for _ in range(steps):
        names = trial.step(gradient(weights))
        gone = trial.seen.keys() - names.keys()
        if gone:
            raise StateError(f"its state {min(gone)!r} comes and goes")
    return trial.seen


def _last(seen: dict[str, Seen]) -> int:
    return STEPS if any(entry.late for entry in seen.values()) else 1


def _one_value(state: Tensor | None) -> list[float]:
    """Return the value of all entries of `state`, or nothing where they differ."""
    if state is None or state.dim() == 0:
        return []
    values = state.flatten()
    if not len(values):
        return [0.0]  # rows of no columns
    return [float(values[0])] if bool((values == values[0]).all()) else []


def _choices(entry: Seen) -> list[float | None]:
    """Return what may be the initial value; None: a copy of the weights, of those before the step or after it."""
    states = [entry.value] if entry.first is None else [entry.value, entry.first]
    # Weights that are all the same show nothing: the first step of FTRL makes them zero, and its state is zero too.
    telling = [rows for rows in (entry.before, entry.after) if not _one_value(rows)]
    is_copy = (
        entry.value.shape == entry.before.shape
        and entry.value.numel() > 0
        and any(torch.equal(state.double(), rows.double()) for state in states for rows in telling)
    )
    return [*([None] if is_copy else []), *_one_value(entry.first), *_one_value(entry.value)]


def _values(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, seen: dict[str, Seen]
) -> dict[str, float | None]:
    """Choose, for each state, what a step without a gradient leads from to what the first step led to; None: the weights."""
    choices = {name: [*_choices(entry), 0.0] for name, entry in seen.items()}
    early = {name for name, entry in seen.items() if not entry.late}
    for name in seen.keys() - early:
        if len(choices[name]) == 1:
            raise _unknown(name)
    while True:
        chosen = {name: choices[name][0] for name in seen}
        ends = _replay(optimizer, group, weights, {name: chosen[name] for name in early}) if early else {}
        wrong = [name for name in early if not close(seen[name].value, ends[name])]
        if not wrong:
            return chosen
        for name in wrong:
            del choices[name][0]
            if not choices[name]:
                raise _unknown(name)


def _unknown(name: str) -> StateError:
    return StateError(f"state {name!r} of an untouched row has no one value to start from")


def _replay(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, chosen: dict[str, float | None]
) -> dict[str, Tensor]:
    """Return the state after a first step without a gradient whose state was there already, as `chosen`."""
    trial = Trial(optimizer, group, weights)
    inner = trial.optimizer.param_groups[0]
    counters = {key: cloned(value) for key, value in inner.items() if key != "params"}
    trial.step(torch.zeros_like(weights))
    state, first = trial.state, trial.first
    for key in inner.keys() - counters.keys() - {"params"}:
        del inner[key]
    inner.update(counters)  # some count steps in the group
    for key in list(state):
        if key in first and not any(name in chosen for name in leaves({key: state[key]})):
            state[key] = cloned(first[key])  # shared by the rows: the number of steps
    made = leaves(state)
    for name, value in chosen.items():
        filled = torch.full_like(made[name], 0.0 if value is None else value)
        put(state, {name: filled if value is not None else filled.copy_(weights)})
    trial.param.data = weights.clone()
    return trial.step(torch.zeros_like(weights))


def _zero_does_as_well(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, name: str, start: float) -> bool:
    """Tell whether rows whose state `name` starts from zero go the same way as from `start`."""
    lr = group.get("lr")
    if lr is not None and float(lr) == 0.0:  # a schedule may start from zero
        group = {**group, "lr": 1e-3}
    generator = torch.Generator("cpu").manual_seed(1)  # whatever the default device is
    grads = [torch.randn(weights.shape, generator=generator, device="cpu").to(weights) for _ in range(3)]
    ends = []
    for value in (start, 0.0):
        trial = Trial(optimizer, group, weights)
        found = trial.step(torch.zeros_like(weights))  # makes the state
        if name not in found:
            return False
        found[name].fill_(value)
        for grad in grads:
            found = trial.step(grad)
        ends.append((trial.param.detach(), found[name]))
    return all(torch.equal(kept, zeroed) for kept, zeroed in zip(*ends, strict=True))
