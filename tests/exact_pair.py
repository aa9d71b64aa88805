"""Our embedding with exact idle rows and a dense one of torch, trained alike and compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from lazy_oracle import Pair
from optimizer_cases import BASE, OptimizerCase
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer

EXTRA = (
    OptimizerCase("adamax-plain", torch.optim.Adamax, {"lr": 0.05}, ("exp_avg", "exp_inf")),
    OptimizerCase("adam-large-eps", torch.optim.Adam, {"lr": 0.05, "eps": 1e-2}),
    OptimizerCase("adam-fast-second", torch.optim.Adam, {"lr": 0.02, "betas": (0.9, 0.9)}),
    OptimizerCase("adamw-slow-first", torch.optim.AdamW, {"lr": 0.02, "betas": (0.98, 0.999), "weight_decay": 0.1}),
    OptimizerCase("adam-no-first", torch.optim.Adam, {"lr": 0.02, "betas": (0.0, 0.99)}),
    OptimizerCase("asgd-weight-decay", torch.optim.ASGD, {"lr": 0.05, "t0": 10, "lambd": 0.01, "weight_decay": 0.05}),
    OptimizerCase(
        "sgd-nesterov-weight-decay",
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
)
CASES = (*BASE, *EXTRA)
_DECAY = {"lr": 0.02, "weight_decay": 0.05}
# Optimizers that add the decay of the weights to the gradient and adapt to that: rows take their steps one by one.
COUPLED = (
    OptimizerCase("adam-coupled", torch.optim.Adam, _DECAY),
    OptimizerCase("adam-coupled-small", torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-5}),
    OptimizerCase("amsgrad-coupled", torch.optim.Adam, {**_DECAY, "amsgrad": True, "maximize": True}),
    OptimizerCase("adamax-coupled", torch.optim.Adamax, _DECAY),
    OptimizerCase("nadam-coupled", torch.optim.NAdam, _DECAY),
    OptimizerCase("radam-coupled", torch.optim.RAdam, {**_DECAY, "betas": (0.9, 0.99)}),
    OptimizerCase("rmsprop-coupled", torch.optim.RMSprop, _DECAY),
    OptimizerCase("rmsprop-coupled-momentum", torch.optim.RMSprop, {**_DECAY, "lr": 0.002, "momentum": 0.9}),
    OptimizerCase(
        "rmsprop-coupled-centered",
        torch.optim.RMSprop,
        {**_DECAY, "centered": True, "momentum": 0.5, "lr": 0.002, "eps": 1e-3},
    ),
    OptimizerCase("adadelta-coupled", torch.optim.Adadelta, {**_DECAY, "lr": 1.0}),
    OptimizerCase("adagrad-coupled", torch.optim.Adagrad, {**_DECAY, "lr": 0.1, "lr_decay": 0.01, "maximize": True}),
)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}  # of the distance moved


class Exact(Pair):
    """An embedding of ours with exact idle rows and that of torch."""

    size = 8

    def __init__(
        self, case: OptimizerCase, dtype: torch.dtype = torch.float32, rows: int = 60, dim: int = 8, **options: Any
    ):
        torch.manual_seed(3)
        ours = speedtransfer.Embedding(rows, dim, dtype=dtype, **{"idle": "exact", **options})
        torch.manual_seed(3)
        super().__init__(case.make, ours, nn.Embedding(rows, dim, dtype=dtype))
        self.start = self.dense.weight.detach().clone()
        self.dtype = dtype

    def assert_same(self, tolerance: float | None = None) -> None:
        """Compare weights and state over the whole table; the tolerance is a share of what training has changed."""
        tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        weight, expected = self.ours.table.torch(), self.dense.weight.detach()
        moved = float((expected - self.start).abs().max())
        assert moved > 0.01
        torch.testing.assert_close(weight, expected, rtol=0, atol=tolerance * moved)
        state = self.dense_opt.state[self.dense.weight]
        ours = self.opt.state[self.ours.weight]
        assert set(ours) == set(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                scale = float(value.abs().max()) if value.numel() else 0.0
                torch.testing.assert_close(
                    ours[key], value, rtol=0, atol=tolerance * scale, msg=lambda text, key=key: f"{key}: {text}"
                )


def warmup_and_cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / 400))
    )
