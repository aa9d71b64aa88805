"""Keep functions out of `torch.compile` and modes of dispatch: which rows a batch names is known only when it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

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


_MODES = torch._C._TorchDispatchModeKey
_TRACING = {"FakeTensorMode": _MODES.FAKE, "make_fx": _MODES.PROXY}
_no_change = contextlib.nullcontext()


def tracing_mode() -> str | None:
    """Return the name of a mode of dispatch whose tensors have no values, or which records them."""
    return next((name for name, key in _TRACING.items() if torch._C._get_dispatch_mode(key) is not None), None)


def unseen() -> contextlib.AbstractContextManager[None]:
    """Leave modes of dispatch that do not trace.

    What a table calls depends on what was read before. A selective checkpoint, which does a function again and returns what it
    kept of the first time, would not find the same calls.
    """
    if not torch._C._len_torch_dispatch_stack() or tracing_mode() is not None:
        return _no_change
    return _without_modes()


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    # A compiled function that is called under a mode is not compiled: nor is what it calls without the mode.
    compiles: Any = torch._C._dynamo.eval_frame
    before = compiles.set_eval_frame(None)
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        compiles.set_eval_frame(before)
