"""Functions of torch that name rows of a weight, by a number, a slice or a tensor: they read, catch up and write no others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.nn.active import activate
from speedtransfer.nn.tracing import in_transform
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, is_trained, special, with_whole
from speedtransfer.nn.weight_calls import check_named_by_row, embedding, has_table
from speedtransfer.optim import Handle, UsedFeatures
from speedtransfer.optim.copied_rows import Copied, with_copy, writing_back
from speedtransfer.tables import Table, UniqueRows

# With more than one in so many of all rows a use is one of all of them, as a view.
_FEW = 4


class _Named(NamedTuple):
    """Rows that an index names, ``(n,)`` int64, sorted and unique, and the index that names them among those."""

    ids: Tensor
    within: Any


class _SomeRows:
    """Some rows of a table that no tensor can alias: what `copied_rows.Copied` needs to write a copy of them back."""

    aliased = False

    def __init__(self, handle: Handle, ids: Tensor) -> None:
        self.handle, self.ids = handle, ids

    def __str__(self) -> str:
        return str(self.handle)

    @property
    def table(self) -> Table:
        return self.handle.table

    def whole(self) -> Tensor:
        """Return the rows, ``(n, dim)``, with all steps so far."""
        self._check_whole("is used by rows that were taken before a step")
        with torch.inference_mode(False), torch.no_grad():
            return self.handle.rows.read(self.ids)["weight"]

    def track_alias(self, alias: Any) -> Any:
        """Remember a copy of the rows, as `Views.track_alias`."""
        return self.handle.track_alias(alias)

    def store(self, values: Tensor) -> None:
        """Set the rows to `values`, ``(n, dim)``, and keep the state of the optimizer."""
        self._check_whole("is written to by rows that were taken")
        self.handle.rows.catch_up(self.ids)
        self.handle.table.wait()
        self.handle.rows.put("weight", self.ids, values.detach())

    def _check_whole(self, what: str) -> None:
        self.handle.owners.check_whole(what, "take them anew (emb.weight[3]), and set rows by emb.table.scatter")


def _parts(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the part of an index that is of the rows, and the others."""
    return (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())


