"""Keep functions out of `torch.compile` and selective checkpoints: which rows a batch names is known only when it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import checkpoint

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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


def uncompiled_between_graphs(function: F) -> F:
    """Do not compile `function`, which torch calls by itself, nor what it calls, where a compiled function is interrupted.

    It would be compiled once for each function of torch that is called with a weight.
    """
    frames: Any = torch._C._dynamo.eval_frame
    code: Any = function
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.7
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code.__code__, frames._FrameExecStrategy(skip, skip))
    return function


_MODES = torch._C._TorchDispatchModeKey
_TRACING = {"FakeTensorMode": _MODES.FAKE, "make_fx": _MODES.PROXY}
_CHECKPOINTS = checkpoint._CachedTorchDispatchMode, checkpoint._CachingTorchDispatchMode
_no_change = contextlib.nullcontext()


def tracing_mode() -> str | None:
    """Return the name of a mode of dispatch whose tensors have no values, or which records them."""
    return next((name for name, key in _TRACING.items() if torch._C._get_dispatch_mode(key) is not None), None)


def unseen() -> contextlib.AbstractContextManager[None]:
    """Leave modes of dispatch within a selective checkpoint that does not trace.

    It does a function again and returns what it kept of the first time, where it would not find the same calls: what a table
    calls depends on what was read before.
    """
    if not torch._C._len_torch_dispatch_stack() or tracing_mode() is not None:
        return _no_change
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return _without_modes() if any(isinstance(mode, _CHECKPOINTS) for mode in modes) else _no_change


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
