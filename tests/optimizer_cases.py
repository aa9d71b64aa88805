"""The optimizers of torch.optim as cases: one table, imported by every test that needs an optimizer."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer with its hyperparameters, the implementation (`foreach`, `fused`) among them.

    `planes` is the state that has one row per row of the weight, `shared` that of the whole table.
    """

    name: str
    kind: type[Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)
    planes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ("step",)

    def make(self, params, **overrides):
        return self.kind(params, **{**self.kwargs, **overrides})

    def __str__(self):
        return self.name


_PLANES = {
    "SGD": "momentum_buffer",
    "Adam": "exp_avg exp_avg_sq max_exp_avg_sq",
    "AdamW": "exp_avg exp_avg_sq max_exp_avg_sq",
    "Adamax": "exp_avg exp_inf",
    "NAdam": "exp_avg exp_avg_sq",
    "RAdam": "exp_avg exp_avg_sq",
    "RMSprop": "square_avg momentum_buffer grad_avg",
    "Adadelta": "square_avg acc_delta",
    "Adagrad": "sum",
    "Rprop": "prev step_size",
    "ASGD": "ax",
}
_SHARED = {"SGD": (), "NAdam": ("step", "mu_product"), "ASGD": ("step", "eta", "mu")}
_OPTIONAL = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}


def _case(name, kind, **kwargs):
    planes = [plane for plane in _PLANES[kind].split() if plane not in _OPTIONAL or kwargs.get(_OPTIONAL[plane])]
    return OptimizerCase(name, getattr(torch.optim, kind), kwargs, tuple(planes), _SHARED.get(kind, ("step",)))


