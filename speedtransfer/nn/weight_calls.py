"""Functions of torch that do not get the whole table when called with its weight: data, gradient, layout, lookups of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn import fills  # noqa: F401
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.nn.lookup import bag_lookup, lookup
from speedtransfer.nn.tracing import in_transform
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, is_trained, rowless, special, with_whole
from speedtransfer.optim import Handle
from speedtransfer.optim.graph import as_tensor, forgets_inputs, listen


def _moved(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.to`` or the like, which reads no rows and returns the weight itself if there is nothing to convert."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        # x.to(weight) takes dtype and device of the weight.
        if not isinstance(weight, TableWeight | WeightData):
            with as_tensor():
                return func(weight, *args, **kwargs)
        handle = handle_of(weight)
        empty = torch.empty(0, dtype=handle.rows.dtype, device=handle.table.device)
        moved = func(empty, *args, **kwargs)
        if moved is empty:
            return weight
        if is_trained(weight, handle) or handle.aliased or not handle.of.is_whole or moved.device.type != "cpu":
            return NotImplemented
        # From where the rows are, and not by the device, which may have no room for them.
        handle.of.step.recover()
        values = handle.of.rows.whole("weight", handle.start, handle.stop).detach()
        return func(values.to(handle.rows.dtype, copy=handle.of.rows.is_viewable("weight")), *args, **kwargs)

    return call


# --- data, gradient ---------------------------------------------------------------------------------------------------------


def _data(weight: Any) -> Tensor:
    handle = handle_of(weight)
    # A write to the memory itself of rows that are only read would not be refused.
    writable = handle.aliased and handle.table.writable
    return handle.whole() if writable else handle.track_alias(WeightData(handle))


def _set_data(weight: Any, values: Tensor) -> None:
    """Set all rows to `values`, ``(any, dim)``. Another number of rows makes a new table; dtype and device become theirs."""
    if values is weight:
        return
    handle = handle_of(weight)
    if isinstance(values, TableWeight | WeightData):
        other = handle_of(values)
        if other.of is handle.of and (other.start, other.num_rows) == (handle.start, handle.num_rows):
            return
        if not other.aliased and other.of.param_ref() is not None:
            # Of one that is aliased the memory tells; one without a parameter are rows that another weight had before.
            raise InvalidValueError(
                f"{handle} is assigned the rows of {other} and would not follow them; write its values "
                "(weight.data.copy_(other)), or share the weight itself (module.weight = other.weight)"
            )
        values = other.whole()
    handle.set_whole(values)


def _set(weight: Any, source: Any = None, *args: Any) -> Any:
    if not isinstance(source, Tensor) or args:
        raise InvalidTypeError(
            f"{handle_of(weight)} is the weight of a table, whose memory set_() cannot lay out; pass it a tensor of rows"
        )
    _set_data(weight, source)
    return weight


def _of_layout(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.stride`` or the like, answered as for a dense tensor of its shape."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        handle = handle_of(weight)
        shape = handle.num_rows, handle.table.dim
        return func(torch.empty(shape, dtype=handle.rows.dtype, device="meta"), *args, **kwargs)

    return call


def _data_ptr(weight: Any) -> int:
    """Return the address of the rows, where there is memory of all of them, one after the other."""
    handle = handle_of(weight)
    if not handle.aliased:
        raise InvalidTypeError(
            f"{handle} has no address of all its rows, which are stored otherwise or elsewhere (data_ptr(), by which files "
            "are written and other libraries called); pass a copy (weight.detach().clone()), or model.state_dict()"
        )
    with as_tensor():
        return weight.data_ptr()


def _strided(func: Callable[..., Any], first: int) -> Callable[..., Any]:
    """Return ``as_strided`` or the like: the offset, argument `first`, counts from the first row of a feature, not of all."""

    def of_whole(whole: Any, *args: Any, storage_offset: int | None = None, **kwargs: Any) -> Any:
        offset = args[first] if len(args) > first else storage_offset
        return func(whole, *args[:first], storage_offset=(offset or 0) + whole.storage_offset(), **kwargs)

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        is_part = isinstance(weight, TableWeight | WeightData) and handle_of(weight).is_part
        return with_whole(of_whole, (weight, *args), kwargs) if is_part else NotImplemented

    return call


def _require_grad(weight: Any, requires_grad: bool = True) -> Any:
    if isinstance(weight, WeightData):
        # In torch a tensor of its own: whether the weight is trained does not change.
        if requires_grad:
            raise InvalidTypeError(
                f"{handle_of(weight)}.data reads rows where they are stored, and collects no gradient of its own; take a copy "
                "(weight.detach().clone().requires_grad_())"
            )
        return weight
    table = handle_of(weight).rows.table
    if requires_grad and table.is_read_only:
        table.check_writable()
    with as_tensor():
        weight.requires_grad = requires_grad
    listen(weight)
    handle_of(weight).requires_grad = requires_grad
    return weight


def _detach_in_place(weight: Any) -> Any:
    """Freeze the weight, as torch does with a leaf."""
    return _require_grad(weight, False)


def _full_like(weight: Any, fill_value: Any, **kwargs: Any) -> Any:
    """Replace ``torch.full_like``, with which Adagrad makes its state: for a table that may not fit on the device."""
    handle = handle_of(weight)
    with as_tensor():
        shape, dtype, device = weight.shape, kwargs.get("dtype") or weight.dtype, kwargs.get("device") or weight.device
        num_bytes = shape.numel() * dtype.itemsize
        if fill_value == 0 and num_bytes and torch.device(device).type == "cpu":
            # Untouched pages of an anonymous mapping take no memory; those of torch.zeros do.
            made = torch.frombuffer(buffers.anonymous(num_bytes), dtype=dtype).view(shape)
        elif handle.aliased or kwargs.get("device") is not None or not _within("torch.optim.adagrad"):
            made = torch.full(shape, fill_value, dtype=dtype, device=device)
        else:
            # Its first step finds that all are the same, and fills a plane with it.
            made = torch.full((1, 1), fill_value, dtype=dtype, device=device).expand(shape)
    return made.requires_grad_(kwargs.get("requires_grad", False))


def _within(module: str) -> bool:
    """Tell whether a function of `module` has called, somewhere above."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _hooked(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.register_hook`` or the like; for a weight without a gradient of its own it raises."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        handle = handle_of(weight)
        if handle.is_part:
            raise InvalidTypeError(
                f"{handle} is part of one parameter, whose hooks get the gradient of all features at once; register the hook "
                "on the weight of the MultiEmbedding"
            )
        with as_tensor():
            return func(weight, *args, **kwargs)

    return call


