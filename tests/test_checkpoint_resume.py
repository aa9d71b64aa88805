"""Interrupted and resumed is as never interrupted, bit for bit, for every optimizer; torch and we load each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import Run, seed_all
from lazy_oracle import Twins
from optimizer_cases import BASE, FUSED, OptimizerCase, case_named, some
from torch import nn

import speedtransfer as st

UNTRAINED = ("adagrad-initial", "adamw", "sgd")  # Adagrad has state before it steps
# Some, and one that is fused; all, and all that are fused, are slow.
ALL = [*some(BASE), *some(FUSED, ["adamw-fused"])]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_resuming_is_going_on(case: OptimizerCase, tmp_path: Path) -> None:
    whole = Run(case)
    seed_all(7)
    whole.epochs(4)
    first = Run(case)
    seed_all(7)
    first.epochs(2)
    first.save(tmp_path / "point", extra={"epoch": 2})
    halfway = first.digest()
    first.epochs(2)  # saving has changed nothing
    assert first.digest() == whole.digest()
    second = Run(case, seed=1)
    seed_all(8)
    assert second.load(tmp_path / "point") == {"epoch": 2}
    assert second.digest() == halfway
    second.epochs(2)
    assert second.losses == whole.losses[-len(second.losses) :]
    assert second.digest() == whole.digest()


@pytest.mark.parametrize("case", ALL, ids=str)
def test_checkpoints_cross_over_and_training_continues_equal(case: OptimizerCase, tmp_path: Path) -> None:
    cross_over(case, 10, tmp_path)


@pytest.mark.parametrize("name", UNTRAINED)
def test_checkpoints_of_no_step_cross_over(name: str, tmp_path: Path) -> None:
    cross_over(case_named(name), 0, tmp_path)


def cross_over(case: OptimizerCase, steps: int, tmp_path: Path) -> None:
    """Ours into torch, torch into ours: models that go on alike."""
    twins = Twins(case.make)
    batches = twins.batches(20)
    twins.train(batches[:steps])
    st.save_checkpoint(tmp_path / "ours", twins.ours, twins.opt)
    st.save_checkpoint(tmp_path / "dense", twins.dense, twins.dense_opt)
    twins.assert_same()  # Adagrad has made its first state when it was saved before a step
    twins.make = lambda params: case.make(params, lr=0.5)
    twins.use(st.Embedding(twins.num_rows, twins.dim, idle="lazy"), nn.Embedding(twins.num_rows, twins.dim))
    st.load_checkpoint(tmp_path / "dense", twins.ours, twins.opt)
    st.load_checkpoint(tmp_path / "ours", twins.dense, twins.dense_opt)
    if steps:
        twins.assert_same()
    twins.train(batches[steps:])
    twins.assert_same()


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_memories_load_each_other(memory: str, tmp_path: Path) -> None:
    case = case_named("adamw-amsgrad")
    run = Run(case)
    seed_all(3)
    run.epochs(1)
    run.save(tmp_path / "point")
    options = {"path": tmp_path / "rows.npy"} if memory == "mmap" else {}
    other = Run(case, 4, memory=memory, **options)
    other.load(tmp_path / "point")
    for each in (run, other):
        seed_all(6)
        each.epochs(1)
    assert other.digest() == run.digest()
    other.save(tmp_path / "back")
    back = Run(case, 5)
    back.load(tmp_path / "back")
    assert back.digest() == run.digest()


def test_two_optimizers(tmp_path: Path) -> None:
    def make() -> tuple:
        run = Run(case_named("sgd"))
        rows = torch.optim.Adam([run.model.words.weight, run.model.bag.weight], lr=0.1)
        dense = torch.optim.SGD([*run.model.dense.parameters(), *run.model.norm.parameters()], lr=0.1, momentum=0.9)
        return run.model, rows, dense

    def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        for step in range(3):
            model(torch.arange(step, 12 + step).view(4, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    first, second = make(), make()
    train(*first)
    st.save_checkpoint(tmp_path, first[0], first[1], dense=first[2])
    train(*first)
    st.load_checkpoint(tmp_path, second[0], second[1], dense=second[2])
    train(*second)
    for key, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[key]), key


def test_state_that_is_no_longer_used_stays(tmp_path: Path) -> None:
    run = Run(case_named("adamw-amsgrad"))
    run.epochs(1)
    run.optimizer.param_groups[0]["amsgrad"] = False
    run.epochs(1)
    run.save(tmp_path)
    expected = run.digest()
    other = Run(case_named("adamw-amsgrad"), 1)
    other.load(tmp_path)
    assert other.digest() == expected
    assert other.optimizer.state[other.model.words.weight].keys() >= {"max_exp_avg_sq"}
    for each in (run, other):
        seed_all(1)
        each.optimizer.param_groups[0]["amsgrad"] = True
        each.epochs(1)
    assert run.digest() == other.digest()
