"""Functions of torch that fill the weight of a table with a vocabulary: they say what the rows of its ids begin with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, special
from speedtransfer.nn.weight_shards import of_whole
from speedtransfer.optim import VocabularyHandle
from speedtransfer.vocabulary.initial import FARTHEST


def _handle(weight: Any) -> VocabularyHandle | None:
    handle = handle_of(weight) if isinstance(weight, TableWeight | WeightData) else None
    return handle if isinstance(handle, VocabularyHandle) else None


def _fill(func: Callable[..., Any], kind: str, **defaults: float) -> Callable[..., Any]:
    """Return what is called in place of `func`, with the arguments `defaults`, which draws or sets values of `kind`."""
    otherwise = special.get(func, lambda *_, **__: NotImplemented)

    # Functions of torch.nn.init get all arguments by name.
    def fill(tensor: Any, *args: float, generator: Any = None, **kwargs: float) -> Any:
        handle = _handle(tensor)
        if handle is None:
            return otherwise(tensor, *args, **kwargs, **({} if generator is None else {"generator": generator}))
        # Drawn by a hash of ids, whatever the generator.
        values = [float(value) for value in (defaults | dict(zip(defaults, args, strict=False)) | kwargs).values()]
        handle.fill((kind, *values) if len(values) == 2 else values[0] if values else 0.0)
        return tensor

    return fill


def truncating(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of that which ``torch.nn.init.trunc_normal_`` calls, which draws in several operations."""
    whole = of_whole(func)

    @functools.wraps(func)
    def call(tensor: Any, mean: float, std: float, a: float, b: float, *args: Any, **kwargs: Any) -> Any:
        handle = _handle(tensor)
        if handle is None:
            return whole(tensor, mean, std, a, b, *args, **kwargs)
        mean, std, a, b = map(float, (mean, std, a, b))
        if max(a - mean, mean - b) > -FARTHEST * std:
            raise InvalidTypeError(
                f"{handle} has a vocabulary, whose initial values have no bounds, and trunc_normal_ would cut them off at "
                f"{a} and {b}; use torch.nn.init.normal_, or wider bounds, {FARTHEST} standard deviations from the mean"
            )
        handle.fill(("normal", mean, std))
        return tensor

    return call


_kaiming_uniform_of_shards = special[nn.init.kaiming_uniform_]


def _kaiming_uniform(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """Replace ``torch.nn.init.kaiming_uniform_``, which torch calls as a whole for tensors with functions of their own."""
    handle = _handle(tensor)
    if handle is None:
        return _kaiming_uniform_of_shards(tensor, a, mode, nonlinearity, generator)
    fan = {"fan_in": handle.table.dim, "fan_out": handle.num_rows}[mode]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    handle.fill(("uniform", -bound, bound))
    return tensor


_FILLS: dict[Callable[..., Any], tuple[str, dict[str, float]]] = {
    Tensor.normal_: ("normal", {"mean": 0.0, "std": 1.0}),
    Tensor.uniform_: ("uniform", {"from": 0.0, "to": 1.0}),
    Tensor.fill_: ("number", {"value": 0.0}),
    Tensor.zero_: ("number", {}),
    nn.init.normal_: ("normal", {"mean": 0.0, "std": 1.0}),
    nn.init.uniform_: ("uniform", {"a": 0.0, "b": 1.0}),
    nn.init.constant_: ("number", {"val": 0.0}),
}
special.update({func: _fill(func, kind, **defaults) for func, (kind, defaults) in _FILLS.items()})
special[nn.init.kaiming_uniform_] = _kaiming_uniform
