"""The weight of a table module: a parameter that reads and writes as the whole table.

Every function of torch that is given the weight gets all rows, up to date: the memory of the table where a tensor can be over
it, else a copy that is written back after a function that has written to it. Where gradients are wanted, that is a leaf of
autograd whose gradient is deposited for all rows; lookups (``F.embedding``, indexing by integers) take their rows alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.active import activate
from speedtransfer.nn.lookup import bag_lookup, lookup
from speedtransfer.optim import Handle, find_handle
from speedtransfer.optim.handle import as_tensor


class TableWeight(nn.Parameter):
    """The parameter of a table module between steps. In the step of an optimizer it is an ordinary ``nn.Parameter``."""

    @staticmethod
    def __new__(cls, data: Any = None, requires_grad: bool = True, **_: Any) -> Any:
        """Return an ordinary parameter: what others make by the class of a weight is none of a table."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func` with the whole table."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            handle = copy.deepcopy(_handle_of(self), memo)
            memo[id(self)] = handle.param_or_none() or handle.new_param(TableWeight)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _weight_of, (_handle_of(self),)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch.no_grad():
            return f"Parameter containing:\n{_handle_of(self).whole()!r}"


class _WeightData(Tensor):
    """``weight.data`` of a table that no tensor can be over: reads and writes as the weight does, without gradients."""

    handle: Handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch.no_grad():
            return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.handle.whole().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.handle.whole().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.handle.whole())