def _named(weight: Any, index: Any) -> _Named | None:
    """Return the rows that `index`, of the first dimension, names; None: torch has to say, or a view of all is as good."""
    handle = handle_of(weight)
    num_rows = handle.num_rows
    # No row has missed steps.
    if handle.aliased and not handle.rows.lag and not is_trained(weight, handle):
        return None
    if isinstance(index, slice):
        rows, within = range(*index.indices(num_rows)), slice(None)
        # With an explicit device: the default of torch may be another.
        ids = torch.arange(rows.start, rows.stop, rows.step, device="cpu") if rows else None
    else:
        ids, within = _listed(index, num_rows)
    if ids is None or not len(ids) or len(ids) > max(1, num_rows // _FEW):
        return None
    return _Named(ids, within)


def _listed(index: Any, num_rows: int) -> tuple[Tensor | None, Any]:
    if isinstance(index, list | np.ndarray):
        try:
            index = torch.as_tensor(index, device="cpu")
        except (TypeError, ValueError):
            # Slices in a list, for one.
            return None, None
    if isinstance(index, Tensor) and index.dim():
        if index.dtype == torch.bool and index.shape == (num_rows,):
            ids = index.nonzero().flatten()
            return ids, torch.arange(len(ids), device=ids.device)
        if index.dtype not in (torch.int64, torch.int32):
            return None, None
        ids, within = torch.unique(index.long(), return_inverse=True)
        if len(ids) and (ids[0] < 0 or ids[-1] >= num_rows):
            if ids[0] < -num_rows or ids[-1] >= num_rows:
                return None, None
            return _listed(torch.where(index < 0, index + num_rows, index), num_rows)
        return ids, within
    is_bool = isinstance(index, bool | np.bool_) or (isinstance(index, Tensor) and index.dtype == torch.bool)
    try:
        number = num_rows if is_bool else operator.index(index)
    except TypeError:
        return None, None
    in_range = -num_rows <= number < num_rows
    return torch.tensor([number % num_rows], device="cpu") if in_range else None, 0


def _without_gradients(
    func: Callable[..., Any], weight: Any, named: _Named | None, args: tuple[Any, ...], within: tuple[Any, ...]
) -> Any:
    """Call ``func(weight, *args)``, which uses the rows `named`, or ``func(rows, *within)`` with a copy of these."""
    others = any(isinstance(arg, TableWeight | WeightData) for arg in args)
    if named is None or others:
        return NotImplemented
    handle, ids = handle_of(weight), named.ids
    # Of rows that are only read a copy, to which nothing is written back.
    if handle.aliased and handle.table.writable:
        version = handle.table.version
        try:
            return with_whole(func, (weight, *args), {}, ids)
        finally:
            handle.note_use(ids, version)
    handle, ids = handle.of, ids + handle.start
    if not handle.is_whole:
        return NotImplemented
    handle.step.recover()
    if isinstance(weight, WeightData):
        # As where it is a tensor over the table: the same bits.
        handle.rows.catch_up()
    rows = _SomeRows(handle, ids.to(handle.table.device))
    return with_copy(func, weight, rows, rows.whole(), within)


def _are_numbers(index: Any) -> bool:
    """Tell whether an index is the number of a row, or those of several."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.int64, torch.int32)
    if isinstance(index, list):
        return bool(index) and all(type(i) is int for i in index)
    return type(index) is int or (isinstance(index, np.ndarray | np.integer) and index.dtype.kind in "iu")


def _rows_at(weight: Any, index: Any) -> Any:
    """Replace ``weight[index]``."""
    if not isinstance(weight, TableWeight | WeightData) or in_transform():
        return NotImplemented
    first, rest = _parts(index)
    handle = handle_of(weight)
    numbers = _are_numbers(first)
    if numbers:
        check_named_by_row(handle.of)
    rows = numbers and (isinstance(first, list) or (isinstance(first, Tensor) and first.dim() > 0))
    # With others, indices are broadcast with one another.
    if rows and has_table(weight) and all(isinstance(part, slice) for part in rest):
        ids = first if isinstance(first, Tensor) else torch.as_tensor(first, device="cpu")
        if ids.is_cuda or bool((ids < 0).any()):
            ids = torch.where(ids < 0, ids + handle.num_rows, ids)
        found = embedding(ids, weight)
        return found[(slice(None),) * ids.dim() + tuple(rest)] if rest else found
    named = _named(weight, first)
    if not is_trained(weight, handle):
        within = () if named is None else ((named.within, *rest),)
        return _without_gradients(Tensor.__getitem__, weight, named, (index,), within)
    if named is None or handle.of.id_space.come_and_go:
        return NotImplemented
    check_named_by_row(handle.of)
    groups = UniqueRows(named.ids + handle.start, torch.arange(len(named.ids), device=named.ids.device))
    features = UsedFeatures(1 << handle.number) if handle.is_part else None
    # Those that may be padded can be changed in place, without gradients: what is written is written back.
    active = activate(handle.of, groups, True, padded=True, features=features)
    copied = Copied(_SomeRows(handle.of, active.ids), active.rows.detach(), not handle.of.owners.has_whole)
    return writing_back(active.rows[(named.within, *rest)], [copied])


def _select(weight: Any, dim: Any, index: Any) -> Any:
    number = isinstance(index, int | Tensor) and not isinstance(index, bool)
    return _rows_at(weight, index) if dim in (0, -2) and number else NotImplemented


def _narrow(weight: Any, dim: Any, start: Any, length: Any) -> Any:
    start = int(start)
    within = dim in (0, -2) and 0 <= start <= start + length <= len(weight)
    return _rows_at(weight, slice(start, start + length)) if within else NotImplemented


def _index_select(weight: Any, dim: Any, index: Tensor) -> Any:
    if has_table(weight) and dim in (0, -2) and index.dim() == 1:
        return embedding(index, weight)
    return NotImplemented


def _written(weight: Any, index: Any) -> _Named | None:
    """Return the rows that a function in place writes; None: torch has to say."""
    if not isinstance(weight, TableWeight | WeightData) or in_transform() or is_trained(weight, handle_of(weight)):
        return None
    handle_of(weight).table.check_writable()
    return _named(weight, index)


def _set_rows(weight: Any, index: Any, value: Any) -> Any:
    first, rest = _parts(index)
    named = _written(weight, first)
    within = () if named is None else ((named.within, *rest), value)
    return _without_gradients(Tensor.__setitem__, weight, named, (index, value), within)


def _of_dim(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.index_fill_`` or the like, which takes a dimension and an index of it."""

    def call(weight: Any, dim: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        if dim not in (0, -2) or kwargs:
            return NotImplemented
        named = _written(weight, index)
        within = () if named is None else (dim, torch.as_tensor(named.within, device=named.ids.device), *args)
        return _without_gradients(func, weight, named, (dim, index, *args), within)

    return call


special.update(
    {
        Tensor.__getitem__: _rows_at,
        Tensor.__setitem__: _set_rows,
        Tensor.select: _select,
        torch.select: _select,
        Tensor.narrow: _narrow,
        torch.narrow: _narrow,
        Tensor.index_select: _index_select,
        torch.index_select: _index_select,
    }
)
special.update({func: _of_dim(func) for func in (Tensor.index_fill_, Tensor.index_copy_, Tensor.index_add_)})
