"""State dicts that are not quite what the optimizer would save: they train as in torch, or raise where torch raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import speedtransfer as st

State = dict[str, Any]
_SGD = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}


def _plane(state: State) -> torch.Tensor:
    return next(value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() == 2)


def _add(value: Any) -> Callable[[State], object]:
    return lambda state: state.update(third=value(state) if callable(value) else value)


def _drop(name: str) -> Callable[[State], object]:
    return lambda state: state.pop(name)


# By name: class, hyperparameters when it is saved and when it is loaded, what is done to the state of each parameter.
CASES: dict[str, tuple[Any, State, State, Callable[[State], object]]] = {
    "amsgrad off": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}, lambda state: None),
    "amsgrad on": (optim.Adam, {}, {"amsgrad": True}, lambda state: None),
    "centered off": (optim.RMSprop, {"centered": True}, {"centered": False}, lambda state: None),
    "momentum off": (optim.RMSprop, {"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.1}, lambda state: None),
    "SGD momentum off": (optim.SGD, _SGD, {"momentum": 0.0}, lambda state: None),
    "SGD momentum on": (optim.SGD, {}, _SGD, lambda state: None),
    "RMSprop momentum on": (optim.RMSprop, {}, {"momentum": 0.9}, lambda state: None),
    "a plane of others": (optim.Adam, {}, {}, _add(lambda state: _plane(state) + 1)),
    "a vector of others": (optim.RAdam, {}, {}, _add(lambda state: _plane(state)[:, 0] + 1)),
    "a matrix of others": (optim.Adam, {}, {}, _add(torch.ones(3, 3))),
    "a number of others": (optim.Adagrad, {}, {}, _add(torch.tensor(2.0))),
    "words of others": (optim.Adam, {}, {}, _add("x")),
    "a plane in a dict": (optim.NAdam, {}, {}, _add(lambda state: {"a": _plane(state) + 1})),
    "SGD from Adam": (
        optim.SGD,
        {},
        {"momentum": 0.9},
        lambda state: state.update(step=torch.tensor(3.0), exp_avg=_other()),
    ),
    "no second moments": (optim.Adam, {}, {}, _drop("exp_avg_sq")),
    "no step": (optim.Adam, {}, {}, _drop("step")),
    "None": (optim.Adam, {}, {}, lambda state: state.update(exp_avg=None)),
    "SGD None": (optim.SGD, _SGD, _SGD, lambda state: state.update(momentum_buffer=None)),
    "SGD empty": (optim.SGD, _SGD, _SGD, lambda state: state.clear()),
    "single precision": (optim.Adam, {}, {}, lambda state: state.update(exp_avg=state["exp_avg"].float())),
    "transposed": (optim.Adam, {}, {}, lambda state: state.update(exp_avg=state["exp_avg"].t().contiguous().t())),
    "fewer rows": (optim.Adam, {}, {}, lambda state: state.update(exp_avg=state["exp_avg"][1:])),
    "no rows": (optim.Adam, {}, {}, lambda state: state.update(exp_avg=torch.tensor(0.5))),
    "step int": (optim.Adam, {}, {}, lambda state: state.update(step=5)),
    "step float": (optim.NAdam, {}, {}, lambda state: state.update(step=5.0, mu_product=0.3)),
    "step of one": (optim.Adam, {}, {}, lambda state: state.update(step=torch.tensor([5.0]))),
    "step double": (optim.ASGD, {}, {}, lambda state: state.update(step=torch.tensor(5, dtype=torch.float64))),
}


def _other() -> torch.Tensor:
    return torch.ones(10, 2, dtype=torch.float64)


def made(make: Any, kind: Any, options: State) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = make(10, 2, dtype=torch.float64)
    return module, kind(module.parameters(), **{"lr": 0.02, **options})


def train(module: Any, optimizer: Any, steps: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        slope = torch.randn(3, 2, generator=draw, dtype=torch.float64)
        (module(torch.randint(0, 10, (3,), generator=draw)) * slope).sum().backward()
        optimizer.step()


def outcome(make: Any, saver: Any, case: str, folder: Path | None) -> tuple[torch.Tensor, State] | Exception:
    kind, before, options, change = CASES[case]
    module, optimizer = made(saver, kind, before)
    train(module, optimizer, 5, 0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    change(saved["state"].setdefault(0, {}))
    saved["param_groups"][0].update(options)
    try:
        module, optimizer = made(nn.Embedding if folder else make, kind, options)
        module.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        if folder:
            st.save_checkpoint(folder, module, optimizer)
            module, optimizer = made(make, kind, options)
            st.load_checkpoint(folder, module, optimizer)
        train(module, optimizer, 8, 1)
    except Exception as error:
        if optimizer.state:
            with pytest.raises(type(error)):
                # It does not go on as if nothing had been.
                train(module, optimizer, 1, 1)
        return error
    return module.weight.detach().clone(), optimizer.state_dict()["state"][0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["dense", "ours", "checkpoint"])
def test_as_torch(case: str, way: str, tmp_path: Path) -> None:
    """Saved by a dense optimizer, by one of a table, by `save_checkpoint`."""
    saver = st.Embedding if way == "ours" else nn.Embedding
    folders = (tmp_path / "dense", tmp_path / "ours") if way == "checkpoint" else (None, None)
    dense, ours = outcome(nn.Embedding, nn.Embedding, case, folders[0]), outcome(st.Embedding, saver, case, folders[1])
    if isinstance(dense, Exception):
        # Of torch where it is the same one, else ours.
        assert isinstance(ours, (type(dense), st.errors.OptimizerError, st.errors.InvalidValueError)), ours
        return
    assert not isinstance(ours, Exception), ours
    torch.testing.assert_close(ours[0], dense[0], rtol=0, atol=1e-12)
    assert ours[1].keys() == dense[1].keys()
    for name, value in dense[1].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-12)
        else:
            assert type(ours[1][name]) is type(value)


def test_amsgrad_off_when_loaded_and_on_again() -> None:
    """The largest second moments that no step uses are kept, and used again."""
    found = []
    for make in (nn.Embedding, st.Embedding):
        module, optimizer = made(make, optim.Adam, {"amsgrad": True})
        train(module, optimizer, 5, 0)
        saved, weights = optimizer.state_dict(), module.state_dict()
        saved["param_groups"][0]["amsgrad"] = False
        module, optimizer = made(make, optim.Adam, {})
        module.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(module, optimizer, 5, 1)
        optimizer.param_groups[0]["amsgrad"] = True
        train(module, optimizer, 5, 2)
        found.append(module.weight.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_a_vocabulary_keeps_planes_that_no_step_uses() -> None:
    """Also rows of new ids have them, at zero."""
    module = st.Embedding(20, 2, vocabulary=st.Vocabulary(), dtype=torch.float64)
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    for start, amsgrad in ((0, True), (4, False), (8, True)):
        saved = optimizer.state_dict()
        saved["param_groups"][0]["amsgrad"] = amsgrad
        optimizer = torch.optim.Adam(module.parameters())
        optimizer.load_state_dict(saved)
        module(torch.arange(start, start + 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    largest, second = (optimizer.state_dict()["state"][0][name] for name in ("max_exp_avg_sq", "exp_avg_sq"))
    assert (largest >= second).all()
