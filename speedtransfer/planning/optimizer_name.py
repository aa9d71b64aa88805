"""An optimizer as it is given: typed as ``SGD(momentum=0.9)`` or ``lion_pytorch.Lion(lr=1e-4)``, as a class, or made."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.nn.sizing import MakeOptimizer

NONE = "none"


class Trainer(NamedTuple):
    """An optimizer to plan for: how it is shown, and what makes one of a list of parameters; None: rows are frozen."""

    name: str
    make: MakeOptimizer | None

    @property
    def wants_sparse(self) -> bool:
        """Whether it takes no other gradients than sparse ones."""
        return self.name.startswith("SparseAdam")


def optimizer_given(optimizer: Any, label: str = "optimizer") -> Trainer:
    """Return the optimizer that is given in any of the ways that :func:`speedtransfer.plan` takes.

    Of one that was made, it is the class with the hyperparameters of its first group. Errors call it `label`.
    """
    if isinstance(optimizer, Trainer):
        return optimizer
    if optimizer is None or (isinstance(optimizer, str) and optimizer.lower() == NONE):
        return Trainer("frozen", None)
    if isinstance(optimizer, str):
        return Trainer(optimizer, _named(optimizer, label))
    if isinstance(optimizer, Optimizer):
        group = optimizer.param_groups[0]
        settings = {key: group[key] for key in group if key not in ("params", "param_names")}
        return Trainer(type(optimizer).__name__, functools.partial(_made_like, type(optimizer), settings))
    if not callable(optimizer):
        raise InvalidTypeError(
            f"{label} is {optimizer!r} ({type(optimizer).__name__}) but must be an optimizer; pass a class of torch.optim, "
            "its name such as 'AdamW', one that was made, or None"
        )
    name = getattr(optimizer, "__name__", "") or getattr(getattr(optimizer, "func", None), "__name__", "optimizer")
    _check_made(optimizer, name, name, label)
    return Trainer(name, optimizer)


def _made_like(kind: type[Optimizer], settings: dict[str, Any], params: list[torch.nn.Parameter]) -> Optimizer:
    # `settings` may hold what the constructor does not take (AdamW's decoupled_weight_decay, a scheduler's initial_lr).
    accepted = inspect.signature(kind).parameters
    made: Any = kind
    optimizer: Optimizer = made(params, **{key: value for key, value in settings.items() if key in accepted})
    optimizer.param_groups[0].update(settings)
    return optimizer


# The same maker for the same text: sizes of rows are kept by it.
@functools.lru_cache(maxsize=64)
def _named(text: str, label: str) -> MakeOptimizer:
    """Return what makes the optimizer that `text` names."""
    name, given = _parsed(text, label)
    kind: Callable[..., Optimizer] = _class_named(name, label)
    make = functools.partial(kind, **given)
    _check_made(make, text, name, label)
    return make


def _check_made(make: Callable[..., Any], text: str, name: str, label: str) -> None:
    """Raise unless `make` makes an optimizer."""
    try:
        made = make([torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))])
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValueError(f"{label} is {text!r} but {reason}; pass arguments that {name} takes") from error
    if not isinstance(made, Optimizer):
        raise InvalidTypeError(
            f"{label} makes a {type(made).__name__} but must make an optimizer; pass a class of torch.optim"
        )


def _parsed(text: str, label: str) -> tuple[str, dict[str, Any]]:
    """Return the dotted name and the keyword arguments."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args or not isinstance(call.func, ast.Name | ast.Attribute) or None in given:
            raise ValueError(text)
    except (SyntaxError, ValueError):
        raise InvalidValueError(
            f"{label} is {text!r} but must be a name with keyword arguments or without; pass for instance "
            "'SGD(momentum=0.9)', with quotation marks for the shell"
        ) from None
    return ast.unparse(call.func), {str(name): value for name, value in given.items()}


def _class_named(name: str, label: str) -> type[Optimizer]:
    module, _, last = name.rpartition(".")
    try:
        place = importlib.import_module(module) if module else torch.optim
    except ImportError as error:
        raise InvalidValueError(f"{label} is {name!r} but {error}; install it or choose one of torch.optim") from error
    classes = {key: value for key, value in vars(place).items() if isinstance(value, type)}
    there = {key: kind for key, kind in classes.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    if not there:
        raise InvalidValueError(
            f"{label} is {name!r} but {module} has no optimizers; choose one of torch.optim, or none"
        )
    if last not in there:
        raise InvalidValueError(f"{label} is {name!r}{suggest(last, [*there, NONE])}")
    return there[last]
