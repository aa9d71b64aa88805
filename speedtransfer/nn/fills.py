"""Functions of torch that set the weight of a table as a whole, where its rows are not all here, or are those of a vocabulary.

Of several processes each keeps its own rows of what one would have. With a vocabulary what fills a weight says what rows begin
with. The weight of any other table is set by the functions themselves.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, special
from speedtransfer.optim import Handle, Sharded, VocabularyIds
from speedtransfer.vocabulary.initial import FARTHEST

# What rows of a vocabulary begin with after a call: the kind of value, and the arguments that have its numbers.
_INITIAL: dict[Callable[..., Any], tuple[str, dict[str, float]]] = {
    Tensor.normal_: ("normal", {"mean": 0.0, "std": 1.0}),
    Tensor.uniform_: ("uniform", {"from": 0.0, "to": 1.0}),
    Tensor.fill_: ("number", {"value": 0.0}),
    Tensor.zero_: ("number", {}),
    init.normal_: ("normal", {"mean": 0.0, "std": 1.0}),
    init.uniform_: ("uniform", {"a": 0.0, "b": 1.0}),
    init.constant_: ("number", {"val": 0.0}),
}
# Whose numbers are the same if drawn in chunks: those that torch gives to __torch_function__ as a whole, too.
_DRAWS: list[Any] = [Tensor.normal_, Tensor.uniform_, Tensor.random_, init.uniform_, init.normal_, init.constant_]
_CHANGES = "zero_ fill_ mul_ div_ add_ sub_ clamp_ clamp_min_ clamp_max_ erfinv_ neg_ abs_ sqrt_ exp_ tanh_ nan_to_num_"


def _handle_of(weight: Any) -> Handle | None:
    """Return the handle of a weight whose rows are not all here, or those of a vocabulary; else None."""
    handle = handle_of(weight) if isinstance(weight, TableWeight | WeightData) else None
    return handle if isinstance(handle, Handle) and not handle.is_whole else None


def _set(func: Callable[..., Any], is_change: bool) -> Callable[..., Any]:
    """Return what is called in place of `func`, which draws values, or, if `is_change`, changes each by itself."""
    kind, defaults = _INITIAL.get(func, ("", {}))

    # Functions of torch.nn.init get all arguments by name.
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        handle = _handle_of(tensor)
        if handle is None:
            return NotImplemented
        if kind and isinstance(handle.id_space, VocabularyIds):
            _refuse_truncation(handle)
            # Drawn by a hash of ids, whatever the generator.
            kwargs.pop("generator", None)
            values = [float(value) for value in (defaults | dict(zip(defaults, args, strict=False)) | kwargs).values()]
            handle.id_space.fill((kind, *values) if len(values) == 2 else values[0] if values else 0.0)
            return tensor
        numbers = all(isinstance(value, bool | int | float) or value is None for value in (*args, *kwargs.values()))
        if not isinstance(handle.owners, Sharded) or (is_change and not numbers):
            return NotImplemented
        write = handle.owners.change if is_change else handle.owners.draw
        write(lambda values: func(values, *args, **kwargs))
        return tensor

    return call


def _copied(weight: Any, values: Tensor, non_blocking: bool = False) -> Any:
    handle = _handle_of(weight)
    if handle is None or handle.owners.has_whole:
        return NotImplemented
    handle.store(torch.as_tensor(values).expand(handle.num_rows, handle.table.dim))
    return weight


def _kaiming_uniform(
    tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """Replace ``torch.nn.init.kaiming_uniform_``, which torch calls as a whole for tensors with functions of their own."""
    handle = _handle_of(tensor)
    if handle is None:
        return NotImplemented
    # The fans are those of all rows.
    whole = torch.empty(handle.num_rows, handle.table.dim, device="meta")
    gain, root = init.calculate_gain(nonlinearity, a), math.sqrt(init._calculate_correct_fan(whole, mode))
    if isinstance(handle.id_space, VocabularyIds):
        bound = math.sqrt(3.0) * gain / root
        handle.id_space.fill(("uniform", -bound, bound))
    elif isinstance(handle.owners, Sharded):
        # In the order of torch, for the same bits.
        bound = math.sqrt(3.0) * (gain / root)
        handle.owners.draw(lambda values: values.uniform_(-bound, bound, generator=generator))
    return tensor


def _refuse_truncation(handle: Handle) -> None:
    """Raise if ``torch.nn.init.trunc_normal_`` fills, and cuts values off: rows that come later would not be."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_no_grad_trunc_normal_":
        frame = frame.f_back
    if frame is None:
        return
    mean, std, low, high = (float(frame.f_locals[name]) for name in ("mean", "std", "a", "b"))
    if max(low - mean, mean - high) > -FARTHEST * std:
        raise InvalidTypeError(
            f"{handle} has a vocabulary, whose initial values have no bounds, and trunc_normal_ would cut them off at "
            f"{low} and {high}; use torch.nn.init.normal_, or wider bounds, {FARTHEST} standard deviations from the mean"
        )


def of_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.nn.init`` that raises before it writes if it would have to see all rows at once."""
    # Older versions of torch cut a normal distribution off by a formula of each value.
    if "erfinv_" in func.__code__.co_names:
        return func

    @functools.wraps(func)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        handle = _handle_of(tensor)
        if handle is not None and not handle.owners.has_whole:
            raise InvalidValueError(
                f"{handle} has rows in several processes, and {func.__name__.removeprefix('_no_grad_')}() "
                "draws anew where values of any row ask for it; draw all rows in every process, with the same seed, and set "
                "them: weight.data = torch.nn.init....(torch.empty(num_rows, dim)); or use normal_(), uniform_()"
            )
        if handle is not None and func.__name__ == "sparse_":
            # It draws all values before it writes zeros to some, which is refused.
            handle.store(tensor)
        return func(tensor, *args, **kwargs)

    return call


special.update({func: _set(func, is_change=False) for func in _DRAWS})
special.update({(func := getattr(Tensor, name)): _set(func, is_change=True) for name in _CHANGES.split()})
special.update({init.kaiming_uniform_: _kaiming_uniform, Tensor.copy_: _copied})
