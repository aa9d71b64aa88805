"""What one step of an optimizer does to a row without a gradient, for every row-by-row optimizer of ``torch.optim``.

The formulas are those of the "Algorithm" boxes in the documentation of ``torch.optim`` with a gradient of zero.
Hyperparameters are taken as torch's kernels take them: rounded to the dtype of the rows where a kernel multiplies by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError


@dataclass
class IdleStep:
    """One step, as rows see it that have no gradient. Fields that a rule does not use stay as they are here.

    Attributes
    ----------
    decay : float
        Multiplies the weights, before anything is added to them.
    factors : tuple of float
        Multiply the planes of `Rule.factors`.
    mix : tuple of float
        ``(a, b, c, d)``: weights p and the plane q of `Rule.partner` become ``a p + b q`` and ``c p + d q``.
    scale, root, eps : float
        ``scale * m / (root * x + eps)`` is taken from the weights, m being the first plane of `Rule.factors` and x that of
        `Rule.denominator` (its root, unless `Rule.floor`), both after their factors.
    """

    decay: float = 1.0
    factors: tuple[float, ...] = ()
    mix: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)
    scale: float = 0.0
    root: float = 1.0
    eps: float = 1.0

    @property
    def is_nothing(self) -> bool:
        """Whether rows stay as they are."""
        return self == IdleStep(factors=(1.0,) * len(self.factors), root=self.root, eps=self.eps)


class Rule:
    """What an optimizer does to idle rows.

    Attributes
    ----------
    factors : tuple of str
        State that idle steps multiply.
    partner : str or None
        State that mixes with the weights.
    denominator : str or None
        State that the numerator is divided by.
    floor : bool
        The denominator is x itself and never less than eps (Adamax), instead of ``root * sqrt(x) + eps``.
    """

    factors: tuple[str, ...] = ()
    partner: str | None = None
    denominator: str | None = None
    floor: bool = False
    decoupled: ClassVar[bool | None] = True  # weight decay acts on the weights alone; None: the group says so

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def check(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Raise where no short formula tells what the hyperparameters of `group` do to idle rows."""
        coupled = not (group.get("decoupled_weight_decay", False) if self.decoupled is None else self.decoupled)
        if coupled and group.get("weight_decay", 0) != 0:
            name = type(optimizer).__name__
            raise OptimizerError(
                f"{name} with weight_decay={float(group['weight_decay'])} adds the weights to the gradient, so an idle row "
                f"takes a full {name} step each time and idle='exact' would have to run them all; decouple the decay (AdamW, "
                "decoupled_weight_decay=True for NAdam and RAdam), set weight_decay=0, or pass idle='lazy'"
            )

    def before(self, state: dict[str, Any]) -> Any:
        """Return what `step` must know of the optimizer's state before its step."""
        return None

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        """Return what the step just made, with the hyperparameters `group` and `state` after it, did to idle rows."""
        return IdleStep(factors=(1.0,) * len(self.factors))

    def _rounded(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self.dtype, device="cpu")) if self.dtype != torch.float64 else value

    def _moved_by(self, weight: float) -> float:
        """Return the factor by which ``lerp(0, weight)`` multiplies."""
        return 1.0 - self._rounded(weight)


def _numbers(group: dict[str, Any], *names: str) -> list[float]:
    return [float(group.get(name, 0.0)) for name in names]


class _Sgd(Rule):
    partner = "momentum_buffer"

    def before(self, state: dict[str, Any]) -> bool:
        return state.get("momentum_buffer") is None  # torch then starts it with the gradient, undamped

    def step(self, group: dict[str, Any], state: dict[str, Any], before: bool) -> IdleStep:
        numbers = _numbers(group, "lr", "weight_decay", "momentum", "dampening")
        lr, decay, momentum, dampening = (self._rounded(number) for number in numbers)
        if momentum == 0:
            return IdleStep(mix=(1 - lr * decay, 0.0, 0.0, 1.0))
        kept, added = (0.0, decay) if before else (momentum, (1 - dampening) * decay)
        if group["nesterov"]:
            return IdleStep(mix=(1 - lr * (decay + momentum * added), -lr * momentum * kept, added, kept))
        return IdleStep(mix=(1 - lr * added, -lr * kept, added, kept))


class _Asgd(Rule):
    partner = "ax"

    def before(self, state: dict[str, Any]) -> tuple[float, float]:
        return (float(state["eta"]), float(state["mu"])) if state else (math.nan, 1.0)  # made by the first step

    def step(self, group: dict[str, Any], state: dict[str, Any], before: tuple[float, float]) -> IdleStep:
        eta, mu = before
        lr, lambd, decay = _numbers(group, "lr", "lambd", "weight_decay")
        eta = (
            float(torch.tensor(lr, device="cpu")) if math.isnan(eta) else eta
        )  # a tensor of the default dtype, whatever the rows are
        kept = self._rounded(1 - lambd * eta) - eta * self._rounded(decay)
        return IdleStep(mix=(kept, 0.0, mu * kept, 1 - mu))