def _refused(remedy: str) -> Callable[..., Any]:
    def refuse(weight: Any, *args: Any, **kwargs: Any) -> Any:
        raise InvalidTypeError(f"{handle_of(weight)} is the weight of a table, which {remedy}")

    return refuse


# --- lookups ----------------------------------------------------------------------------------------------------------------


# What `_own_view` has returned last, where it has to be kept.
_last_view: list[Tensor] = []


def _own_view(weight: Any, other: Any) -> Any:
    """Replace ``weight.view_as(weight)`` and the like, from which people take the node of the parameter in the graph."""
    if other is not weight or not isinstance(weight, TableWeight) or not torch.is_grad_enabled():
        return NotImplemented
    handle = handle_of(weight)
    if handle.is_part or not handle.requires_grad:
        return NotImplemented
    handle.views.know_node()
    made = handle.whole_in_graph()
    if forgets_inputs():
        # Who asks for the node of the parameter asks what no longer has a result.
        _last_view[:] = [made]
    return made


def has_table(weight: Any) -> bool:
    """Tell whether `weight` is that of a whole table, or its data."""
    return isinstance(weight, TableWeight | WeightData) and not handle_of(weight).is_part


def activated(
    weight: Any, input: Any, padding_idx: int | None, max_norm: float | None, norm_type: float
) -> ActiveRows | None:
    """Return the active rows of a lookup; None if `weight` is not the weight of a whole table, or a transform is running."""
    if not has_table(weight) or in_transform():
        return None
    handle = handle_of(weight)
    check_named_by_row(handle)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += handle.num_rows
    return activate(handle, input, is_trained(weight, handle), max_norm, norm_type, padding_idx)


