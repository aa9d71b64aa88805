"""Change every value of a weight by itself: in chunks of rows, where no tensor can alias the memory of the table.

All rows need not fit on the device then, nor, of a table with a codec, into memory. What is not known to change each value by
itself gets all rows (`weight.with_whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, is_trained, special
from speedtransfer.optim.row_gradient import RowGradient

# Methods of tensors, whose other arguments broadcast to the weight.
_METHODS = """
    abs_ add_ addcdiv_ addcmul_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ divide_ erfinv_ exp_ fill_ floor_ lerp_
    log_ masked_fill_ mul_ multiply_ nan_to_num_ neg_ pow_ reciprocal_ relu_ round_ rsqrt_ sigmoid_ sign_ sqrt_ square_ sub_
    subtract_ tanh_ trunc_ zero_ __iadd__ __isub__ __imul__ __itruediv__
"""
# Of which many small changes add up: averages of a weight would not move where each was rounded to nearest.
_ARITHMETIC = frozenset(
    ["add", "addcdiv", "addcmul", "div", "divide", "lerp", "mul", "multiply", "sub", "subtract", "truediv"]
)


def changes_in_chunks(weight: Any, by_torch: bool = True) -> bool:
    """Tell whether `weight` is one whose rows this process has, without a tensor over them, and may be changed in place.

    `by_torch`: not where it is a leaf that requires a gradient, which torch refuses.
    """
    if not isinstance(weight, TableWeight | WeightData):
        return False
    handle = handle_of(weight)
    return handle.of.is_whole and not handle.aliased and not (by_torch and is_trained(weight, handle))


def fits(weight: Any, copies: int = 1) -> bool:
    """Tell whether there is room for `copies` of all rows on the device, where that is a CUDA device."""
    handle = handle_of(weight)
    device, dtype = handle.table.device, handle.rows.dtype
    try:
        torch.empty(
            copies * handle.num_rows if device.type == "cuda" else 0, handle.table.dim, dtype=dtype, device=device
        )
    except torch.OutOfMemoryError:
        return False
    return True


def change_rows(weight: Any, function: Callable[[Tensor, slice], object], draws: bool = False) -> Any:
    """Have `function` change rows ``(n, dim)``, of which it is told which they are, chunk by chunk; return `weight`.

    They are rounded to nearest, or, if it `draws`, stochastically.
    """
    handle = handle_of(weight)
    handle.table.check_writable()
    handle.of.step.recover()
    handle.of.rows.catch_up()
    handle.table.wait()
    handle.of.rows.change(function, handle.start, handle.stop, draws)
    return weight


def change(func: Callable[..., Any], weight: Any, args: Any, kwargs: Any) -> Any:
    """Return `weight` when ``func(rows, *args, **kwargs)`` has changed all its rows, or NotImplemented.

    Of a table of several processes each changes its own, by numbers alone.
    """
    if not isinstance(weight, TableWeight | WeightData):
        return NotImplemented
    handle = handle_of(weight)
    owners: Any = handle.of.owners
    if not owners.has_whole:
        if not all(isinstance(value, bool | int | float) or value is None for value in (*args, *kwargs.values())):
            return NotImplemented
        owners.change(lambda rows: func(rows, *args, **kwargs), handle.start, handle.stop)
        return weight
    if not changes_in_chunks(weight):
        return NotImplemented
    shape = handle.num_rows, handle.table.dim
    if not all(_is_in_rows(value, shape) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)):
        return NotImplemented

    def of_rows(rows: Tensor, part: slice) -> None:
        some, named = tree_map_only(Tensor, lambda value: _part(value, part, shape), (args, kwargs))
        func(rows, *some, **named)

    return change_rows(weight, of_rows, func.__name__.strip("_").removeprefix("i") in _ARITHMETIC)


def _is_in_rows(value: Tensor, shape: tuple[int, int]) -> bool:
    """Tell whether rows of the result need the same rows of `value` only, which broadcasts to `shape`."""
    if value.requires_grad and torch.is_grad_enabled():
        return False
    if isinstance(value, TableWeight | WeightData):
        other = handle_of(value)
        return other.of.is_whole and (other.num_rows, other.table.dim) == shape
    # Of a square one a transposed view may be over the memory that is written to.
    plain = type(value) in (Tensor, torch.nn.Parameter, RowGradient) and value.layout == torch.strided
    lengths = (1, *shape[:1]) if shape[0] != shape[1] else (1,)
    return plain and (value.dim() < 2 or (value.dim() == 2 and value.shape[0] in lengths))


def _part(value: Tensor, part: slice, shape: tuple[int, int]) -> Tensor:
    if isinstance(value, TableWeight | WeightData):
        other = handle_of(value)
        rows = other.of.rows.whole("weight", other.start + part.start, other.start + part.stop)
        return rows.detach().to(other.table.device, other.rows.dtype)
    return value[part] if value.dim() == 2 and len(value) == shape[0] else value


def _of_lists(name: str) -> Callable[..., Any]:
    """Return what is called for `torch._foreach_add_` and its like: the method, of one tensor after the other."""
    method = getattr(Tensor, name)

    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(changes_in_chunks, tensors)):
            return NotImplemented
        given: Any = {**dict(enumerate(args)), **kwargs}
        given = {key: it.tolist() if isinstance(it, Tensor) and it.dim() == 1 else it for key, it in given.items()}
        if any(isinstance(it, list | tuple) and len(it) != len(tensors) for it in given.values()):
            raise RuntimeError(f"the lists of _foreach_{name} have different lengths; pass as many of each")
        if name in ("addcmul_", "addcdiv_") and len(args) > 2:
            given["value"] = given.pop(2)
        for number, tensor in enumerate(tensors):
            own = {key: value[number] if isinstance(value, list | tuple) else value for key, value in given.items()}
            method(tensor, *(own.pop(place) for place in range(len(args)) if place in own), **own)
        return None

    return call


def _method(name: str) -> Callable[..., Any]:
    func = getattr(Tensor, name)
    return lambda weight, *args, **kwargs: change(func, weight, args, kwargs)


special.update({getattr(Tensor, name): _method(name) for name in _METHODS.split() if hasattr(Tensor, name)})
special.update(
    {
        getattr(torch, f"_foreach_{name}"): _of_lists(name)
        for name in _METHODS.split()
        if hasattr(torch, f"_foreach_{name}") and hasattr(Tensor, name)
    }
)
