"""Checkpoints of ``nn.Embedding`` and ``torch.optim`` continue here and the reverse, for every optimizer case."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from lazy_oracle import LAZY, LazyOracle
from optimizer_cases import BASE, FUSED, OptimizerCase, case_named, some
from torch import Tensor, nn
from torch.optim import lr_scheduler

from speedtransfer.errors import OptimizerError


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
        groups = [{"params": [self.model.words.weight]}, {"params": rest, "lr": case.kwargs["lr"] / 2}]
        self.opt = case.make(groups)
        self.oracle = LazyOracle(self.opt, self.model.words, self.model.tags) if library is nn else None
        self.scheduler = lr_scheduler.StepLR(self.opt, 3, 0.7)

    def train(self, start: int, stop: int) -> Run:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            words = (torch.rand(12, generator=generator) ** 2 * 30).long()
            tags = torch.randint(10, (12,), generator=generator)
            (self.oracle or self.opt).zero_grad()
            loss = (self.model(words, tags) - torch.randn(12, 3, generator=generator)).square().mean()
            loss.backward()
            (self.oracle or self.opt).step()
            self.scheduler.step()
        return self

    def saved(self) -> dict[str, Any]:
        """Through a file, as a checkpoint goes."""
        file = io.BytesIO()
        parts = {"model": self.model, "opt": self.opt, "scheduler": self.scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
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


@pytest.mark.parametrize(
    "case",
    some([*BASE, *FUSED]),
    ids=str,
)
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


@pytest.fixture
def watched_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what torch casts while it loads a state dict."""
    sizes: list[int] = []
    usual = torch.optim.Optimizer._process_value_according_to_param_policy

    def cast(param, value, *args, **kwargs):
        sizes.append(value.numel())
        return usual(param, value, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(cast))
    return sizes


@pytest.mark.parametrize("stepped", [False, True])
def test_planes_never_pass_through_the_device_of_the_parameter(watched_devices: list[int], stepped: bool) -> None:
    case = case_named("adamw")
    saved = Run(case, nn).train(0, 3).saved()
    ours = Run(case, LAZY)
    if stepped:
        ours.train(0, 2)
    loaded = saved["opt"]["state"][0]["exp_avg"]
    ours.opt.load_state_dict(saved["opt"])
    assert max(watched_devices) == ours.model.head.weight.numel()  # nothing of the tables' size
    assert ours.opt.state[ours.model.words.weight]["exp_avg"] is loaded  # not copied twice
    before = loaded.clone()
    ours.train(3, 4)
    assert torch.equal(loaded, before)  # the caller's


def test_state_of_another_dtype_keeps_its_precision() -> None:
    """Torch casts state to the dtype of its parameter; planes take what they hold."""
    case = case_named("adamw")
    ours = Run(case, LAZY).train(0, 2)
    saved = copy.deepcopy(ours.opt.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name] = saved["state"][0][name].double()
    other = Run(case, LAZY).load({**ours.saved(), "opt": saved})
    assert_equal(other.train(2, 4).saved(), ours.train(2, 4).saved())


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("shape", [(30, 8), (31, 7), (31,), (248,)])
def test_state_of_another_shape_changes_nothing(stepped: bool, shape: tuple[int, ...]) -> None:
    case = case_named("adamw")
    saved = Run(case, nn).train(0, 3).saved()["opt"]
    ours = Run(case, LAZY)
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


def test_hyperparameters_of_the_checkpoint_decide_on_its_planes() -> None:
    amsgrad = OptimizerCase("amsgrad", torch.optim.Adam, {"lr": 0.05, "amsgrad": True})
    plain = OptimizerCase("plain", torch.optim.Adam, {"lr": 0.05})
    dense = Run(amsgrad, nn).train(0, 3)
    ours = Run(plain, LAZY).train(0, 2).load(dense.saved())
    assert_equal(ours.saved(), dense.saved())
    assert_equal(ours.train(3, 8).saved(), dense.train(3, 8).saved())
    assert "max_exp_avg_sq" in ours.model.words.table.planes


def test_a_copied_optimizer_saves_and_loads_too() -> None:
    """A deep copy has none of the hooks of the original."""
    run = Run(case_named("adagrad-initial"), LAZY)
    model, opt = copy.deepcopy((run.model, run.opt))
    assert_equal(opt.state_dict(), run.opt.state_dict())
    assert opt.state_dict()["state"][0]["sum"].shape == (31, 8)
    opt.load_state_dict(run.train(0, 3).opt.state_dict())
    assert_equal(opt.state_dict()["state"], run.opt.state_dict()["state"])
    assert opt.state[model.words.weight]["sum"].shape == (31, 8)
