"""Hyperparameters edited between steps while rows are idle: weights and state as those of a dense optimizer in float64.

The loss is linear, so that no difference grows by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import speedtransfer

ROWS, STEPS = 10, 26
_OF_ALL = {"maximize": [True], "foreach": [True, False], "differentiable": [True], "capturable": [True]}
_RATE, _DECAYS = {"lr": [0.1, 0.0]}, {"weight_decay": [0.0, 0.2]}
_ADAM = {
    "lr": [0.5, 0.0, torch.tensor(0.1, dtype=torch.float64)],
    "betas": [(0.0, 0.999), (0.99, 0.999), (0.9, 0.1), (0.5, 0.9)],
    "eps": [1e-2, 1.0, 1e-12],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [False, True],
    "fused": [True],
    "decoupled_weight_decay": [True, False],
    "momentum_decay": [0.1, 0.0],
}
_SGD = {"momentum": [0.0, 0.5], "dampening": [0.5], "nesterov": [True, False], "fused": [True]}
_RMSPROP = {"alpha": [0.5, 0.9], "eps": [1e-2, 1e-12], "momentum": [0.0, 0.5], "centered": [True, False]}
_RPROP = {"etas": [(0.3, 1.5)], "step_sizes": [(1e-3, 1e-2), (1e-2, 1.0), (1e-9, 1e-4)]}
_ADAGRAD = {"lr_decay": [0.0, 0.5], "eps": [1e-2], "fused": [True]}
_ASGD = {"lambd": [0.2, 0.0], "alpha": [0.2, 2.0], "t0": [0, 20]}
_DECAY, _DECOUPLED = {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}
_CENTERED = {"centered": True, "momentum": 0.9}
# By class: hyperparameters to begin with, and values that those of the group are set to.
EDITS: dict[str, tuple[list[dict[str, Any]], dict[str, list[Any]]]] = {
    "SGD": (
        [{}, {"momentum": 0.9, **_DECAY}, {"momentum": 0.9, "nesterov": True, **_DECAY}],
        {**_RATE, **_DECAYS, **_SGD},
    ),
    "Adam": ([{}, {"amsgrad": True}, _DECAY, {"amsgrad": True, **_DECAY}], _ADAM),
    "AdamW": ([{"amsgrad": True}, {"betas": (0.9, 0.9), **_DECAY}], _ADAM),
    "NAdam": ([{}, _DECAY, _DECOUPLED], _ADAM),
    "RAdam": ([{"betas": (0.9, 0.99)}, _DECAY, _DECOUPLED], _ADAM),
    "Adamax": ([{}, _DECAY, {"eps": 1e-2}], _ADAM),
    "RMSprop": ([{}, _CENTERED, {**_CENTERED, **_DECAY}], {**_RATE, **_DECAYS, **_RMSPROP}),
    "Adadelta": ([{"lr": 1.0}, {"lr": 1.0, **_DECAY}], {**_RATE, **_DECAYS, "rho": [0.5, 0.99, 0.0], "eps": [1e-2]}),
    "Adagrad": ([{}, {"lr_decay": 0.1, **_DECAY}], {**_RATE, **_DECAYS, **_ADAGRAD}),
    "Rprop": ([{}, {"lr": 100.0}], {"lr": [0.1], **_RPROP}),
    "ASGD": ([{"t0": 5}, {"lambd": 0.1, "t0": 3, **_DECAY}], {**_RATE, **_DECAYS, **_ASGD}),
}
for _, _edits in EDITS.values():
    _edits.update(_OF_ALL)
# Steps before which the value is set, and those before which it is set back. Row 2 wakes at each.
PLANS = {
    "once": ([7], []),
    "back": ([7], [15]),
    "a step": ([7], [8]),
    "again": ([7, 13], [12]),
    "late": ([1], [STEPS - 1]),
}


def _group_of(kind: str, start: dict[str, Any]) -> dict[str, Any]:
    return getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))], **{"lr": 0.02, **start}).param_groups[0]


def edits_of(kind: str, key: str) -> list[tuple[dict[str, Any], str, Any, str]]:
    """Return the edits of a hyperparameter: what the group begins with, the hyperparameter, the value, the plan."""
    starts, edits = EDITS[kind]
    groups = [(start, group) for start in starts for group in [_group_of(kind, start)] if key in group]
    return [
        (start, key, value, plan)
        for start, group in groups
        for value in edits[key]
        if value is not group[key]
        for plan in PLANS
    ]


def train(module: Any, optimizer: torch.optim.Optimizer, edits: dict[int, dict[str, Any]], steps: int = STEPS) -> None:
    """Train rows 0 to 7, some at the steps of the edits, one step before or never in between."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.param_groups[0].update(edits.get(step, {}))
        ids = [1]
        ids += [0] if step in (0, 1) else []
        ids += [2] if step in edits or step == 0 else []
        ids += [3] if step + 1 in edits else []
        ids += [4, 5] if step == steps - 1 else []
        ids += [5, 6, 7] if step == 0 else []
        ids += [6] if step % 7 == 3 else []
        slope = torch.randn(len(ids), 2, generator=generator, dtype=torch.float64) * 1e-3
        optimizer.zero_grad()
        (module(torch.tensor(ids)) * slope).sum().backward()
        optimizer.step()


