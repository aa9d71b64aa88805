"""Functions of torch of the gradient of a table, computed on its active rows; `by_row` has them by name.

A function of each value by itself gives the active rows new values, and all others one, `RowGradient.elsewhere`, which is
found on the host. What is zero there has more functions: sums, norms and factors that differ by row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from speedtransfer.optim.merge import merged
from speedtransfer.optim.row_gradient import RowGradient, by_row, know_elsewhere
from speedtransfer.optim.row_parts import flat_view, rows_at, select_view, slice_view, zero_rows

aten = torch.ops.aten


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split()}


# Functions of each value by itself, and of numbers.
_EACH = """
    abs abs_ addcdiv addcdiv_ addcmul addcmul_ bitwise_and bitwise_not bitwise_or bitwise_xor ceil ceil_ clamp clamp_ clamp_max
    clamp_max_ clamp_min clamp_min_ copy_ eq exp expm1 fill_ floor floor_ floor_divide ge gt isinf isnan isneginf isposinf le
    lerp lerp_ log log1p logical_and logical_not logical_or logical_xor lt maximum minimum nan_to_num nan_to_num_ ne neg neg_
    pow pow_ reciprocal round round_ rsub sgn sigmoid sign sign_ sqrt sqrt_ tanh tanh_ trunc trunc_
"""
_DIVISIONS = _packets("div div_")
# Functions of lists: the first list may hold RowGradients and ordinary tensors.
_LISTS = _packets("""
    _foreach_abs _foreach_abs_ _foreach_clamp_max _foreach_clamp_max_ _foreach_clamp_min _foreach_clamp_min_ _foreach_div
    _foreach_div_ _foreach_mul _foreach_mul_ _foreach_neg _foreach_neg_ _foreach_zero_
    _amp_foreach_non_finite_check_and_unscale_
""")
# How the bound of those that clamp must compare with zero, so that this stays zero.
_KEEPS_ZERO = dict.fromkeys(_packets("_foreach_clamp_min _foreach_clamp_min_"), operator.le)
_KEEPS_ZERO |= dict.fromkeys(_packets("_foreach_clamp_max _foreach_clamp_max_"), operator.ge)
NORMS = _packets("norm linalg_vector_norm")
_EXTREMES, _DEVIATIONS = _packets("max min amax amin"), _packets("var std")
# What zeros add nothing to.
_SUMS = NORMS | _packets("sum any count_nonzero")
REDUCTIONS = _SUMS | _EXTREMES | _DEVIATIONS | _packets("mean all")


def _some_rows(grad: RowGradient) -> Tensor:
    """Return the rows, or one of zeros if none is active: there is no largest of no values."""
    return grad.rows if grad.rows.numel() or not grad.numel() else grad.rows.new_zeros(1, *grad.shape[1:])


def _wrapped(grad: RowGradient, result: Any, elsewhere: Any = 0) -> Any:
    if result is not grad.rows:
        made = grad.like(result)
        made.elsewhere = elsewhere
        return made
    grad.parts.count_write()
    return grad


def order_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the order of a norm from the arguments of its function."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    return 2.0 if order is None else float(order)


# --- each value by itself ---------------------------------------------------------------------------------------------------


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    made = grad._made(grad.ids, grad.rows, grad.known, grad._changed)
    made.elsewhere = grad.elsewhere
    if not grad.sparse:
        # Of a sparse one torch makes another with the same values, which does not become what the first becomes.
        made.parts = grad.parts
    return made


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    rows = func(grad.rows, *args[1:], **kwargs)
    elsewhere = (
        torch.tensor(grad.elsewhere, dtype=grad.dtype, device="cpu").to(rows.dtype).item() if grad.elsewhere else 0
    )
    return _wrapped(grad, rows, elsewhere)


def _zeroed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    _wrapped(grad, grad.rows.zero_())
    grad._tell(grad.rows, "zeroed")
    return grad


def _each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of each value on the active rows, and on the value elsewhere; all gradients have the same rows."""
    flat = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    grads = [value for value in flat if isinstance(value, RowGradient)]
    first = grads[0]
    if any(not isinstance(value, RowGradient) and (value.dim() or not value.is_cpu) for value in flat):
        return NotImplemented
    if not all(grad.shape == first.shape and grad.device == first.device and _same(grad, first) for grad in grads):
        return NotImplemented
    one = tree_map_only(
        RowGradient, lambda grad: torch.full((1,), grad.elsewhere, dtype=grad.dtype, device="cpu"), (args, kwargs)
    )
    elsewhere = func(*one[0], **one[1]).item()
    in_place = func.overloadpacket.__name__.endswith("_")
    if (in_place and elsewhere != first.elsewhere) or (elsewhere and first.sparse):
        return NotImplemented
    args, kwargs = tree_map_only(RowGradient, lambda grad: grad.rows, (args, kwargs))
    return _of_ids(_wrapped(first, func(*args, **kwargs), elsewhere), grads)


