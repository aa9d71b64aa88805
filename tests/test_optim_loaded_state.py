"""State dicts of ``nn.Embedding`` and ``torch.optim`` continue here and the reverse, whatever they hold."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_oracle import LAZY, LazyOracle
from optimizer_cases import BASE, FUSED, OptimizerCase, case_named, some
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import speedtransfer as st
from speedtransfer.errors import OptimizerError

# --- there and back -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two tables and something dense."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.words, self.tags, self.head = library.Embedding(31, 8), library.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return self.head(self.words(words) + self.tags(tags))


class Run:
    """A model of `library` with an optimizer over two groups and a scheduler."""

    def __init__(self, case: OptimizerCase, library: Any) -> None:
        torch.manual_seed(4)
        self.model = Model(library)
        rest = [self.model.tags.weight, *self.model.head.parameters()]
        self.opt = case.make([{"params": [self.model.words.weight]}, {"params": rest, "lr": case.kwargs["lr"] / 2}])
        self.oracle = LazyOracle(self.opt, self.model.words, self.model.tags) if library is nn else None
        self.scheduler = lr_scheduler.StepLR(self.opt, 3, 0.7)

    def train(self, start: int, stop: int) -> Run:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            words = (torch.rand(12, generator=generator) ** 2 * 30).long()
            tags = torch.randint(10, (12,), generator=generator)
            (self.oracle or self.opt).zero_grad()
            (self.model(words, tags) - torch.randn(12, 3, generator=generator)).square().mean().backward()
            (self.oracle or self.opt).step()
            self.scheduler.step()
        return self

    def saved(self) -> dict[str, Any]:
        """Through a file, as a checkpoint goes."""
        parts = {"model": self.model, "opt": self.opt, "scheduler": self.scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict[str, Any]) -> Run:
        for name, state in copy.deepcopy(saved).items():
            getattr(self, name).load_state_dict(state)
        return self


def assert_equal(ours: Any, dense: Any, where: str = "") -> None:
    assert type(ours) is type(dense), where
    if isinstance(ours, dict):
        assert list(ours) == list(dense), where
        for key, value in ours.items():
            assert_equal(value, dense[key], f"{where}.{key}")
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, dense, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == dense, where


@pytest.mark.parametrize("case", some([*BASE, *FUSED]), ids=str)
def test_there_and_back(case: OptimizerCase) -> None:
    dense = Run(case, nn)
    assert_equal(Run(case, LAZY).saved()["opt"], dense.saved()["opt"])  # Adagrad has state before it steps
    halfway = dense.train(0, 5).saved()
    ours = Run(case, LAZY).load(halfway)
    assert_equal(ours.saved(), halfway)  # before any step
    ours.train(5, 10)
    dense.train(5, 10)
    assert_equal(ours.saved(), dense.saved())
    back = Run(case, nn).load(ours.saved()).train(10, 14)
    ours.train(10, 14)
    assert_equal(ours.saved(), back.saved())
    # Into an optimizer that has trained already, and into a new one of a model that has.
    ours.load(halfway)
    ours.opt.load_state_dict(ours.opt.state_dict())
    assert_equal(ours.train(5, 10).saved(), dense.saved())


@pytest.mark.parametrize("stepped", [False, True])
def test_planes_never_pass_through_the_device_of_the_parameter(stepped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    usual = torch.optim.Optimizer._process_value_according_to_param_policy

    def cast(param, value, *args, **kwargs):
        sizes.append(value.numel())
        return usual(param, value, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(cast))
    saved = Run(case_named("adamw"), nn).train(0, 3).saved()
    ours = Run(case_named("adamw"), LAZY)
    if stepped:
        ours.train(0, 2)
    loaded = saved["opt"]["state"][0]["exp_avg"]
    ours.opt.load_state_dict(saved["opt"])
    assert max(sizes) == ours.model.head.weight.numel()  # nothing of the tables' size
    assert ours.opt.state[ours.model.words.weight]["exp_avg"] is loaded  # not copied twice
    before = loaded.clone()
    ours.train(3, 4)
    assert torch.equal(loaded, before)  # the caller's


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("shape", [(30, 8), (31, 7), (31,), (248,)])
def test_state_of_another_shape_changes_nothing(stepped: bool, shape: tuple[int, ...]) -> None:
    saved = Run(case_named("adamw"), nn).train(0, 3).saved()["opt"]
    ours = Run(case_named("adamw"), LAZY)
    if stepped:
        ours.train(0, 2)
    before = copy.deepcopy(ours.saved())
    saved["state"][0]["exp_avg_sq"] = torch.zeros(shape)
    with pytest.raises(
        OptimizerError, match=r"'exp_avg_sq' has shape .* but the table needs \(31, 8\); load the state"
    ):
        ours.opt.load_state_dict(saved)
    assert_equal(ours.saved(), before)
    ours.train(2, 4)


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