def outcome(make: Any, kind: Any, start: dict[str, Any], *args: Any) -> tuple[torch.Tensor, dict[str, Any]] | Exception:
    """Return how far the rows went and the state of the optimizer, or the error."""
    torch.manual_seed(0)
    module = make(ROWS, 2, dtype=torch.float64)
    before = module.weight.detach().clone()
    optimizer = kind(module.parameters(), **{"lr": 0.02, **start})
    try:
        train(module, optimizer, *args)
    except Exception as error:
        return error
    return module.weight.detach() - before, optimizer.state_dict()["state"].get(0, {})


def exact(*args: Any, **kwargs: Any) -> speedtransfer.Embedding:
    return speedtransfer.Embedding(*args, idle="exact", **kwargs)


def check(kind: str, start: dict[str, Any], *args: Any, tolerance: float = 1e-9) -> None:
    optimizer = getattr(torch.optim, kind)
    dense, ours = (outcome(make, optimizer, start, *args) for make in (nn.Embedding, exact))
    if isinstance(dense, Exception):
        assert isinstance(ours, Exception), dense
        return
    assert not isinstance(ours, Exception), ours
    # Each row by itself: some edits send a few of them far away.
    way = dense[0].abs().amax(1, keepdim=True)
    assert ((ours[0] - dense[0]).abs() <= tolerance * way.clamp_min(1e-3)).all()
    assert ours[1].keys() == dense[1].keys()
    for name, value in dense[1].items():
        if isinstance(value, torch.Tensor):
            atol = tolerance * float(value.abs().max())
            torch.testing.assert_close(
                ours[1][name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def check_edit(kind: str, start: dict[str, Any], key: str, value: Any, plan: str) -> None:
    there, back = PLANS[plan]
    original = _group_of(kind, start)[key]
    edits = {step: {key: value} for step in there} | {step: {key: original} for step in back}
    try:
        # Torch's corrections of bias are in single precision then; see `docs/optimizers.md`.
        check(kind, start, edits, tolerance=1e-5 if key == "differentiable" else 1e-9)
    except Exception as error:
        raise AssertionError(f"{kind} of {start}, {key} becomes {value}, {plan}: {error}") from error


@pytest.mark.parametrize("kind", EDITS)
def test_as_dense(kind: str) -> None:
    """Each hyperparameter in one way: with another start, value and plan than the one before."""
    for number, key in enumerate(EDITS[kind][1]):
        if every := edits_of(kind, key):
            check_edit(kind, *every[number * 7 % len(every)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", EDITS)
def test_every_edit_as_dense(kind: str) -> None:
    for key in EDITS[kind][1]:
        for edit in edits_of(kind, key):
            check_edit(kind, *edit)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_amsgrad_off_before_rows_are_touched_and_on_again(kind: str) -> None:
    """The second moments of rows that were trained meanwhile are larger than their largest so far."""
    for edits in ({1: False, 23: True}, {9: False, 10: True}, {1: False, 20: True, 21: False, 24: True}):
        check(kind, {"amsgrad": True}, {step: {"amsgrad": value} for step, value in edits.items()})


def test_state_that_no_factor_describes() -> None:
    """Norms above eps, the mean of the gradients while `centered` is off, step sizes between two bounds."""
    check("Adamax", {}, {7: {"eps": 1.0}, 15: {"eps": 1e-8}})
    check("RMSprop", {"centered": True}, {7: {"centered": False}, 15: {"centered": True}})
    check("Rprop", {}, {7: {"step_sizes": (1e-9, 1e-4)}, 8: {"step_sizes": (1e-6, 50)}})


def test_a_second_average_that_forgets_fast_after_long() -> None:
    """What steps add to a row becomes negligible, and matters again: each divides by less than the one before."""
    check("Adam", {"eps": 1e-30}, {330: {"betas": (0.9, 0.01)}}, 360)
