"""Remember what trials of torch's own optimizers have shown, for the next optimizer of the same class and hyperparameters.

Trials take tens of milliseconds. An outcome is used again only where all that decides it is known and the same: the class is
one of ``torch.optim``, and it, its bases and their modules have the functions that they had; hyperparameters and attributes
are plain values. Where two learning rates have shown the same, so do others. Subclasses and optimizers of others are tried
once a step for the tables of the same kind (`one_step`), and anew in the next; failures each time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.once import fork_safe_lock
from speedtransfer.optim.probe.trial import OWN

_LIMIT = 256
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Of a group, without which what decides an outcome is one key; the others are those of schedulers, which no optimizer reads.
_NOT_IN_KEY = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr")

# By learning rate, an outcome, and the objects whose ids are a part of the key: an id is another's when its object is gone.
_Rates = dict[str, tuple[Any, list[Any]]]
# By what decides it but for that.
Known = dict[Any, _Rates]
_known: Known = {}
_lock = fork_safe_lock()
_step = threading.local()

Asking = TypeVar("Asking", bound=Callable[..., Any])


class _UnknownError(Exception):
    """Something decides the outcome that cannot be compared."""


def remembered(ask: Asking) -> Asking:
    """Let `ask(optimizer, group, param, ...)` make its trials once in a process where their outcome must be the same."""

    @functools.wraps(ask)
    def asked(optimizer: Optimizer, group: dict[str, Any], param: Tensor, *args: Any, **options: Any) -> Any:
        code, known = list[Any](), _known
        key: tuple[Any, ...] = ask.__name__, args, tuple(sorted(options.items()))
        rate = _plain_or_id(group.get("lr"))
        try:
            code = list(_code(type(optimizer)))
            key = (*key, *_decisive(optimizer, group, param), *map(id, code))
        except _UnknownError:
            of_step: Known | None = getattr(_step, "known", None)
            if of_step is None:
                return ask(optimizer, group, param, *args, **options)
            # Others than torch's may read what a scheduler of torch puts there.
            rest = sorted((name, _plain_or_id(value)) for name, value in group.items() if name not in _NOT_IN_KEY[:3])
            known = of_step
            key = (*key, id(optimizer), param.shape[1:], param.dtype, param.device, *rest)
        outcome = _recalled(known.get(key, {}), rate)
        if outcome is None:
            outcome = ask(optimizer, group, param, *args, **options)
            # False may come of a trial that failed.
            if outcome is not False or known is not _known:
                with _lock:
                    if len(known) >= _LIMIT:
                        known.clear()
                    rates = known.setdefault(key, {})
                    if len(rates) >= _LIMIT:
                        rates.clear()
                    rates[rate] = outcome, code
        return copy.copy(outcome)

    return asked  # type: ignore[return-value]


@contextlib.contextmanager
def one_step(known: Known) -> Iterator[None]:
    """Also remember, in `known`, outcomes of optimizers that somebody may change: not in the middle of a step."""
    outer, _step.known = getattr(_step, "known", None), known
    try:
        yield
    finally:
        _step.known = outer


def _recalled(rates: _Rates, rate: str) -> Any:
    """Return the outcome for a learning rate; None: not known."""
    if rate in rates:
        return rates[rate][0]
    # It does not depend on the rate, as that of Rprop does, whose state begins with it. Zero is another matter.
    outcomes = [outcome for outcome, _ in rates.values()]
    alike = len(outcomes) > 1 and all(_content(each) == _content(outcomes[0]) for each in outcomes)
    return outcomes[0] if alike and not any("0.0" in each.split() for each in (rate, *rates)) else None


def _content(outcome: Any) -> Any:
    return outcome, getattr(outcome, "shared", None), getattr(outcome, "gradient", None)


def _decisive(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> Iterator[Any]:
    """Yield what decides the outcome beside the code that runs."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        raise _UnknownError
    yield from (param.shape[1:], param.dtype, param.device, torch.get_default_dtype())
    yield from (torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled(param.device.type))
    own = {k: v for k, v in vars(optimizer).items() if k not in OWN and not k.endswith("_hooks")}
    for values in (own, group, optimizer.defaults):
        yield tuple(sorted((name, _plain(value)) for name, value in values.items() if name not in _NOT_IN_KEY))


def _plain(value: Any) -> Any:
    """Return text by which plain values are told apart: 1, 1.0 and True are equal, as 0.0 and -0.0 are."""
    kind = type(value)
    if kind in (list, tuple):
        return f"{kind.__name__}{[_plain(item) for item in value]}"
    if kind is Tensor and value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
        return f"Tensor {tuple(value.shape)} {value.dtype} {value.item()!r}"
    if kind not in _PLAIN:
        raise _UnknownError
    return f"{kind.__name__} {value!r}"


def _plain_or_id(value: Any) -> str:
    try:
        return str(_plain(value))
    except _UnknownError:
        return f"object {id(value)}"


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
