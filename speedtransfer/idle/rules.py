"""The effect of one optimizer step on a row with zero gradient, for every row-by-row optimizer of ``torch.optim``.

Most steps are a short formula (`IdleStep`), and many of them together are one too. With weight decay that an adaptive
optimizer adds to the gradient ("coupled") there is none: a step is then the `Numbers` that it was made with, and rows take
every one of those they missed.

The formulas are those of the "Algorithm" boxes in the documentation of ``torch.optim`` with a gradient of zero.
Hyperparameters are taken as torch's kernels take them: rounded to the dtype of the rows where a kernel multiplies by them; a
``lerp`` towards zero by w multiplies by 1 - w.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.idle.rule import IDENTITY, Form, IdleStep, Numbers, Rule, rounded


class _Sgd(Rule):
    partner = "momentum_buffer"

    def before(self, state: dict[str, Any]) -> bool:
        return state.get("momentum_buffer") is None  # torch then starts it with the gradient, undamped

    def step(self, group: dict[str, Any], state: dict[str, Any], before: bool) -> IdleStep:
        numbers = self._numbers(group, "lr", "weight_decay", "momentum", "dampening")
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
        if not state:  # made by the first step
            return math.nan, 1.0
        return self.scalars.read("eta", state["eta"]), self.scalars.read("mu", state["mu"])

    def step(self, group: dict[str, Any], state: dict[str, Any], before: tuple[float, float]) -> IdleStep:
        eta, mu = before
        lr, lambd, decay, alpha, t0 = self._numbers(group, "lr", "lambd", "weight_decay", "alpha", "t0")
        # What the step has made of them, for the next one.
        t, dtype = self._count(state), state["eta"].dtype
        self.scalars.read("eta", state["eta"], 1, lambda _: rounded(lr / (1 + lambd * lr * t) ** alpha, dtype))
        self.scalars.read("mu", state["mu"], 1, lambda _: rounded(1 / max(1.0, t - t0), dtype))
        if math.isnan(eta):  # a tensor of the default dtype, whatever the rows are
            eta = float(torch.tensor(lr, device="cpu"))
        kept = self._rounded(1 - lambd * eta) - eta * self._rounded(decay)
        return IdleStep(mix=(kept, 0.0, mu * kept, 1 - mu))


class _RMSprop(Rule):
    factors = ("square_avg", "grad_avg")
    partner = "momentum_buffer"
    replay = "rmsprop"

    def numbers(self, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        lr, decay, momentum, alpha, eps = self._numbers(group, "lr", "weight_decay", "momentum", "alpha", "eps")
        return decay, alpha, 1 - alpha, eps, lr, momentum, float(bool(group["centered"]))

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        lr, momentum, alpha = self._numbers(group, "lr", "momentum", "alpha")
        lr, momentum = self._rounded(lr), self._rounded(momentum)
        mix = (1.0, -lr * momentum, 0.0, momentum) if momentum else IDENTITY
        # The mean of the gradients stays as it is while `centered` is off.
        mean = 1 - self._rounded(1 - alpha) if group["centered"] else 1.0
        return IdleStep(factors=(self._rounded(alpha), mean), mix=mix)


class _Adadelta(Rule):
    factors = ("square_avg", "acc_delta")
    replay = "adadelta"

    def numbers(self, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        lr, decay, rho, eps = self._numbers(group, "lr", "weight_decay", "rho", "eps")
        return decay, rho, 1 - rho, eps, lr

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return IdleStep(factors=(self._rounded(float(group["rho"])),) * 2)


class _Adagrad(Rule):
    replay = "adagrad"

    def numbers(self, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        lr, decay, lr_decay, eps = self._numbers(group, "lr", "weight_decay", "lr_decay", "eps")
        return decay, lr / (1 + (self._count(state) - 1) * lr_decay), eps


class _Rprop(Rule):
    factors = ("prev",)

    def form(self, group: dict[str, Any], state: dict[str, Any]) -> Form:
        return Form(False, None, tuple(float(size) for size in group["step_sizes"]))

    def bound(self, rows: dict[str, Tensor], first: IdleStep) -> None:
        assert self.taken.bounds is not None
        rows["step_size"].clamp_(*self.taken.bounds)

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return IdleStep(factors=(0.0,))


class _Made(NamedTuple):
    """What a step of Adam and its relatives was made with; `t` is its number."""

    lr: float
    decay: float
    eps: float
    momentum_decay: float
    first: float
    second: float
    t: float
    product: float = 1.0  # of the momenta so far


class _Adam(Rule):
    factors = ("exp_avg", "exp_avg_sq")
    denominator = "exp_avg_sq"
    replay = "adam"
    # Whether weight decay acts on the weights alone, unless the group says it (older versions of torch have no such entry).
    decoupled: ClassVar[bool] = False

    def form(self, group: dict[str, Any], state: dict[str, Any]) -> Form:
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if group.get("amsgrad") and state and "max_exp_avg_sq" not in state:
            raise OptimizerError(
                "amsgrad became True after the first step, but the optimizer keeps its largest second moments from the first "
                "on only; set it before training"
            )
        coupled = not decoupled and group.get("weight_decay", 0) != 0
        if not group.get("amsgrad"):
            return Form(coupled, "exp_avg_sq")
        return Form(coupled, "max_exp_avg_sq", None if coupled else ())

    def bound(self, rows: dict[str, Tensor], first: IdleStep) -> None:
        # Second moments only shrink in idle steps. So the largest ones may be too small where amsgrad was off before these.
        largest = rows["max_exp_avg_sq"]
        torch.maximum(largest, rows["exp_avg_sq"] * first.factors[1], out=largest)

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        made = self._read(group, state)
        factors = 1 - self._rounded(1 - made.first), self._rounded(made.second)
        return IdleStep(self._rounded(1 - made.lr * made.decay), factors, IDENTITY, *self._term(made))

    def numbers(self, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        made = self._read(group, state)
        scale, root, eps = self._term(made)
        gradient_scale = self._gradient_scale(made)
        return made.decay, 1 - made.first, made.second, 1 - made.second, root, eps, scale, gradient_scale

    def _read(self, group: dict[str, Any], state: dict[str, Any]) -> _Made:
        lr, decay, eps, momentum_decay = self._numbers(group, "lr", "weight_decay", "eps", "momentum_decay")
        first, second = group["betas"]
        return _Made(lr, decay, eps, momentum_decay, float(first), float(second), self._count(state))

    def _term(self, made: _Made) -> tuple[float, float, float]:
        """Return scale, root and eps of a step."""
        return made.lr / (1 - made.first**made.t), 1 / math.sqrt(1 - made.second**made.t), made.eps

    def _gradient_scale(self, made: _Made) -> float:
        """Return what the gradient itself is multiplied by, beside the first moment."""
        return 0.0


class _AdamW(_Adam):
    decoupled = True


class _NAdam(_Adam):
    def _read(self, group: dict[str, Any], state: dict[str, Any]) -> _Made:
        made = super()._read(group, state)
        momentum = self._momentum(made, made.t)
        product = self.scalars.read("mu_product", state["mu_product"], 1, lambda product: product * momentum)
        return made._replace(product=product)

    @staticmethod
    def _momentum(made: _Made, t: float) -> float:
        return made.first * (1 - 0.5 * 0.96 ** (t * made.momentum_decay))

    def _term(self, made: _Made) -> tuple[float, float, float]:
        following = self._momentum(made, made.t + 1)
        scale = made.lr * following / (1 - made.product * following)
        return scale, 1 / math.sqrt(1 - made.second**made.t), made.eps

    def _gradient_scale(self, made: _Made) -> float:
        return made.lr * (1 - self._momentum(made, made.t)) / (1 - made.product)


class _RAdam(_Adam):
    def _term(self, made: _Made) -> tuple[float, float, float]:
        faded = made.second**made.t
        scale, correction = made.lr / (1 - made.first**made.t), 1 - faded
        longest = 2 / (1 - made.second) - 1
        length = longest - 2 * made.t * faded / correction
        if length <= 5:
            return scale, 0.0, 1.0  # no denominator yet
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return scale * math.sqrt(rectified * correction), 1.0, made.eps


class _Adamax(_Adam):
    factors = ("exp_avg", "exp_inf")
    denominator = "exp_inf"
    floor = True
    replay = "adamax"

    def form(self, group: dict[str, Any], state: dict[str, Any]) -> Form:
        coupled, denominator, _ = Rule.form(self, group, state)
        return Form(coupled, denominator, None if coupled else (float(group["eps"]),))

    def bound(self, rows: dict[str, Tensor], first: IdleStep) -> None:
        pass  # the sums do

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        return super().step(group, state, before)._replace(decay=1.0)

    def _term(self, made: _Made) -> tuple[float, float, float]:
        return made.lr / (1 - made.first**made.t), 1.0, made.eps


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


# The optimizers that `choose_rule` has warned of.
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def choose_rule(idle: str, optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> Rule | None:
    """Return the rule by which `optimizer` shall treat idle rows; None: it leaves them as they are.

    Parameters
    ----------
    idle : {"auto", "exact", "lazy"}
        With "auto" an optimizer without a rule gets a warning, once.

    Raises
    ------
    OptimizerError
        `idle` is "exact" and there is no rule.
    """
    if idle == "lazy":
        return None
    if idle == "exact" or type(optimizer) in RULES:
        return rule_for(optimizer, group, dtype)
    if optimizer not in _warned:
        _warned.add(optimizer)
        name = type(optimizer).__name__
        warnings.warn(
            f"it is not known what {name} does to rows that a batch does not touch, so those stay as they are: results differ "
            f"from training a dense torch.nn.Embedding where {name} has momentum or weight decay or adapts its steps. Pass "
            "idle='lazy' to the embedding if that is what you want, or use an optimizer of torch.optim, such as AdamW",
            stacklevel=_stack_level(),
        )
    return None


def has_rule(optimizer: Optimizer) -> bool:
    """Tell whether it is known what `optimizer` does to idle rows."""
    return type(optimizer) in RULES


def _stack_level() -> int:
    """Return the level of the first frame outside of this package and torch: where the user's step is."""
    frame, level = sys._getframe(2), 2
    ours = "speedtransfer.", "torch."
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


def rule_for(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> Rule:
    """Return the rule of `optimizer`.

    Raises
    ------
    OptimizerError
        What it does to idle rows is not known.
    """
    make = RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(sorted(kind.__name__ for kind in RULES))
        raise OptimizerError(
            f"idle='exact' does not know what {type(optimizer).__name__} does to a row without a gradient; use one of torch's "
            f"{names}, or pass idle='lazy', with which any row-by-row optimizer trains"
        )
    rule = make(dtype)
    rule.take_form(rule.form(group, {}))
    return rule
