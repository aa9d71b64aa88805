"""Remember what trials of torch's own optimizers have shown, for the next optimizer of the same class and hyperparameters.

Trials take tens of milliseconds. An outcome is used again only where all that decides it is known and the same: the class is
one of ``torch.optim``, and it, its bases and their modules have the functions that they had; hyperparameters and attributes
are plain values. Subclasses, optimizers of others, hyperparameters in tensors and failures are tried anew each time.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.optim.probe.trial import OWN

_LIMIT = 256
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# By what decides it, an outcome, and the objects whose ids are a part of that: an id is another's when its object is gone.
_known: dict[Any, tuple[Any, list[Any]]] = {}
_lock = threading.Lock()

Asking = TypeVar("Asking", bound=Callable[..., Any])


class _UnknownError(Exception):
    """Something decides the outcome that cannot be compared."""


def remembered(ask: Asking) -> Asking:
    """Let `ask(optimizer, group, param, ...)` make its trials once in a process where their outcome must be the same."""

    @functools.wraps(ask)
    def asked(optimizer: Optimizer, group: dict[str, Any], param: Tensor, *args: Any, **options: Any) -> Any:
        try:
            code = list(_code(type(optimizer)))
            key = (
                ask.__name__,
                args,
                tuple(sorted(options.items())),
                *_decisive(optimizer, group, param),
                *map(id, code),
            )
        except _UnknownError:
            return ask(optimizer, group, param, *args, **options)
        if key in _known:
            outcome, _ = _known[key]
        else:
            outcome = ask(optimizer, group, param, *args, **options)
            # False may come of a trial that failed.
            if outcome is not False:
                with _lock:
                    if len(_known) >= _LIMIT:
                        _known.clear()
                    _known[key] = outcome, code
        return copy.copy(outcome)

    return asked  # type: ignore[return-value]


def _decisive(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> Iterator[Any]:
    """Yield what decides the outcome beside the code that runs."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        raise _UnknownError
    yield from (param.shape[1:], param.dtype, param.device, torch.get_default_dtype())
    yield from (torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled(param.device.type))
    own = {k: v for k, v in vars(optimizer).items() if k not in OWN and not k.endswith("_hooks")}
    hyperparameters = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    for values in (own, hyperparameters, optimizer.defaults):
        yield tuple(sorted((name, _plain(value)) for name, value in values.items()))


def _plain(value: Any) -> Any:
    """Return text by which plain values are told apart: 1, 1.0 and True are equal, as 0.0 and -0.0 are."""
    kind = type(value)
    if kind in (list, tuple):
        return f"{kind.__name__}{[_plain(item) for item in value]}"
    if kind not in _PLAIN:
        raise _UnknownError
    return f"{kind.__name__} {value!r}"


def _code(kind: type) -> Iterator[Any]:
    """Yield the objects that a step of an optimizer of torch runs, those that somebody may have put in their place too."""
    for each in kind.__mro__[:-1]:
        module = sys.modules.get(each.__module__)
        if not each.__module__.startswith("torch.optim.") or getattr(module, each.__name__, None) is not each:
            raise _UnknownError
        for value in (*vars(each).values(), *vars(module).values()):
            yield value
            inner = value
            while hasattr(inner, "__code__"):
                yield from (inner.__code__, inner.__defaults__, inner.__kwdefaults__)
                # As the trial looks for the step within what torch wraps.
                inner = getattr(inner, "__wrapped__", None)
