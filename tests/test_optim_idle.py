"""idle="exact" against dense training by torch itself: every optimizer and hyperparameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exact_pair import CASES, Exact, warmup_and_cosine
from lazy_oracle import (
    one_thread,  # noqa: F401 - a fixture
    squared_loss,
)
from optimizer_cases import FUSED, OptimizerCase, case_named, some
from torch.optim import lr_scheduler


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [100, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_training(case: OptimizerCase, dtype: torch.dtype, steps: int) -> None:
    pair = Exact(case, dtype)
    pair.train(pair.batches(steps), *pair.schedulers(warmup_and_cosine))
    pair.assert_same()


@pytest.mark.parametrize("case", some(FUSED), ids=str)
def test_fused_optimizers(case: OptimizerCase) -> None:
    pair = Exact(case)
    pair.train(pair.batches(60))
    pair.assert_same()


# --- hyperparameters that change ----------------------------------------------------------------------------------------


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Cycles the learning rate up and the momentum (or first beta) down."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=101)


@pytest.mark.parametrize(
    "name", ["sgd-momentum", "sgd-momentum-weight-decay", "adamw", "nadam-decoupled", "radam", "rmsprop-momentum"]
)
def test_cycled_momentum(name: str) -> None:
    pair = Exact(case_named(name))
    pair.train(pair.batches(100), *pair.schedulers(one_cycle))
    pair.assert_same()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-weight-decay", "asgd", "nadam-decoupled"])
def test_hyperparameters_set_by_hand(name: str) -> None:
    pair = Exact(case_named(name))
    for number, batch in enumerate(pair.batches(120)):
        for optimizer in pair.optimizers:
            (group,) = optimizer.param_groups
            if number % 17 == 3:
                group["weight_decay"] = 0.2 * (number % 3)
            if number % 23 == 5 and "betas" in group:
                group["betas"] = (0.5 + 0.4 * (number % 2), 0.9 + 0.09 * (number % 2))
            if number % 31 == 7 and "eps" in group:
                group["eps"] = 10.0 ** -(3 + number % 6)
            group["lr"] = 0.0 if number % 11 == 0 else 0.03  # a step that moves nothing still decays the moments
        pair.train([batch])
    pair.assert_same(5e-5)


def test_tensor_learning_rate() -> None:
    pair = Exact(OptimizerCase("adam", torch.optim.Adam, {"lr": torch.tensor(0.03), "foreach": False}))
    pair.train(pair.batches(60))
    pair.assert_same()


# --- steps that are none ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{"foreach": False}, {"fused": True}], ids=["loop", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_skipped_by_grad_scaler(kind: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> None:
    pair = Exact(OptimizerCase("skipped", kind, {"lr": 0.02, "weight_decay": 0.05, **kwargs}))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7) for _ in pair.modules]
    for number, (ids, target) in enumerate(pair.batches(80)):
        for module, optimizer, scaler in zip(pair.modules, pair.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = squared_loss(module(ids), target) * (math.inf if number % 9 == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.assert_same()


def test_a_step_without_a_batch_is_none_as_in_torch() -> None:
    pair = Exact(case_named("adamw"))
    pair.train(pair.batches(10))
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
        optimizer.step()
    pair.train(pair.batches(10, seed=1))
    pair.assert_same()


def test_a_batch_of_no_ids_is_a_step_for_every_row() -> None:
    pair = Exact(case_named("adamw"))
    pair.train(pair.batches(10))
    before = pair.ours.table.torch().clone()
    empty = torch.empty(0, dtype=torch.int64), torch.empty(0, 8)
    pair.train([empty] * 3)
    pair.assert_same()
    assert not torch.equal(pair.ours.table.torch(), before)
