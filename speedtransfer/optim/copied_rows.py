"""Copies of rows of a table that no tensor can alias: views of one read the rows of now, and write theirs back.

Also rows that are only read, to which nothing is written, and those that were taken with gradients: `weight[3]` is then a view
of active rows, a copy even where the table could be aliased, since all rows would get a gradient through that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from speedtransfer.eager import uncompiled
from speedtransfer.optim.graph import as_tensor
from speedtransfer.ranks.collectives import receives, refuse_irecv, wait_for
from speedtransfer.tables import Table

# By a transform of torch.func.
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


class Copied:
    """A copy of rows of a table that no tensor can alias, `values`; or the rows themselves, where they are only read.

    `rows`, a handle or some of its rows, reads them again and stores them; None: `values` are the rows. Where they are
    `shared` out among processes it raises, and only a change that is known has them read.
    """

    def __init__(self, rows: Any, values: Tensor, shared: bool = False) -> None:
        self.rows, self.values, self.shared = rows, values, shared
        self.shown = None if rows is None else _state_of(rows.table)

    def refresh(self) -> None:
        """Show the rows of now, if the table has changed."""
        if self.rows is None or not self.rows.table.writable:
            return
        shown = _state_of(self.rows.table)
        if shown != self.shown or (shown is None and not self.shared):
            with torch.no_grad():
                rows = self.rows.whole()[: len(self.values)]
                # A graph may have saved them.
                if not torch.equal(rows, self.values):
                    self.values.copy_(rows)
            self.shown = shown

    def write_back(self) -> None:
        """Write the copy to the table."""
        if self.rows is not None:
            self.rows.store(self.values)
            self.shown = _state_of(self.rows.table)

    def detach_from_table(self, kept: Tensor) -> None:
        """Stay as it is: the table gets other rows, and had `kept`."""
        self.refresh()
        self.rows = None


def _state_of(table: Table) -> tuple[int, int] | None:
    """Return what changes when rows of a table may have; None: at any time, unseen."""
    sign = table.sign_of_views()
    return None if sign is None else (table.version, sign)


class CopiedRows(Tensor):
    """A view of a copy of rows of a table: shows them as they are now, and what is written to it is written back."""

    source: Copied
    # The same as an ordinary tensor, which is the one that graphs have and hooks are registered on.
    plain: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@uncompiled
def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with the copies of rows among its arguments as ordinary tensors, and write back what it changes."""
    copies: list[tuple[CopiedRows, int, Tensor]] = []

    def plain(tensor: CopiedRows) -> Tensor:
        with as_tensor():
            tensor.source.refresh()
            copies.append((tensor, tensor._version, tensor.plain))
            return tensor.plain

    args, kwargs = tree_map_only(CopiedRows, plain, (args, kwargs))
    for tensor, _, values in copies:
        rows = tensor.source.rows
        if rows is None or not writes_to(values, func, args, kwargs):
            continue
        refuse_irecv(func, rows)
        # Functions of torch.nn.init, written in Python, leave gradients out.
        if torch.is_grad_enabled() and values.requires_grad and not isinstance(func, FunctionType):
            raise RuntimeError(
                f"{func.__name__}() changes rows of {rows} in place, a view of a leaf that requires a gradient; do it with "
                "torch.no_grad(), or change a copy (.clone())"
            )
        if not rows.table.writable:
            rows.table.check_writable()
    result = func(*args, **kwargs)
    with as_tensor():
        for tensor, version, values in copies:
            if tensor._version != version or writes_to(values, func, args, kwargs):
                wait_for(func, result)
                tensor.source.write_back()
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    given, sources = {id(plain): tensor for tensor, _, plain in copies}, [tensor.source for tensor, _, _ in copies]

    def returned(view: Tensor) -> Tensor:
        return given[id(view)] if id(view) in given else writing_back(view, sources)

    return tree_map_only(Tensor, returned, result)


def writing_back(tensor: Any, sources: list[Copied]) -> Any:
    """Return `tensor`, as `CopiedRows` if it is a view of the copy of a table, or of rows that are only read."""
    if type(tensor) is Tensor and tensor.layout == torch.strided and not _is_wrapped(tensor):
        for source in sources:
            if _is_alias_of(tensor, source.values):
                view = tensor.as_subclass(CopiedRows)
                view.source, view.plain = source, tensor
                if source.rows is not None:
                    source.rows.track_alias(source)
                return view
    return tensor


def with_copy(func: Any, weight: Any, rows: Any, values: Tensor, args: tuple[Any, ...]) -> Any:
    """Call ``func(values, *args)`` with a copy of some rows, `values` (n, dim), in place of `weight`; `rows` stores them."""
    version = values._version
    result = func(values, *args)
    if values._version != version:
        rows.store(values)
    return weight if result is values else writing_back(result, [Copied(rows, values)])


def writes_to(values: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether `func` writes to `values`, by its name: as a method in place, an operator in place, or with ``out``."""
    given: list[Any] = []
    if isinstance(func, torch._ops.OpOverload):
        named = dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)) | kwargs
        given = [
            named.get(arg.name)
            for arg in func._schema.arguments
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
    else:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name in _IN_PLACE or receives(func):
            # The functions of torch.nn.init name their tensor; `torch._foreach_mul_` has a list of them.
            given = [args[0]] if args else list(kwargs.values())
        elif kwargs.get("inplace"):
            given = list(args[:1])
        given += [kwargs.get("out"), kwargs.get("gather_list")]
    found: list[bool] = []
    tree_map_only(Tensor, lambda tensor: found.append(tensor is values), given)
    return any(found)


# Operators, besides methods that end in an underscore.
_NAMES_IN_PLACE = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _NAMES_IN_PLACE.split())}
