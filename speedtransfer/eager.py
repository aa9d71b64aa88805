"""Keep functions out of `torch.compile`: which rows a batch names is known only when it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T], instead: Callable[P, T] | None = None) -> Callable[P, T]:
    """Run `function` eagerly inside a compiled model, or `instead`, where that is given.

    ``torch.compiler.disable`` imports the compiler when it decorates, which takes seconds; here that waits until it is needed.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(instead or function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
