"""Make rows, or a parameter, that are assigned to the weight of a table those of the table."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from speedtransfer.encoding import dtype_of
from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.leaves import cloned
from speedtransfer.rows import Rows
from speedtransfer.tables import Table


def assign_rows(handle: Any, values: Tensor, handles: Iterable[Any]) -> None:
    """Set all rows of a weight to `values`, ``(any, dim)``. Another number of rows makes a new table, without state.

    The device of the rows becomes that of `values`, as in torch, and without `storage_dtype` their dtype too. Several
    processes each keep their own rows of `values`, ``(num_rows, dim)``. `handles` are all that there are.
    """
    handle.id_space.check_written("assigned")
    if not handle.owners.has_whole:
        handle.views.detach_aliases()
        handle.owners.store(values)
        return
    table, rows = handle.table, handle.rows
    table.check_writable()
    if values.dim() != 2 or values.shape[1] != table.dim:
        remedy = f"pass rows of {table.dim} values, or make a new module of that width (from_pretrained)"
        if not values.numel():
            remedy = (
                "what empties parameters between their uses (ZeRO-3 of DeepSpeed) must leave tables out, which are "
                "st.table_parameters(model)"
            )
        raise InvalidValueError(
            f"{handle} is {(table.num_rows, table.dim)} but the values assigned are {tuple(values.shape)}; {remedy}"
        )
    if handle.features is not None and len(values) != table.num_rows:
        raise InvalidValueError(
            f"{handle} has {table.num_rows} rows, those of {len(handle.features.names)} features, but the values assigned are "
            f"{tuple(values.shape)}; make a new MultiEmbedding for another number of rows"
        )
    resized, retyped = len(values) != table.num_rows, rows.storage_dtype is None and values.dtype != rows.dtype
    if table.path is not None and (resized or retyped):
        raise InvalidValueError(
            f"{handle} is the file {str(table.path)!r} of {table.num_rows} rows of {rows.dtype}, which cannot become "
            f"{tuple(values.shape)} of {values.dtype}; make a new module with another path"
        )
    values = values.detach()
    check_of_no_other(values, handle, [other for other in handles if other is not handle])
    if values.device != table.device:
        handle.move(values.device)
    if not resized and not retyped and _can_take(handle, values):
        handle.rows.catch_up()
        # As in torch: `values` becomes the memory of the weight, and other tensors over the memory so far keep it.
        table.take("weight", values)
        handle.views.show_memory()
        handle.reset_param()
        return
    handle.views.detach_aliases()
    if resized or retyped:
        dtype = dtype_of(rows.storage_dtype or values.dtype)
        options: Any = {"layout": table.layout, "max_rows": table.max_rows, "path": table.folder}
        made = Table(len(values), table.dim, dtype, table.memory, device=table.device, **options)
        made._start_cache(table._options_of_cache(len(values)))
        reason = f"the table got {len(values)} rows" if resized else f"the table became {values.dtype}"
        handle.replace(Rows(made, rows.storage_dtype, rows.state_dtype, rows.scale_block), reason)
    handle.store(values)


def check_of_no_other(values: Tensor, handle: Any, others: Iterable[Any]) -> None:
    """Raise if `values`, which `handle` is assigned, are the memory of the rows of another handle."""
    for other in others:
        if other.param_ref() is None:
            continue  # rows that a weight had before
        own = other.table.cache_rows is not None or other.table.max_rows is not None or other.table.in_records
        if (other.aliased or own) and _shares(values, other.table.stored("weight")):
            raise InvalidValueError(
                f"{handle} is assigned the memory of {other}, and one memory cannot be that of two weights; write its values "
                "(weight.data.copy_(other)), or share the weight itself (module.weight = other.weight)"
            )


def take_param(handle: Any, param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Make an ordinary parameter, with its values, the weight.

    If the table takes over its memory, the weight so far becomes an ordinary parameter, with its gradient and the state that
    an optimizer has of it; else it can no longer be used.
    """
    handle.id_space.check_written("replaced by another parameter")
    # It would be that of one process.
    handle.owners.check_whole("is given another weight", "set its rows by load_state_dict(), or weight.data = all rows")
    handle.table.check_writable()
    values, grad = param.detach(), handle.pending.gradient()
    alike = len(values) == handle.table.num_rows and values.dtype == handle.rows.dtype
    release = alike and _can_take(handle, values)
    optimizer, state = _state_of(handle) if release else (None, {})
    handle.drop_state("another weight was assigned to the module")
    handle.pending.clear()
    handle.views.leave(release)
    old = handle.param_ref() if release else None
    if old is not None:
        # `set_whole` must not make it show the new memory.
        handle.param_ref = lambda: None
    try:
        handle.set_whole(values)
    finally:
        if old is not None:
            handle.param_ref = weakref.ref(old)
    handle.bind(param, kind, release)
    if old is not None:
        # It may still be held, and trained, elsewhere.
        old.grad = grad
        if optimizer is not None and state:
            optimizer.state[old] = state


def _state_of(handle: Any) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer that trains the rows, if any, and a copy of its state of all of them."""
    optimizer = None if handle.state is None else handle.state.optimizer()
    if optimizer is None:
        return None, {}
    handle.rows.catch_up()
    return optimizer, cloned(optimizer.state.get(handle.param) or {})


def _can_take(handle: Any, values: Tensor) -> bool:
    """Tell whether `values` can become the memory of the table."""
    ordinary = values.is_contiguous() and not values.is_inference() and type(values) is Tensor
    own = handle.table.memory == "pageable" and values.device.type == "cpu"
    own = own or (handle.table.memory == "device" and values.device == handle.table.device)
    return handle.aliased and ordinary and own


def _shares(values: Tensor, plane: Tensor) -> bool:
    """Tell whether the memory of two dense tensors overlaps; tensors of one storage need not."""
    if values.device != plane.device or values.stride(1) != 1 or values.stride(0) < values.shape[1] or values.is_meta:
        return False
    one, other = ((it.data_ptr(), it.data_ptr() + len(it) * it.stride(0) * it.element_size()) for it in (values, plane))
    return one[0] < other[1] and other[0] < one[1]