def _of_ids(made: RowGradient, grads: Sequence[RowGradient]) -> RowGradient:
    """Return what was made of gradients; raise where rows of one have become those of other ids before the other came."""
    stamped = [(grad, *grad.stamp) for grad in grads if grad.stamp is not None]
    if len({version for *_, version in stamped}) > 1:
        for grad, id_space, version in stamped:
            id_space.check_same_ids(grad.ids, grad.known, version)
            made.stamp = id_space, id_space.version
    return made


def _same(grad: RowGradient, other: RowGradient) -> bool:
    return grad.ids is other.ids or grad.agrees(torch.equal(grad.trim().ids, other.trim().ids))


def _summed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result, grad, other = _each(func, args, kwargs), args[0], args[1]
    if result is not NotImplemented or func is not aten.add.Tensor or kwargs:
        return result
    if not isinstance(grad, RowGradient) or not isinstance(other, RowGradient) or grad.shape != other.shape:
        return NotImplemented
    if grad.elsewhere or other.elsewhere or grad.dim() != 2:
        return NotImplemented
    # As autograd adds those of two lookups.
    dtype = torch.promote_types(grad.dtype, other.dtype)
    one, two = ((it.ids, it.rows.to(dtype, copy=it is grad), it.known) for it in (grad, other))
    return _of_ids(grad._made(*merged(grad.shape[0], one, two, grad.rows.is_cuda)[0]), (grad, other))