class _CopiedRows(Tensor):
    """Rows of a table that no tensor can be over. A write to them would be lost, and raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        copies: list[tuple[Tensor, int]] = []

        def plain(tensor: Tensor) -> Tensor:
            with as_tensor():
                copies.append((tensor, tensor._version))
                return tensor.as_subclass(Tensor)

        args, kwargs = tree_map_only(_CopiedRows, plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        with as_tensor():
            if any(tensor._version != version for tensor, version in copies):
                raise InvalidValueError(
                    "these are copies of rows of a table, and writing to them changes no row; write to the weight itself "
                    "(emb.weight.data[i] = rows) or to the table (emb.table[ids] = rows)"
                )
        return result


def table_weight(handle: Handle, param: nn.Parameter | None = None) -> nn.Parameter:
    """Return a new weight for `handle`, or make the parameter `param`, whose values the table has, its weight."""
    return handle.new_param(TableWeight) if param is None else handle.bind(param, TableWeight)


def take_weight(handle: Handle, param: nn.Parameter) -> None:
    """Make an ordinary parameter the weight of `handle`, with its values."""
    handle.take_param(param, TableWeight)


def _weight_of(handle: Handle) -> nn.Parameter:
    return handle.param_or_none() or handle.new_param(TableWeight)


def _handle_of(weight: Any) -> Handle:
    handle = weight.handle if isinstance(weight, _WeightData) else find_handle(weight)
    if handle is None:
        raise InvalidValueError(
            "this parameter was the weight of a table until another was assigned in its place; use that of the module"
        )
    return handle


# --- functions that are called with the weight ----------------------------------------------------------------------------


@torch.compiler.disable  # which rows there are, and what they have still to catch up with, is known only when it runs
def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with the whole table in place of each weight among its arguments."""
    if func in _ASIDE:
        with as_tensor():
            return func(*args, **kwargs)
    special = _SPECIAL.get(func)
    if special is not None:
        result = special(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _with_whole(func, args, kwargs)


def _with_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: dict[int, tuple[Any, Tensor, Handle, int]] = {}

    def whole(weight: Any) -> Tensor:
        handle = _handle_of(weight)
        trains = torch.is_grad_enabled() and handle.requires_grad and not isinstance(weight, _WeightData)
        values = handle.whole_leaf() if trains else handle.whole()
        given[id(values)] = weight, values, handle, values._version
        return values

    weights = TableWeight, _WeightData
    new_args, new_kwargs = tree_map_only(weights, whole, (args, kwargs))
    result = func(*new_args, **new_kwargs)
    for _, values, handle, version in given.values():
        if values._version != version and not handle.aliased:
            handle.store(values)
    return tree_map_only(Tensor, lambda tensor: _given_back(tensor, given), result)


def _given_back(tensor: Tensor, given: dict[int, tuple[Any, Tensor, Handle, int]]) -> Tensor:
    """Return the weight where a function returns its argument, and rows that cannot be written where it returns views."""
    if id(tensor) in given:
        weight: Tensor = given[id(tensor)][0]
        return weight
    if type(tensor) is Tensor and not tensor.requires_grad and tensor._is_view():
        for _, values, handle, _ in given.values():
            if tensor._base is values and not handle.aliased:
                return tensor.as_subclass(_CopiedRows)
    return tensor


def _moved(func: Callable[..., Any]) -> Callable[..., Any]:
    """``weight.to(...)`` and its like: the weight itself where it is there already, without a look at its rows."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(weight, TableWeight | _WeightData):  # x.to(weight): like the weight
            with as_tensor():
                return func(weight, *args, **kwargs)
        handle = _handle_of(weight)
        empty = torch.empty(0, dtype=handle.rows.dtype, device=handle.table.device)
        return weight if func(empty, *args, **kwargs) is empty else NotImplemented

    return call


# --- data, gradient ---------------------------------------------------------------------------------------------------------


def _data(weight: Any) -> Tensor:
    handle = _handle_of(weight)
    if handle.aliased:
        return handle.whole()
    with as_tensor():
        data = torch.Tensor.detach(weight).as_subclass(_WeightData)
    data.handle = handle
    return handle.give(data)


def _set_data(weight: Any, values: Tensor) -> None:
    """Write `values` to the rows. Of another number of rows they make a new table; dtype and device follow them."""
    if values is weight:
        return
    handle = _handle_of(weight)
    if isinstance(values, TableWeight | _WeightData):
        values = _handle_of(values).whole()
    handle.set_whole(values)


def _set_grad(weight: Any, grad: Tensor | None) -> None:
    _handle_of(weight).assign_gradient(grad)


def _require_grad(weight: Any, requires_grad: bool = True) -> Any:
    with as_tensor():
        weight.requires_grad = requires_grad
    _handle_of(weight).requires_grad = requires_grad
    return weight


def _full_like(weight: Any, fill_value: Any, **kwargs: Any) -> Any:
    """``torch.full_like``, in whose memory Adagrad would keep the state of a table that does not fit on the device."""
    handle = _handle_of(weight)
    with as_tensor():
        if handle.aliased or kwargs.get("device") is not None:
            empty = fill_value == 0 and not kwargs.get("requires_grad", False)  # untouched pages of zeros take no memory
            return torch.zeros_like(weight, **kwargs) if empty else torch.full_like(weight, fill_value, **kwargs)
        one = torch.full((1, 1), fill_value, dtype=kwargs.get("dtype") or weight.dtype, device=weight.device)
        return one.expand(weight.shape)


def _refused(remedy: str) -> Callable[..., Any]:
    def refuse(weight: Any, *args: Any, **kwargs: Any) -> Any:
        raise InvalidTypeError(f"{_handle_of(weight)} is the weight of a table, which {remedy}")

    return refuse


def in_transform() -> bool:
    """Tell whether torch.func transforms what runs: its tensors have no memory in which ids could be looked at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- lookups ----------------------------------------------------------------------------------------------------------------


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, TableWeight | _WeightData) or in_transform():
        return NotImplemented
    handle = _handle_of(weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += handle.table.num_rows
    active = activate(handle, input, max_norm, norm_type, padding_idx)
    if isinstance(weight, TableWeight) and torch.is_grad_enabled() and handle.requires_grad:
        active.track_grad()
    return lookup(active, active.groups.found, scale_grad_by_freq)


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if not isinstance(weight, TableWeight | _WeightData) or in_transform():
        return NotImplemented
    handle = _handle_of(weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += handle.table.num_rows
    active = activate(handle, input, max_norm, norm_type, padding_idx)
    if isinstance(weight, TableWeight) and torch.is_grad_enabled() and handle.requires_grad:
        active.track_grad()
    padded = padding_idx is not None
    return bag_lookup(active, offsets, per_sample_weights, mode, scale_grad_by_freq, include_last_offset, padded)


def _rows_at(weight: Any, index: Any) -> Any:
    """``weight[index]`` where integers name the rows: those rows alone."""
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    number = type(first) is int
    rows = isinstance(first, Tensor) and first.dtype in (torch.int64, torch.int32) and first.dim() > 0
    rows = rows or (isinstance(first, list) and bool(first) and all(type(i) is int for i in first))
    if rest and rows and not all(isinstance(part, slice) for part in rest):
        return NotImplemented  # indices broadcast with one another
    if not isinstance(weight, TableWeight | _WeightData) or not (rows or number) or in_transform():
        return NotImplemented
    handle = _handle_of(weight)
    trains = isinstance(weight, TableWeight) and torch.is_grad_enabled() and handle.requires_grad
    if number and not trains:
        return NotImplemented  # a view, which may be written to
    ids = torch.as_tensor(first)
    if ids.is_cuda or bool((ids < 0).any()):
        ids = torch.where(ids < 0, ids + handle.table.num_rows, ids)
    found = _embedding(ids, weight)
    return found[(slice(None),) * ids.dim() + tuple(rest)] if rest else found


def _index_select(weight: Any, dim: Any, index: Tensor) -> Any:
    if isinstance(weight, TableWeight | _WeightData) and dim in (0, -2) and index.dim() == 1:
        return _embedding(index, weight)
    return NotImplemented


# --- gradients by the weight --------------------------------------------------------------------------------------------------


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` by weights: what reaches the rows that lookups took of them, as one gradient each."""
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    followed = [_handle_of(w).leaves() if isinstance(w, TableWeight) else [(w, None)] for w in wanted]
    flat = [leaf for leaves in followed for leaf, _ in leaves]
    allowed = kwargs.get("allow_unused") or kwargs.get("materialize_grads", False)
    unused = {**kwargs, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, flat, *args, **unused) if flat else ())
    results: list[Tensor | None] = []
    for weight, leaves in zip(wanted, followed, strict=True):
        grads = [(next(found), ids) for _, ids in leaves]
        if not isinstance(weight, TableWeight):
            results.append(grads[0][0])
        else:
            results.append(_summed(_handle_of(weight), grads))
        if results[-1] is None and not allowed:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
                "is the desired behavior."
            )
        if results[-1] is None and kwargs.get("materialize_grads", False):
            results[-1] = torch.zeros_like(weight)
    return tuple(results)


def _summed(handle: Handle, grads: list[tuple[Tensor | None, Tensor | None]]) -> Tensor | None:
    total: Tensor | None = None
    for grad, ids in grads:
        if grad is None:
            continue
        if ids is not None:
            empty = grad.new_zeros(handle.table.num_rows, grad.shape[1])
            grad = empty.index_add(0, ids.to(grad.device), grad)
        total = grad if total is None else total + grad
    return total


_DESCRIBED = (
    "shape dtype device layout ndim is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_nested "
    "is_mkldnn is_xla is_ipu is_hpu is_mtia is_vulkan is_maia requires_grad grad_fn output_nr itemsize nbytes retains_grad "
    "_backward_hooks _post_accumulate_grad_hooks _grad_fn _version name volatile"
).split()
_METHODS = (
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size __len__ get_device is_floating_point "
    "is_complex is_signed is_inference is_same_size register_hook register_post_accumulate_grad_hook retain_grad has_names "
    "_is_view data_ptr untyped_storage storage _typed_storage is_shared is_pinned is_conj is_neg __hash__ is_distributed "
    "is_coalesced sparse_dim dense_dim _is_zerotensor"
).split()
_LIKE = "zeros_like ones_like empty_like rand_like randn_like randint_like".split()
_NEW = "new_zeros new_ones new_empty new_full new_tensor new".split()
_FUNCTIONS = "numel is_floating_point is_complex is_tensor is_signed is_inference is_same_size is_conj is_neg get_device".split()
# What tells of the weight as a tensor, and needs no row.
_ASIDE = {
    *(getattr(Tensor, name).__get__ for name in _DESCRIBED if hasattr(getattr(Tensor, name, None), "__get__")),
    *(getattr(Tensor, name).__set__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    *(getattr(Tensor, name) for name in (*_METHODS, *_NEW) if hasattr(Tensor, name)),
    *(getattr(torch, name) for name in (*_FUNCTIONS, *_LIKE) if hasattr(torch, name)),
    torch._has_compatible_shallow_copy_type,
}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.detach: _data,
    torch.detach: _data,
    Tensor.grad.__get__: lambda weight: _handle_of(weight).gradient(),  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_grad,  # type: ignore[attr-defined]
    Tensor.grad.__delete__: lambda weight: _set_grad(weight, None),  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: _require_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _require_grad,
    torch.full_like: _full_like,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    Tensor.__getitem__: _rows_at,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    torch.autograd.grad: _grad,
    Tensor.share_memory_: _refused("cannot be shared by forked processes; make each its own, or train in one"),
    Tensor.set_: _refused("keeps its memory; write the rows (emb.weight.data.copy_(rows))"),
    Tensor.resize_: _refused("is resized by emb.weight.data = rows, of as many rows as it is to have"),
    Tensor.resize_as_: _refused("is resized by emb.weight.data = rows, of as many rows as it is to have"),
    **{
        getattr(Tensor, name): _moved(getattr(Tensor, name))
        for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "type_as")
    },
}