# The learning rates are large enough that thirty steps move every weight visibly.
BASE = (
    _case("sgd", "SGD", lr=0.1),
    _case("sgd-momentum", "SGD", lr=0.05, momentum=0.9),
    _case("sgd-nesterov", "SGD", lr=0.05, momentum=0.9, nesterov=True),
    _case("sgd-dampening", "SGD", lr=0.1, momentum=0.8, dampening=0.3),
    _case("sgd-weight-decay", "SGD", lr=0.1, weight_decay=0.1),
    _case("sgd-momentum-weight-decay", "SGD", lr=0.05, momentum=0.9, weight_decay=0.1),
    _case("sgd-maximize", "SGD", lr=0.05, momentum=0.5, maximize=True),
    _case("adam", "Adam", lr=0.05),
    _case("adam-amsgrad", "Adam", lr=0.05, amsgrad=True),
    _case("adam-weight-decay", "Adam", lr=0.05, weight_decay=0.1),
    _case("adamw", "AdamW", lr=0.05, weight_decay=0.1),
    _case("adamw-amsgrad", "AdamW", lr=0.05, amsgrad=True, maximize=True),
    _case("adamax", "Adamax", lr=0.05, weight_decay=0.01),
    _case("nadam", "NAdam", lr=0.05),
    _case("nadam-decoupled", "NAdam", lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    _case("radam", "RAdam", lr=0.05, betas=(0.9, 0.99)),
    _case("radam-decoupled", "RAdam", lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    _case("rmsprop", "RMSprop", lr=0.02),
    _case("rmsprop-momentum", "RMSprop", lr=0.02, momentum=0.9),
    _case("rmsprop-centered", "RMSprop", lr=0.02, centered=True, momentum=0.5),
    _case("adadelta", "Adadelta", lr=1.0),
    _case("adagrad", "Adagrad", lr=0.1, lr_decay=0.01),
    _case("adagrad-initial", "Adagrad", lr=0.1, initial_accumulator_value=0.3),
    _case("rprop", "Rprop", lr=0.03),
    _case("asgd", "ASGD", lr=0.05, t0=10, lambd=0.01),
)
# Other hyperparameters, which matter to what idle rows miss.
EXTRA = (
    _case("adamax-plain", "Adamax", lr=0.05),
    _case("adam-large-eps", "Adam", lr=0.05, eps=1e-2),
    _case("adam-fast-second", "Adam", lr=0.02, betas=(0.9, 0.9)),
    _case("adamw-slow-first", "AdamW", lr=0.02, betas=(0.98, 0.999), weight_decay=0.1),
    _case("adam-no-first", "Adam", lr=0.02, betas=(0.0, 0.99)),
    _case("asgd-weight-decay", "ASGD", lr=0.05, t0=10, lambd=0.01, weight_decay=0.05),
    _case("sgd-nesterov-weight-decay", "SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05),
)
ALL = (*BASE, *EXTRA)
_DECAY = {"lr": 0.02, "weight_decay": 0.05}
# Optimizers that add the decay of the weights to the gradient and adapt to that: rows take their steps one by one.
COUPLED = (
    _case("adam-coupled", "Adam", **_DECAY),
    _case("adam-coupled-small", "Adam", lr=0.01, weight_decay=1e-5),
    _case("amsgrad-coupled", "Adam", **_DECAY, amsgrad=True, maximize=True),
    _case("adamax-coupled", "Adamax", **_DECAY),
    _case("nadam-coupled", "NAdam", **_DECAY),
    _case("radam-coupled", "RAdam", **_DECAY, betas=(0.9, 0.99)),
    _case("rmsprop-coupled", "RMSprop", **_DECAY),
    _case("rmsprop-coupled-momentum", "RMSprop", lr=0.002, weight_decay=0.05, momentum=0.9),
    _case("rmsprop-coupled-centered", "RMSprop", lr=0.002, weight_decay=0.05, centered=True, momentum=0.5, eps=1e-3),
    _case("adadelta-coupled", "Adadelta", lr=1.0, weight_decay=0.05),
    _case("adagrad-coupled", "Adagrad", lr=0.1, weight_decay=0.05, lr_decay=0.01, maximize=True),
)

FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def variants(cases, suffix, **kwargs):
    """Return cases with an implementation, ``loop``, ``foreach`` or ``fused``, those that have it on the CPU."""
    return tuple(
        OptimizerCase(f"{case.name}-{suffix}", case.kind, {**case.kwargs, **kwargs}, case.planes, case.shared)
        for case in cases
        if suffix != "fused" or case.kind in FUSED_ON_CPU
    )


LOOP, FOREACH = variants(BASE, "loop", foreach=False), variants(BASE, "foreach", foreach=True)
FUSED = variants(BASE, "fused", fused=True)
CASES = LOOP + FOREACH + FUSED
# Each optimizer in one implementation or another, and those that are fused in that one as well.
ONCE = (*LOOP[::2], *FOREACH[1::2], *FUSED)
# One of each kind of rule and of state: buffers that mix with the weight, roots and a maximum, numbers that the table shares,
# three planes, state that is not zero at first, signs, an average of the weight; and one whose decay adapts.
KINDS = ("sgd-momentum-weight-decay", "adamw-amsgrad", "nadam", "rmsprop-centered", "adagrad-initial", "rprop", "asgd")
KINDS += ("adam-coupled",)
_SOME = {f"{kind}{how}" for kind in KINDS for how in ("", "-loop", "-foreach", "-fused")}


def some(cases, quick=_SOME):
    """Return parameters of a test that asks every optimizer the same: one of each kind, or `quick`; the others are slow."""
    names = {str(case) for case in quick}
    return [pytest.param(case, marks=() if case.name in names else pytest.mark.slow) for case in cases]


# Optimizers that cannot train rows apart from their table, and words of the reason given.
REFUSED = tuple(
    (OptimizerCase(name, getattr(torch.optim, kind), {"lr": lr}), reason)
    for name, kind, lr, reason in (
        ("adafactor", "Adafactor", 0.01, "is not row by row"),
        ("muon", "Muon", 0.01, "is not row by row"),  # from torch 2.9 on
        ("lbfgs", "LBFGS", 0.1, "evaluates the loss several times"),
        ("sparse-adam", "SparseAdam", 0.01, "takes only sparse gradients"),
    )
    if hasattr(torch.optim, kind)
)


def case_named(name):
    """Return the case called `name`."""
    return next(case for case in (*ALL, *COUPLED, *CASES) if case.name == name)


def warmup_and_cosine(optimizer):
    return lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / 400))
    )
