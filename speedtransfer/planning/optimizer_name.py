"""An optimizer as it is typed on a command line: ``AdamW``, ``SGD(momentum=0.9)``, ``lion_pytorch.Lion(lr=1e-4)``."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from speedtransfer.errors import InvalidValueError, suggest
from speedtransfer.nn.sizing import MakeOptimizer

NONE = "none"


def optimizer_named(text: str) -> MakeOptimizer | None:
    """Return what makes the optimizer that `text` names; None for "none".

    Raises
    ------
    InvalidValueError
        It is no name with keyword arguments, there is no such optimizer, or it does not take these arguments.
    """
    if text.lower() == NONE:
        return None
    name, given = _parsed(text)
    kind: Callable[..., Optimizer] = _class_named(name)
    make = functools.partial(kind, **given)
    try:
        make([torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))])
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValueError(f"--optimizer is {text!r} but {reason}; pass arguments that {name} takes") from error
    return make


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return the dotted name and the keyword arguments."""
    wrong = InvalidValueError(
        f"--optimizer is {text!r} but must be a name with keyword arguments or without; pass for instance "
        "'SGD(momentum=0.9)', with quotation marks for the shell"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
        keywords = node.keywords if isinstance(node, ast.Call) else []
        called = node.func if isinstance(node, ast.Call) else node
        if (isinstance(node, ast.Call) and node.args) or not isinstance(called, ast.Name | ast.Attribute):
            raise wrong
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg}
    except (SyntaxError, ValueError) as error:
        if error is wrong:
            raise
        raise wrong from None
    if len(given) != len(keywords):
        raise wrong
    return ast.unparse(called), given


def _class_named(name: str) -> type[Optimizer]:
    module, _, last = name.rpartition(".")
    try:
        place = importlib.import_module(module) if module else torch.optim
    except ImportError as error:
        raise InvalidValueError(
            f"--optimizer is {name!r} but {error}; install it or choose one of torch.optim"
        ) from error
    classes = {key: value for key, value in vars(place).items() if isinstance(value, type)}
    there = {key: kind for key, kind in classes.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    if not there:
        raise InvalidValueError(
            f"--optimizer is {name!r} but {module} has no optimizers; choose one of torch.optim, or none"
        )
    if last not in there:
        raise InvalidValueError(f"--optimizer is {name!r}{suggest(last, [*there, NONE])}")
    return there[last]