class _RMSprop(Rule):
    factors = ("square_avg", "grad_avg")
    partner = "momentum_buffer"
    decoupled = False

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        lr, momentum, alpha = _numbers(group, "lr", "momentum", "alpha")
        lr, momentum = self._rounded(lr), self._rounded(momentum)
        mix = (1.0, -lr * momentum, 0.0, momentum) if momentum else (1.0, 0.0, 0.0, 1.0)
        return IdleStep(factors=(self._rounded(alpha), self._moved_by(1 - alpha)), mix=mix)


class _Adadelta(Rule):
    factors = ("square_avg", "acc_delta")
    decoupled = False

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return IdleStep(factors=(self._rounded(float(group["rho"])),) * 2)


class _Adagrad(Rule):
    decoupled = False


class _Rprop(Rule):
    factors = ("prev",)

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return IdleStep(factors=(0.0,))


class _Adam(Rule):
    factors = ("exp_avg", "exp_avg_sq")
    denominator = "exp_avg_sq"
    decoupled: ClassVar[bool | None] = None
    checked = False

    def check(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        super().check(optimizer, group)
        denominator = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        if self.checked and denominator != self.denominator:
            raise OptimizerError(
                f"amsgrad became {group['amsgrad']} while idle rows still had steps of the other kind to come; set it before "
                "training, or pass idle='lazy'"
            )
        self.denominator, self.checked = denominator, True

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        lr, decay, eps = _numbers(group, "lr", "weight_decay", "eps")
        first, second = (float(beta) for beta in group["betas"])
        scale, root, eps = self._term(group, state, float(state["step"]), lr, first, second, eps)
        return IdleStep(
            decay=self._rounded(1 - lr * decay),
            factors=(self._moved_by(1 - first), self._rounded(second)),
            scale=scale,
            root=root,
            eps=eps,
        )

    def _term(
        self, group: dict[str, Any], state: dict[str, Any], t: float, lr: float, first: float, second: float, eps: float
    ) -> tuple[float, float, float]:
        """Return scale, root and eps of step number `t`."""
        return lr / (1 - first**t), 1 / math.sqrt(1 - second**t), eps


class _AdamW(_Adam):
    decoupled = True


class _NAdam(_Adam):
    def _term(
        self, group: dict[str, Any], state: dict[str, Any], t: float, lr: float, first: float, second: float, eps: float
    ) -> tuple[float, float, float]:
        following = first * (1 - 0.5 * 0.96 ** ((t + 1) * float(group["momentum_decay"])))
        scale = lr * following / (1 - float(state["mu_product"]) * following)
        return scale, 1 / math.sqrt(1 - second**t), eps


class _RAdam(_Adam):
    def _term(
        self, group: dict[str, Any], state: dict[str, Any], t: float, lr: float, first: float, second: float, eps: float
    ) -> tuple[float, float, float]:
        scale, correction = lr / (1 - first**t), 1 - second**t
        longest = 2 / (1 - second) - 1
        length = longest - 2 * t * second**t / correction
        if length <= 5:
            return scale, 0.0, 1.0  # no denominator yet
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return scale * math.sqrt(rectified * correction), 1.0, eps


class _Adamax(_Adam):
    factors = ("exp_avg", "exp_inf")
    denominator = "exp_inf"
    floor = True
    decoupled = False

    def check(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        Rule.check(self, optimizer, group)

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return IdleStep(**{**vars(super().step(group, state, before)), "decay": 1.0})

    def _term(
        self, group: dict[str, Any], state: dict[str, Any], t: float, lr: float, first: float, second: float, eps: float
    ) -> tuple[float, float, float]:
        return lr / (1 - first**t), 1.0, eps


RULES: dict[type[Optimizer], Callable[[torch.dtype], Rule]] = {
    optim.SGD: _Sgd,
    optim.ASGD: _Asgd,
    optim.RMSprop: _RMSprop,
    optim.Adadelta: _Adadelta,
    optim.Adagrad: _Adagrad,
    optim.Rprop: _Rprop,
    optim.Adam: _Adam,
    optim.AdamW: _AdamW,
    optim.NAdam: _NAdam,
    optim.RAdam: _RAdam,
    optim.Adamax: _Adamax,
}


def rule_for(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> Rule:
    """Return the rule of `optimizer`.

    Raises
    ------
    OptimizerError
        What it does to idle rows is not known, or has no short formula.
    """
    make = RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(sorted(kind.__name__ for kind in RULES))
        raise OptimizerError(
            f"idle='exact' does not know what {type(optimizer).__name__} does to a row without a gradient; use one of torch's "
            f"{names}, or pass idle='lazy', with which any row-by-row optimizer trains"
        )
    rule = make(dtype)
    rule.check(optimizer, group)
    return rule
