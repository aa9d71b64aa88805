"""idle="auto", the default: exact with the optimizers whose steps are known, lazy and a warning with others."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_pair import Exact
from lazy_oracle import LazyOracle, assert_same, skewed_batches, squared_loss
from optimizer_cases import OptimizerCase, case_named
from torch import nn

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import find_handle

MAKERS = (
    speedtransfer.Embedding,
    speedtransfer.EmbeddingBag,
    speedtransfer.Embedding.from_pretrained,
    speedtransfer.EmbeddingBag.from_pretrained,
)


class OfSomebody(torch.optim.SGD):
    """What it does to idle rows nobody has said."""


def pair_of(case: OptimizerCase, **options: Any) -> Exact:
    return Exact(case, idle=options.pop("idle", "auto"), **options)


@pytest.mark.parametrize("maker", MAKERS, ids=["Embedding", "EmbeddingBag", "rows", "rows of bags"])
def test_the_default(maker: Any) -> None:
    assert inspect.signature(maker).parameters["idle"].default == "auto"


def train(module: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for ids, target in skewed_batches(12, 5, steps):
        optimizer.zero_grad()
        squared_loss(module(ids), target).backward()
        optimizer.step()


def test_an_unknown_optimizer_is_lazy_with_one_warning() -> None:
    torch.manual_seed(1)
    modules = [speedtransfer.Embedding(12, 5) for _ in range(3)]
    dense = [nn.Embedding.from_pretrained(m.table.torch().clone(), freeze=False) for m in modules]
    optimizer = OfSomebody([m.weight for m in modules], lr=0.1, momentum=0.9)
    oracle = LazyOracle(torch.optim.SGD([m.weight for m in dense], lr=0.1, momentum=0.9), *dense)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids, target in skewed_batches(12, 5, 6):
            optimizer.zero_grad()
            oracle.zero_grad()
            for ours, reference in zip(modules, dense, strict=True):
                squared_loss(ours(ids), target).backward()
                squared_loss(reference(ids), target).backward()
            optimizer.step()
            oracle.step()
    (warning,) = caught  # for three tables and six steps
    assert "OfSomebody" in str(warning.message)
    assert "idle='lazy'" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)  # where the step was made
    for ours, reference in zip(modules, dense, strict=True):
        assert ours.idle == "auto"
        assert_same(optimizer, ours, oracle, reference)


def test_lazy_by_name_says_nothing() -> None:
    module = speedtransfer.Embedding(12, 5, idle="lazy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, OfSomebody(module.parameters(), lr=0.1))
    assert find_handle(module.weight).rows.lag is None


def test_one_table_and_two_optimizers_in_turn() -> None:
    """A table is exact with the one and lazy with the other."""
    module = speedtransfer.Embedding(12, 5)
    train(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    assert find_handle(module.weight).rows.lag is not None
    with pytest.warns(UserWarning, match="OfSomebody"):
        train(module, OfSomebody(module.parameters(), lr=0.1, momentum=0.9))
    assert find_handle(module.weight).rows.lag is None


# --- copies, pickles, checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("saved", ["lazy", "exact", "auto"])
@pytest.mark.parametrize("loaded", ["lazy", "exact", "auto"])
def test_checkpoints_do_not_say_how_rows_idle(saved: str, loaded: str, tmp_path: Path) -> None:
    """It is a matter of the module that they are loaded into."""
    first, second = (pair_of(case_named("adamw"), idle=idle) for idle in (saved, loaded))
    first.train(first.batches(20))
    speedtransfer.save_checkpoint(tmp_path / "saved", first.ours, first.opt)
    speedtransfer.load_checkpoint(tmp_path / "saved", second.ours, second.opt)
    assert second.ours.idle == loaded
    assert torch.equal(first.ours.table.torch(), second.ours.table.torch())
    handle = find_handle(second.ours.weight)
    assert (handle.rows.lag is None) == (loaded == "lazy")


def test_a_checkpoint_of_an_unknown_optimizer_warns_when_it_is_loaded(tmp_path: Path) -> None:
    lazy, auto = speedtransfer.Embedding(12, 5, idle="lazy"), speedtransfer.Embedding(12, 5)
    first, second = (OfSomebody(m.parameters(), lr=0.1, momentum=0.9) for m in (lazy, auto))
    train(lazy, first)
    speedtransfer.save_checkpoint(tmp_path / "saved", lazy, first)
    with pytest.warns(UserWarning, match="OfSomebody"):
        speedtransfer.load_checkpoint(tmp_path / "saved", auto, second)
    train(auto, second)


# --- what reading costs -------------------------------------------------------------------------------------------------


def test_evaluation_reads_rows_as_they_are_where_none_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    module = speedtransfer.Embedding(12, 5).eval()
    activated = []
    monkeypatch.setattr(type(module), "activate", lambda self, ids: activated.append(ids))
    with torch.no_grad():
        module(torch.arange(12))
    assert not activated


def test_an_optimizer_without_idle_steps_makes_no_plane() -> None:
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad):
        module = speedtransfer.Embedding(12, 5)
        train(module, optimizer(module.parameters(), lr=0.1))
        assert "idle.last_step" not in module.table.planes
        train(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        assert "idle.last_step" in module.table.planes
        train(module, optimizer(module.parameters(), lr=0.1))
        assert "idle.last_step" not in module.table.planes


class Signs(torch.optim.Optimizer):
    """Not known, and leaves rows without a gradient alone unless there is decay."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(param.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("idle", ["auto", "exact"])
def test_an_unknown_optimizer_that_leaves_idle_rows_alone_needs_no_rule(idle: str) -> None:
    torch.manual_seed(0)
    ours = speedtransfer.Embedding(30, 4, idle=idle)
    torch.manual_seed(0)
    dense = nn.Embedding(30, 4)
    opts = [Signs(module.parameters()) for module in (ours, dense)]
    for shift in range(6):
        for module, opt in zip((ours, dense), opts, strict=True):
            opt.zero_grad()
            module(torch.arange(5) + 4 * shift).square().sum().backward()
            opt.step()
    assert torch.equal(ours.weight, dense.weight)
    opts[0].param_groups[0]["weight_decay"] = 0.1  # from now on it does not
    ours(torch.arange(5)).square().sum().backward()
    if idle == "auto":
        with pytest.warns(UserWarning, match="not known what Signs does"):
            opts[0].step()
    else:
        with pytest.raises(OptimizerError, match="does not know what Signs does"):
            opts[0].step()
