"""idle="exact" against dense training by torch itself: every optimizer and hyperparameter."""

from __future__ import annotations

import pytest
import torch
from exact_pair import CASES, Exact, warmup_and_cosine
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
