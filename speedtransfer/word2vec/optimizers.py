"""Optimizers by name, with learning rates that suit the gradients of blocks (`gradients`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.word2vec.gradients import RATES

# First learning rates for skip-gram, falling linearly to 1e-4 of them. A gradient is how far word2vec would move a row at
# the rate of `RATES`, divided by it. So SGD with that rate takes word2vec's steps. An optimizer that divides by the size of
# gradients takes the same ones where its eps (`DEFAULT_OPTIONS`) is lr / rate and large beside that size: rows that are
# touched often, whose gradients are the largest, then move a little less. With a small eps instead all rows would move as far
# as lr at every step, however little they have to learn: rare words, and their output rows, would become noise.
DEFAULT_LR: dict[str, float] = {
    "adadelta": 30.0,
    "adagrad": 30.0,
    "adam": 0.3,
    "adamax": 30.0,
    "adamw": 0.3,
    "asgd": 0.03,
    "nadam": 0.3,
    "radam": 0.03,
    "rmsprop": 0.3,
    "rprop": 0.001,
    "sgd": 0.03,
}
FALLBACK_LR = 0.01  # for an optimizer that is not in the table
# Momentum of a row is spread over the next ten blocks that have the row: hundreds of thousands of words later for a rare one,
# which would learn ten times slower, while frequent words take up what it should have learnt.
_FLAT = {"betas": (0.0, 0.999), "eps": 10.0}
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "adagrad": {"eps": 1000.0},  # it divides by a sum that only grows
    "adam": _FLAT,
    "adamax": {"betas": (0.0, 0.999), "eps": 1000.0},  # it divides by the largest gradient that there was
    # torch's AdamW decays by 0.01 by default: with learning rates this large that would shrink frequent words,
    # which are touched at every step, and spare rare ones.
    "adamw": {**_FLAT, "weight_decay": 0.0},
    "nadam": _FLAT,
    "radam": {"betas": (0.0, 0.999), "eps": 1.0},
    "rmsprop": {"eps": 10.0},
    # Rprop is made for the gradient of the whole corpus. On blocks its steps grow without end unless they are held down; even
    # so it learns less than the others.
    "rprop": {"step_sizes": (1e-6, 0.01)},
}
# Where processes learn apart from each other: rows that each of them has had often are then no slower than others, which all
# have trained to go with them. With 10 the vectors of many words got one dimension in common.
_EPS_APART = 1000.0
STEPS_AS_GIVEN = frozenset({"asgd", "sgd"})  # they move a row by lr times its gradient
LR_END = 1e-4
_NOT_BY_ROWS = frozenset({"adafactor", "lbfgs", "muon", "sparseadam"})  # which tables would refuse at the first step
_OWN_CHOICE = frozenset({"foreach", "fused", "capturable", "differentiable"})  # options for how torch computes a step


def find_optimizer(name: str) -> type[Optimizer]:
    """Return the optimizer of torch.optim called `name`, in any case; raise where there is none."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"optimizer is {name!r} but must be the name of one of torch.optim; pass 'adamw'")
    by_lower: dict[str, type[Optimizer]] = {
        known.lower(): value
        for known, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    offered = sorted(by_lower.keys() - _NOT_BY_ROWS)
    if name.lower() not in by_lower:
        raise InvalidValueError(f"optimizer {name!r} is not in torch.optim{suggest(name, offered)}")
    if name.lower() in _NOT_BY_ROWS:
        raise InvalidValueError(f"optimizer {name!r} does not train row by row; choose from {', '.join(offered)}")
    return by_lower[name.lower()]


def default_lr(name: str, model: str = "skipgram") -> float:
    """Return the first learning rate for the optimizer called `name`."""
    return DEFAULT_LR.get(name.lower(), FALLBACK_LR) * (RATES[model] / RATES["skipgram"])


def options_apart(
    name: str, lr: float, options: Mapping[str, Any] | None = None
) -> tuple[float, Mapping[str, Any] | None]:
    """Return learning rate and options for several processes that train on blocks of their own: both as much larger as eps.

    Those that are given stay, with an eps among the options, and where eps has no default.
    """
    eps = DEFAULT_OPTIONS.get(name.lower(), {}).get("eps", _EPS_APART)
    if "eps" in (options or {}) or eps >= _EPS_APART:
        return lr, options
    return lr * (_EPS_APART / eps), {**(options or {}), "eps": _EPS_APART}


def block_rate(name: str, model: str, lr: float, first_lr: float) -> float:
    """Return the rate of the training within a block.

    That is `lr` for SGD, which then takes just those steps, and else one of `RATES`, falling as `lr` does.
    """
    return lr if name.lower() in STEPS_AS_GIVEN else RATES[model] * (lr / first_lr)


def make_optimizer(
    name: str, params: Iterable[torch.nn.Parameter], lr: float | None = None, options: Mapping[str, Any] | None = None
) -> Optimizer:
    """Return the optimizer called `name` over `params`, with torch's fused kernel where there is one for them.

    `options` are further arguments, over those of `DEFAULT_OPTIONS`; `lr` is by default `default_lr`. Raises for an unknown
    name, and for an option or learning rate that the optimizer does not take.
    """
    kind, params = find_optimizer(name), list(params)
    if options and "lr" in options:  # the schedule would replace it
        raise InvalidValueError(f"options holds lr={options['lr']!r}, which is a setting of its own; pass it as lr")
    arguments = {
        "lr": default_lr(name) if lr is None else lr,
        **DEFAULT_OPTIONS.get(name.lower(), {}),
        **(options or {}),
    }
    if _fuses(kind, params, arguments):
        arguments["fused"] = True  # one pass over the rows: twice as fast on the CPU
    for key, value in (options or {}).items():
        default = getattr(inspect.signature(kind).parameters.get(key), "default", "")
        if isinstance(value, str) and isinstance(default, bool | int | float | tuple):
            raise InvalidValueError(
                f"option {key} of {kind.__name__} is the text {value!r}; pass a value such as {default!r}"
            )
    try:
        return kind(params, **arguments)
    except (ImportError, MemoryError, RecursionError):  # of torch itself, say after an interrupt of its import
        raise
    except Exception as error:  # of any kind: torch uses some options before it checks them
        known = inspect.signature(kind).parameters
        for name in (options or {}).keys() - known.keys():
            others = sorted(known.keys() - {"params", "lr"})
            raise InvalidValueError(f"{kind.__name__} has no option {name!r}{suggest(name, others)}") from error
        raise InvalidValueError(f"{kind.__name__} does not take {arguments} ({error}); fix lr or options") from error


def _fuses(kind: type[Optimizer], params: list[torch.nn.Parameter], arguments: Mapping[str, Any]) -> bool:
    """Return whether torch has a fused kernel of `kind` for `params`, and `arguments` leave the choice open."""
    if "fused" not in inspect.signature(kind).parameters or not _OWN_CHOICE.isdisjoint(arguments):
        return False
    try:
        for device in {p.device for p in params}:  # some versions have it for one of the two only, and raise in a step
            trial = torch.nn.Parameter(torch.zeros(1, 1, device=device))
            trial.grad = torch.zeros_like(trial)
            kind([trial], **{**arguments, "fused": True}).step()
    except Exception:
        return False
    return True


def set_lr(optimizer: Optimizer, start: float, done: float) -> None:
    """Set the learning rate for the share `done` (0 to 1) of training: from `start` along a line to ``LR_END * start``."""
    lr = start * max(1.0 - done, LR_END)
    for group in optimizer.param_groups:
        group["lr"] = lr
