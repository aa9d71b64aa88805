"""State dicts of ``nn.Embedding`` and ``torch.optim`` continue here and the reverse, whatever they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import saved
from lazy_oracle import Twins, exact
from optimizer_cases import BASE, COUPLED, FUSED, OptimizerCase, case_named, some
from torch import Tensor, nn, optim
from weight_world import assert_equal

import speedtransfer as st
from speedtransfer.errors import OptimizerError

# --- there and back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("case", some([*BASE, *FUSED, *COUPLED]), ids=str)
def test_there_and_back(case: OptimizerCase, idle: str) -> None:
    """From ours to torch and from torch to ours, through a file; into a new optimizer and one that has trained already."""
    pair, again = ((Twins(case.make) if idle == "lazy" else exact(case, torch.float64)) for _ in range(2))
    for seed in range(3):
        pair.train(pair.batches(8, seed=seed))
        for to, source in ((0, 1), (1, 0)):
            again.modules[to].load_state_dict(pair.modules[source].state_dict())
            again.optimizers[to].load_state_dict(saved(pair.optimizers[source].state_dict(), weights_only=True))
        # Before any step.
        states = (optimizer.state_dict() for optimizer in again.optimizers)
        assert_equal(*states, 0.0 if idle == "lazy" else 1e-9, case.name)
        pair, again = again, pair
    pair.train(pair.batches(8, seed=4))
    pair.assert_same(1e-9 if idle == "exact" else None)


def trained(steps: int) -> Twins:
    twins = Twins(case_named("adamw").make)
    twins.train(twins.batches(steps))
    return twins


@pytest.mark.parametrize("steps", [0, 2])
def test_planes_never_pass_through_the_device_of_the_parameter(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    usual = torch.optim.Optimizer._process_value_according_to_param_policy

    def cast(param, value, *args, **kwargs):
        sizes.append(value.numel())
        return usual(param, value, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(cast))
    state, ours = copy.deepcopy(trained(3).dense_opt.state_dict()), trained(steps)
    loaded = state["state"][0]["exp_avg"]
    ours.opt.load_state_dict(state)
    # Nothing of the size of the table.
    assert max(sizes) == 1
    # It is not copied, and is the caller's.
    assert ours.opt.state[ours.ours.weight]["exp_avg"] is loaded
    before = loaded.clone()
    ours.train(ours.batches(1))
    assert torch.equal(loaded, before)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("shape", [(40, 16), (41, 15), (41,), (656,)])
def test_state_of_another_shape_changes_nothing(steps: int, shape: tuple[int, ...]) -> None:
    ours, state = trained(steps), copy.deepcopy(trained(3).dense_opt.state_dict())
    before = copy.deepcopy(ours.opt.state_dict())
    state["state"][0]["exp_avg_sq"] = torch.zeros(shape)
    with pytest.raises(
        OptimizerError, match=r"'exp_avg_sq' has shape .* but the table needs \(41, 16\); load the state"
    ):
        ours.opt.load_state_dict(state)
    assert_equal(ours.opt.state_dict(), before, 0.0, "state")
    ours.train(ours.batches(2))
    ours.assert_same()


# --- state dicts that are not quite what the optimizer would save: as in torch, or errors where torch raises -------------

State = dict[str, Any]
_SGD = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}


def _plane(state: State) -> Tensor:
    return next(value for value in state.values() if isinstance(value, Tensor) and value.dim() == 2)


def _ones() -> Tensor:
    return torch.ones(10, 2, dtype=torch.float64)


def _same(state: State) -> State:
    return state


# By name: class, hyperparameters when it is saved and when it is loaded, what is in the state of each parameter then.
LOADED: dict[str, tuple[Any, State, State, Callable[[State], State]]] = {
    "amsgrad off": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}, _same),
    "amsgrad on": (optim.Adam, {}, {"amsgrad": True}, _same),
    "momentum off": (optim.RMSprop, {"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.1}, _same),
    "SGD momentum off": (optim.SGD, _SGD, {"momentum": 0.0}, _same),
    "SGD momentum on": (optim.SGD, {}, _SGD, _same),
    "a plane of others": (optim.Adam, {}, {}, lambda state: state | {"third": _plane(state) + 1}),
    "a vector of others": (optim.RAdam, {}, {}, lambda state: state | {"third": _plane(state)[:, 0] + 1}),
    "a number of others": (optim.Adagrad, {}, {}, lambda state: state | {"third": torch.tensor(2.0)}),
    "words of others": (optim.Adam, {}, {}, lambda state: state | {"third": "x"}),
    "a plane in a dict": (optim.NAdam, {}, {}, lambda state: state | {"third": {"a": _plane(state) + 1}}),
    "SGD from Adam": (optim.SGD, {}, {"momentum": 0.9}, lambda _: {"step": torch.tensor(3.0), "exp_avg": _ones()}),
    "no second moments": (optim.Adam, {}, {}, lambda state: {k: v for k, v in state.items() if k != "exp_avg_sq"}),
    "no step": (optim.Adam, {}, {}, lambda state: {k: v for k, v in state.items() if k != "step"}),
    "None": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": None}),
    "SGD empty": (optim.SGD, _SGD, _SGD, lambda state: {}),
    "single precision": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"].float()}),
    "transposed": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"].t().contiguous().t()}),
    "fewer rows": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"][1:]}),
    "no rows": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": torch.tensor(0.5)}),
    "step float": (optim.NAdam, {}, {}, lambda state: state | {"step": 5.0, "mu_product": 0.3}),
    "step of one": (optim.Adam, {}, {}, lambda state: state | {"step": torch.tensor([5.0])}),
    "step double": (optim.ASGD, {}, {}, lambda state: state | {"step": torch.tensor(5, dtype=torch.float64)}),
}


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


def outcome(make: Any, saver: Any, case: str, folder: Path | None) -> tuple[Tensor, State] | Exception:
    kind, before, options, change = LOADED[case]
    module, optimizer = made(saver, kind, before)
    train(module, optimizer, 5, 0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    saved["state"][0] = change(saved["state"].get(0, {}))
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


@pytest.mark.sweep
@pytest.mark.parametrize("case", LOADED)
@pytest.mark.parametrize("way", ["dense", "ours", "checkpoint"])
def test_loaded_state(case: str, way: str, tmp_path: Path) -> None:
    """Saved by a dense optimizer, by one of a table, by `save_checkpoint`."""
    saver = st.Embedding if way == "ours" else nn.Embedding
    folders = (tmp_path / "dense", tmp_path / "ours") if way == "checkpoint" else (None, None)
    dense, ours = outcome(nn.Embedding, nn.Embedding, case, folders[0]), outcome(st.Embedding, saver, case, folders[1])
    if isinstance(dense, Exception):
        # Of torch where it is the same one, else ours.
        assert isinstance(ours, (type(dense), OptimizerError, st.errors.InvalidValueError)), ours
        return
    assert not isinstance(ours, Exception), ours
    torch.testing.assert_close(ours[0], dense[0], rtol=0, atol=1e-12)
    assert ours[1].keys() == dense[1].keys()
    for name, value in dense[1].items():
        if isinstance(value, Tensor):
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
