"""Functions of torch that set the weight of a table as a whole, where its rows are not all here, or are those of a vocabulary.

Of several processes each keeps its own rows of what one would have. With a vocabulary what fills a weight says what rows begin
with. The weight of any other table is set by the functions themselves, or in chunks (`in_chunks`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import init

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.in_chunks import change, change_rows, changes_in_chunks, fits
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, special
from speedtransfer.optim import Sharded, VocabularyIds
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


def _kinds(weight: Any) -> tuple[VocabularyIds | None, Sharded | None]:
    """Return the ids and the owners of the rows of a weight, where these are those of a vocabulary, or several."""
    if not isinstance(weight, TableWeight | WeightData):
        return None, None
    handle = handle_of(weight).of
    ids, owners = handle.id_space, handle.owners
    return ids if isinstance(ids, VocabularyIds) else None, owners if isinstance(owners, Sharded) else None


def _part(weight: Any) -> tuple[int, int]:
    """Return the first row of the table that the weight has, and the one after its last."""
    handle = handle_of(weight)
    return handle.start, handle.stop


def _numbers(defaults: dict[str, float], args: Any, kwargs: dict[str, Any]) -> list[float]:
    """Return the numbers of a call, in the order of `defaults`."""
    given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    return [float(value) for name, value in given.items() if name != "generator"]


def _set(func: Callable[..., Any], draws: bool = True) -> Callable[..., Any]:
    """Return what is called in place of `func`, which draws values, or sets all to one."""
    kind, defaults = _INITIAL.get(func, ("", {}))

    # Functions of torch.nn.init get all arguments by name.
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        ids, owners = _kinds(tensor)
        if kind and ids is not None:
            # Drawn by a hash of ids, whatever the generator.
            values = _numbers(defaults, args, kwargs)
            ids.fill((kind, *values) if len(values) == 2 else values[0] if values else 0.0)
            return tensor
        if not draws:
            return change(func, tensor, args, kwargs)
        if owners is None:
            by_torch = not isinstance(func, FunctionType)
            if not (changes_in_chunks(tensor, by_torch) and _draws_in_chunks(tensor)):
                return NotImplemented
            return change_rows(tensor, lambda values, part: func(values, *args, **kwargs))
        by_row = len(defaults) == 2 and kwargs.get("generator") is None
        drawn = cast(tuple[str, float, float], (kind, *_numbers(defaults, args, kwargs))) if by_row else None
        owners.draw(lambda values: func(values, *args, **kwargs), *_part(tensor), drawn)
        return tensor

    return call


def _draws_in_chunks(weight: Any) -> bool:
    """Tell whether to draw in chunks: on the CPU, where the numbers are the same, and on a device without room for all."""
    return bool(handle_of(weight).table.device.type == "cpu") or not fits(weight)


def _copied(weight: Any, values: Tensor, non_blocking: bool = False) -> Any:
    owners = _kinds(weight)[1]
    if owners is None:
        return change(Tensor.copy_, weight, (values,), {})
    start, stop = _part(weight)
    values = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    owners.handle.load(values.detach().expand(stop - start, owners.handle.table.dim), start)
    return weight


def _kaiming_uniform(
    tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """Replace ``torch.nn.init.kaiming_uniform_``, which torch calls as a whole for tensors with functions of their own."""
    ids, owners = _kinds(tensor)
    if ids is None and owners is None:
        return NotImplemented
    handle = handle_of(tensor)
    # The fans are those of all rows.
    whole = torch.empty(handle.num_rows, handle.table.dim, device="meta")
    gain, root = init.calculate_gain(nonlinearity, a), math.sqrt(init._calculate_correct_fan(whole, mode))
    if ids is not None:
        bound = math.sqrt(3.0) * gain / root
        ids.fill(("uniform", -bound, bound))
    elif owners is not None:
        # In the order of torch, for the same bits.
        bound = math.sqrt(3.0) * (gain / root)
        drawn = None if generator is not None else ("uniform", -bound, bound)
        owners.draw(lambda values: values.uniform_(-bound, bound, generator=generator), *_part(tensor), drawn)
    return tensor


def of_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.nn.init`` that raises before it writes if it would have to see all rows at once."""
    # Older versions of torch cut a normal distribution off by a formula of each value.
    if "erfinv_" in func.__code__.co_names:
        return func

    @functools.wraps(func)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        ids, owners = _kinds(tensor)
        if owners is not None:
            raise InvalidValueError(
                f"{owners.handle} has rows in several processes, and {func.__name__.removeprefix('_no_grad_')}() "
                "draws anew where values of any row ask for it; draw all rows in every process, with the same seed, and set "
                "them: weight.data = torch.nn.init....(torch.empty(num_rows, dim)); or use normal_(), uniform_()"
            )
        if ids is not None and func.__name__ == "sparse_":
            # It draws all values before it writes zeros to some.
            ids.check_written("written as a whole")
        return func(tensor, *args, **kwargs)

    return call


def truncating(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of that which ``torch.nn.init.trunc_normal_`` calls, which draws in several operations."""
    whole = of_whole(func)

    @functools.wraps(func)
    def call(tensor: Any, mean: float, std: float, a: float, b: float, *args: Any, **kwargs: Any) -> Any:
        ids, owners = _kinds(tensor)
        if ids is None and owners is None and changes_in_chunks(tensor, by_torch=False) and not fits(tensor, 5):
            return change_rows(tensor, lambda values, part: func(values, mean, std, a, b, *args, **kwargs))
        if ids is None:
            return whole(tensor, mean, std, a, b, *args, **kwargs)
        mean, std, a, b = map(float, (mean, std, a, b))
        if max(a - mean, mean - b) > -FARTHEST * std:
            raise InvalidTypeError(
                f"{ids} has a vocabulary, whose initial values have no bounds, and trunc_normal_ would cut them off at "
                f"{a} and {b}; use torch.nn.init.normal_, or wider bounds, {FARTHEST} standard deviations from the mean"
            )
        ids.fill(("normal", mean, std))
        return tensor

    return call


special.update({func: _set(func) for func in _DRAWS})
special.update({func: _set(func, draws=False) for func in (Tensor.fill_, Tensor.zero_)})
special.update({init.kaiming_uniform_: _kaiming_uniform, Tensor.copy_: _copied})