def check_named_by_row(handle: Handle) -> None:
    """Raise for a lookup in a weight whose ids are no row numbers: an index may be meant as either."""
    if handle.id_space.come_and_go:
        raise InvalidTypeError(
            f"{handle} is indexed, but its rows are in the order in which ids came; call the module with the ids, or read "
            "emb.table.gather(emb.vocabulary.rows(ids))"
        )
    if not handle.id_space.by_row:
        raise InvalidTypeError(
            f"{handle} is indexed, but its rows are those of {handle.id_space.kind}; call the module with these, or read "
            "emb.table.gather(rows)"
        )


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Replace ``F.embedding``."""
    active = activated(weight, input, padding_idx, max_norm, norm_type)
    return NotImplemented if active is None else lookup(active, scale_grad_by_freq)


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
    active = activated(weight, input, padding_idx, max_norm, norm_type)
    if active is None:
        return NotImplemented
    return bag_lookup(active, offsets, per_sample_weights, mode, scale_grad_by_freq, include_last_offset, sparse)


# --- the functions ----------------------------------------------------------------------------------------------

_PROPERTIES = """
    shape dtype device layout ndim is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_nested
    is_mkldnn is_xla is_ipu is_hpu is_mtia is_vulkan is_maia requires_grad grad_fn output_nr itemsize nbytes retains_grad
    _backward_hooks _post_accumulate_grad_hooks _grad_fn _version name volatile grad_dtype
"""
_METHODS = """
    size dim ndimension numel nelement element_size __len__ get_device is_floating_point
    is_complex is_signed is_inference is_same_size retain_grad has_names
    _is_view untyped_storage storage _typed_storage is_shared is_pinned is_conj is_neg __hash__ is_distributed
    is_coalesced sparse_dim dense_dim _is_zerotensor new_zeros new_ones new_empty new_full new_tensor new
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_tensor is_signed is_inference is_same_size is_conj is_neg get_device zeros_like
    ones_like empty_like rand_like randn_like randint_like
"""
_LAYOUT = "stride storage_offset is_contiguous"
_HOOKS = "register_hook register_post_accumulate_grad_hook"
_MOVES = "to cpu cuda float double half bfloat16 contiguous type_as"


_property = {name: getattr(Tensor, name) for name in f"{_PROPERTIES} data grad".split() if hasattr(Tensor, name)}
rowless.update(_property[name].__get__ for name in _PROPERTIES.split() if name in _property)
rowless.update(
    _property[name].__set__
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype")
    if name in _property
)
rowless.update(getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name))
rowless.update(getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name))
rowless.add(torch._has_compatible_shallow_copy_type)
special.update({getattr(Tensor, name): _moved(getattr(Tensor, name)) for name in _MOVES.split()})
special.update({getattr(Tensor, name): _hooked(getattr(Tensor, name)) for name in _HOOKS.split()})
special.update({getattr(Tensor, name): _of_layout(getattr(Tensor, name)) for name in _LAYOUT.split()})
for _name, _first in {"as_strided": 2, "as_strided_copy": 2, "as_strided_scatter": 3}.items():
    _found = (getattr(of, _name) for of in (torch, Tensor) if hasattr(of, _name))
    special.update({func: _strided(func, _first) for func in _found})
_resize = _refused("is resized by emb.weight.data = rows, of as many rows as it is to have")
special.update(
    {
        Tensor.data_ptr: _data_ptr,
        _property["data"].__get__: _data,
        _property["data"].__set__: _set_data,
        Tensor.detach: _data,
        torch.detach: _data,
        _property["grad"].__get__: lambda weight: handle_of(weight).gradient(),
        _property["grad"].__set__: lambda weight, grad: handle_of(weight).assign_gradient(grad),
        _property["grad"].__delete__: lambda weight: handle_of(weight).assign_gradient(None),
        _property["requires_grad"].__set__: _require_grad,
        Tensor.requires_grad_: _require_grad,
        torch.full_like: _full_like,
        F.embedding: embedding,
        F.embedding_bag: _embedding_bag,
        Tensor.detach_: _detach_in_place,
        torch.detach_: _detach_in_place,
        Tensor.view_as: _own_view,
        Tensor.expand_as: _own_view,
        Tensor.share_memory_: _refused("cannot be shared by forked processes; make each its own, or train in one"),
        Tensor.set_: _set,
        Tensor.resize_: _resize,
        Tensor.resize_as_: _resize,
    }
)
