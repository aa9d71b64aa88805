"""Functions of torch that fill the weight of a table with a vocabulary: they say what the rows of its ids begin with."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError
from speedtransfer.nn import weight_shards  # noqa: F401
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, special
from speedtransfer.optim import Handle, VocabularyIds
from speedtransfer.vocabulary.initial import FARTHEST


def _ids_of(weight: Any) -> VocabularyIds | None:
    handle = handle_of(weight) if isinstance(weight, TableWeight | WeightData) else None
    ids = handle.id_space if isinstance(handle, Handle) else None
    return ids if isinstance(ids, VocabularyIds) else None


def _fill(func: Callable[..., Any], kind: str, **defaults: float) -> Callable[..., Any]:
    """Return what is called in place of `func`, with the arguments `defaults`, which draws or sets values of `kind`."""
    otherwise = special.get(func, lambda *_, **__: NotImplemented)

    # Functions of torch.nn.init get all arguments by name.
    def fill(tensor: Any, *args: float, generator: Any = None, **kwargs: float) -> Any:
        ids = _ids_of(tensor)
        if ids is None:
            return otherwise(tensor, *args, **kwargs, **({} if generator is None else {"generator": generator}))
        _refuse_truncation(ids)
        # Drawn by a hash of ids, whatever the generator.
        values = [float(value) for value in (defaults | dict(zip(defaults, args, strict=False)) | kwargs).values()]
        ids.fill((kind, *values) if len(values) == 2 else values[0] if values else 0.0)
        return tensor

    return fill


def _refuse_truncation(ids: VocabularyIds) -> None:
    """Raise if ``torch.nn.init.trunc_normal_`` fills, and cuts values off: rows that come later would not be."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_no_grad_trunc_normal_":
        frame = frame.f_back
    if frame is None:
        return
    mean, std, low, high = (float(frame.f_locals[name]) for name in ("mean", "std", "a", "b"))
    if max(low - mean, mean - high) > -FARTHEST * std:
        raise InvalidTypeError(
            f"{ids} has a vocabulary, whose initial values have no bounds, and trunc_normal_ would cut them off at "
            f"{low} and {high}; use torch.nn.init.normal_, or wider bounds, {FARTHEST} standard deviations from the mean"
        )


_kaiming_uniform_of_shards = special[nn.init.kaiming_uniform_]


def _kaiming_uniform(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """Replace ``torch.nn.init.kaiming_uniform_``, which torch calls as a whole for tensors with functions of their own."""
    ids = _ids_of(tensor)
    if ids is None:
        return _kaiming_uniform_of_shards(tensor, a, mode, nonlinearity, generator)
    fan = {"fan_in": ids.handle.table.dim, "fan_out": ids.handle.num_rows}[mode]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    ids.fill(("uniform", -bound, bound))
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
