"""The optimizers of torch.optim as cases: one table, imported by every test that needs an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer with its hyperparameters.

    Attributes
    ----------
    name : str
        The test id.
    kind : type
        The optimizer class.
    kwargs : dict
        Its hyperparameters, the implementation (`foreach`, `fused`) among them.
    planes : tuple of str
        State that has one row per row of the weight.
    shared : tuple of str
        State that the whole table shares.
    """

    name: str
    kind: type[Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)
    planes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ("step",)

    def make(self, params: Iterable[Any], **overrides: Any) -> Optimizer:
        return self.kind(params, **{**self.kwargs, **overrides})

    def __str__(self) -> str:
        return self.name


_optim = torch.optim
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
_NADAM = ("step", "mu_product")
_ASGD = ("step", "eta", "mu")

# The learning rates are large enough that thirty steps move every weight visibly.
BASE: tuple[OptimizerCase, ...] = (
    OptimizerCase("sgd", _optim.SGD, {"lr": 0.1}, (), ()),
    OptimizerCase("sgd-momentum", _optim.SGD, {"lr": 0.05, "momentum": 0.9}, _MOMENTUM, ()),
    OptimizerCase("sgd-nesterov", _optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, _MOMENTUM, ()),
    OptimizerCase("sgd-dampening", _optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3}, _MOMENTUM, ()),
    OptimizerCase("sgd-weight-decay", _optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, (), ()),
    OptimizerCase(
        "sgd-momentum-weight-decay", _optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, _MOMENTUM, ()
    ),
    OptimizerCase("sgd-maximize", _optim.SGD, {"lr": 0.05, "momentum": 0.5, "maximize": True}, _MOMENTUM, ()),
    OptimizerCase("adam", _optim.Adam, {"lr": 0.05}, _MOMENTS),
    OptimizerCase("adam-amsgrad", _optim.Adam, {"lr": 0.05, "amsgrad": True}, (*_MOMENTS, "max_exp_avg_sq")),
    OptimizerCase("adam-weight-decay", _optim.Adam, {"lr": 0.05, "weight_decay": 0.1}, _MOMENTS),
    OptimizerCase("adamw", _optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}, _MOMENTS),
    OptimizerCase(
        "adamw-amsgrad", _optim.AdamW, {"lr": 0.05, "amsgrad": True, "maximize": True}, (*_MOMENTS, "max_exp_avg_sq")
    ),
    OptimizerCase("adamax", _optim.Adamax, {"lr": 0.05, "weight_decay": 0.01}, ("exp_avg", "exp_inf")),
    OptimizerCase("nadam", _optim.NAdam, {"lr": 0.05}, _MOMENTS, _NADAM),
    OptimizerCase(
        "nadam-decoupled",
        _optim.NAdam,
        {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True},
        _MOMENTS,
        _NADAM,
    ),
    OptimizerCase("radam", _optim.RAdam, {"lr": 0.05, "betas": (0.9, 0.99)}, _MOMENTS),
    OptimizerCase(
        "radam-decoupled", _optim.RAdam, {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}, _MOMENTS
    ),
    OptimizerCase("rmsprop", _optim.RMSprop, {"lr": 0.02}, ("square_avg",)),
    OptimizerCase("rmsprop-momentum", _optim.RMSprop, {"lr": 0.02, "momentum": 0.9}, ("square_avg", "momentum_buffer")),
    OptimizerCase(
        "rmsprop-centered",
        _optim.RMSprop,
        {"lr": 0.02, "centered": True, "momentum": 0.5},
        ("square_avg", "grad_avg", "momentum_buffer"),
    ),
    OptimizerCase("adadelta", _optim.Adadelta, {"lr": 1.0}, ("square_avg", "acc_delta")),
    OptimizerCase("adagrad", _optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}, ("sum",)),
    OptimizerCase("adagrad-initial", _optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}, ("sum",)),
    OptimizerCase("rprop", _optim.Rprop, {"lr": 0.03}, ("prev", "step_size")),
    OptimizerCase("asgd", _optim.ASGD, {"lr": 0.05, "t0": 10, "lambd": 0.01}, ("ax",), _ASGD),
)

FUSED_ON_CPU = (_optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adagrad)


def _variant(case: OptimizerCase, suffix: str, **kwargs: Any) -> OptimizerCase:
    return OptimizerCase(f"{case.name}-{suffix}", case.kind, {**case.kwargs, **kwargs}, case.planes, case.shared)


LOOP = tuple(_variant(case, "loop", foreach=False) for case in BASE)
FOREACH = tuple(_variant(case, "foreach", foreach=True) for case in BASE)
FUSED = tuple(_variant(case, "fused", fused=True) for case in BASE if case.kind in FUSED_ON_CPU)
CASES: tuple[OptimizerCase, ...] = LOOP + FOREACH + FUSED
# Each optimizer in one implementation or another, and those that are fused in that one as well.
ONCE = (*LOOP[::2], *FOREACH[1::2], *FUSED)
# One of each kind of rule and of state: buffers that mix with the weight, roots and a maximum, numbers that the table shares,
# three planes, state that is not zero at first, signs, an average of the weight; and one whose decay adapts.
KINDS = ("sgd-momentum-weight-decay", "adamw-amsgrad", "nadam", "rmsprop-centered", "adagrad-initial", "rprop", "asgd")
KINDS += ("adam-coupled",)
_SOME = {f"{kind}{how}" for kind in KINDS for how in ("", "-loop", "-foreach", "-fused")}


def some(cases: Iterable[OptimizerCase], quick: Iterable[Any] = _SOME) -> list[Any]:
    """Return parameters of a test that asks every optimizer the same: one of each kind, or `quick`; the others are slow."""
    names = {str(case) for case in quick}
    return [pytest.param(case, marks=() if case.name in names else pytest.mark.slow) for case in cases]


@dataclass(frozen=True)
class RefusedCase:
    """An optimizer that cannot train rows apart from their table, and words of the reason given."""

    name: str
    kind: type[Optimizer]
    kwargs: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        return self.name


REFUSED: tuple[RefusedCase, ...] = tuple(
    RefusedCase(name, getattr(_optim, kind), {"lr": lr}, reason)
    for name, kind, lr, reason in (
        ("adafactor", "Adafactor", 0.01, "is not row by row"),
        ("muon", "Muon", 0.01, "is not row by row"),  # from torch 2.9 on
        ("lbfgs", "LBFGS", 0.1, "evaluates the loss several times"),
        ("sparse-adam", "SparseAdam", 0.01, "takes only sparse gradients"),
    )
    if hasattr(_optim, kind)
)


def case_named(name: str) -> OptimizerCase:
    """Return the case called `name`."""
    return next(case for case in (*BASE, *CASES) if case.name == name)