def _multiplied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(value, RowGradient) and value.elsewhere for value in args):
        result = _scaled(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return _each(func, args, kwargs)


def _scaled(func: Any, args: tuple[Any, ...], rounding: dict[str, Any]) -> Any:
    """Multiply or divide by a number, or by a tensor that broadcasts to the shape of the gradient."""
    first, second = args[0], args[1]
    if len(args) > 2 or (isinstance(first, RowGradient) and isinstance(second, RowGradient)):
        return NotImplemented
    grad, other = (first, second) if isinstance(first, RowGradient) else (second, first)
    if other is first and (func.overloadpacket is not aten.mul or rounding):
        return NotImplemented
    if isinstance(other, Tensor):
        if other.dim() > grad.dim() or torch.broadcast_shapes(other.shape, grad.shape) != grad.shape:
            return NotImplemented
        # 0 / 0 and 0 * inf make rows without a gradient NaN. A single factor is not checked: the host would wait for the GPU,
        # and such a factor shows in the loss.
        if other.numel() > 1:
            kept = (other != 0) & ~other.isnan() if func.overloadpacket in _DIVISIONS else other.isfinite()
            if not bool(kept.all()):
                return NotImplemented
        # A factor for each row, such as a mask.
        if other.dim() == grad.dim() and other.shape[0] == grad.shape[0] != 1:
            other = other[grad.trim().ids.to(other.device)]
    elif other != other or (other == 0 if func.overloadpacket in _DIVISIONS else math.isinf(other)):
        return NotImplemented
    result = func(grad.rows, other, **rounding) if first is grad else func(other, grad.rows)
    return _wrapped(grad, result)


# --- lists ------------------------------------------------------------------------------------------------------------------


def _of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads = args[0]
    flat = [item for other in args[1:] if isinstance(other, list | tuple) for item in other]
    masks = any(isinstance(g, RowGradient) and g.elsewhere for g in grads)
    if masks or any(isinstance(item, Tensor) and item.dim() for item in flat):
        return NotImplemented
    keeps_zero = _KEEPS_ZERO.get(func.overloadpacket)
    if keeps_zero is not None and not (isinstance(args[1], int | float) and keeps_zero(args[1], 0)):
        return NotImplemented
    results = func([g.rows if isinstance(g, RowGradient) else g for g in grads], *args[1:], **kwargs)
    # In place.
    if results is None:
        changed = [g for g in grads if isinstance(g, RowGradient)]
        for g in changed:
            g.parts.count_write()
        if func.overloadpacket is aten._foreach_zero_:
            for g in changed:
                g._tell(g.rows, "zeroed")
        return None
    return [_wrapped(g, r) if isinstance(g, RowGradient) else r for g, r in zip(grads, results, strict=True)]


def _norms_of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if order_of(args, kwargs) <= 0:
        return NotImplemented
    return func(tree_map_only(RowGradient, _some_rows, args[0]), *args[1:], **kwargs)


# --- reductions -------------------------------------------------------------------------------------------------------------


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce all values to one, or those of each row, or those of each column."""
    grad, packet = args[0], func.overloadpacket
    pairs = packet in (aten.max, aten.min) and func not in (aten.max.default, aten.min.default)
    if not isinstance(grad, RowGradient) or not grad.numel() or pairs:
        return NotImplemented
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dims = dims_of(given, grad.dim())
    if (dims and dims[-1] >= grad.dim()) or (packet in _DEVIATIONS and not grad.dtype.is_floating_point):
        # Torch says what is wrong.
        return NotImplemented
    if dims == [1]:
        return _of_each_row(func, args, kwargs)
    if packet in NORMS and (grad.elsewhere or order_of(args, kwargs) <= 0):
        return NotImplemented
    if packet in _SUMS and not grad.elsewhere and dims in (None, [0]):
        return func(_some_rows(grad), *args[1:], **kwargs)
    if dims is not None:
        return NotImplemented
    return func(grad.rows, *args[1:], **kwargs) if grad.is_full() else _with_others(func, grad, given, args, kwargs)


def dims_of(given: dict[str, Any], num_dims: int) -> list[int] | None:
    """Return the dimensions that a reduction is over, by its arguments; None: all, which leaves one number."""
    dim = given.get("dim")
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    over_all = not dims or len(dims) == num_dims
    return None if over_all and not given.get("keepdim") else sorted(each + num_dims * (each < 0) for each in dims)


def _with_others(func: Any, grad: RowGradient, given: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Reduce all values where rows that are not active count, too: of each value there `grad.elsewhere`."""
    packet, rows, elsewhere = func.overloadpacket, grad.rows, grad.elsewhere
    total, known = grad.numel(), rows.numel()
    if packet in (aten.any, aten.all):
        decided = bool(elsewhere) == (packet is aten.any)
        found = func(rows, *args[1:], **kwargs)
        return torch.full_like(found, True) & (packet is aten.any) if decided else found
    if packet in _EXTREMES:
        other = rows.new_full((), elsewhere)
        return func(torch.stack([func(rows), other])) if known else other
    if packet in _DEVIATIONS:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = wide.sum() / total + elsewhere * (1 - known / total)
        squares = (wide - mean).square().sum() + (total - known) * (elsewhere - mean).square()
        correction = given.get("correction")
        found = squares / max(0, total - (1 if correction is None else correction))
        return (found.sqrt() if packet is aten.std else found).to(rows.dtype)
    result = func(_some_rows(grad), *args[1:], **kwargs)
    if packet is aten.mean:
        wide = rows.sum(dtype=torch.promote_types(result.dtype, torch.float32))
        return ((wide + (total - known) * elsewhere) / total).to(result.dtype)
    # A sum, or a count.
    return result + (total - known) * (elsewhere if packet is aten.sum else bool(elsewhere))


def _of_each_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0].trim()
    other = func(grad.rows.new_full((1, *grad.shape[1:]), grad.elsewhere), *args[1:], **kwargs)
    found = func(grad.rows, *args[1:], **kwargs)
    return other.expand(grad.shape[0], *other.shape[1:]).clone().index_copy_(0, grad.ids, found)


# --- rows, and other shapes -------------------------------------------------------------------------------------------------


def _indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, index = args[0], args[1]
    alone = isinstance(index, list | tuple) and len(index) == 1
    return rows_at(grad, index[0], True) if alone and not kwargs and isinstance(grad, RowGradient) else NotImplemented


def _selected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, dim, index = args
    if not isinstance(grad, RowGradient) or dim not in (0, -grad.dim()):
        return NotImplemented
    return rows_at(grad, index.view(-1), False)


def _fill(packets: Iterable[Any], function: Callable[..., Any], elsewhere: bool = False) -> None:
    by_row.update(dict.fromkeys(packets, function))
    if elsewhere:
        know_elsewhere.add(function)


_fill(_packets(_EACH), _each, True)
_fill(_packets("add add_ sub sub_"), _summed, True)
_fill(_packets("mul mul_ div div_"), _multiplied, True)
_fill(_packets("detach alias"), _alias, True)
_fill(_packets("clone _to_copy"), _copied, True)
_fill(_packets("zero_"), _zeroed)
_fill(_LISTS, _of_lists, True)
_fill(_packets("_foreach_norm"), _norms_of_lists)
_fill(REDUCTIONS, _reduced, True)
_fill(_packets("index"), _indexed, True)
_fill(_packets("index_select"), _selected, True)
_fill(_packets("slice"), slice_view)
_fill(_packets("select"), select_view)
_fill(_packets("view _unsafe_view"), flat_view)
_fill([Tensor.__setitem__], zero_rows)
