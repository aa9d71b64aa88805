"""What `optimizer.state` has for a plane between steps: a tensor that reads and writes as the whole of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.copied_rows import Copied, writing_back
from speedtransfer.rows import Rows

# Properties and methods that say nothing of the values.
_ABOUT: set[Any] = {Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size}
_ABOUT |= {Tensor.__len__, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex}
_ABOUT |= {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "layout", "ndim")}
# Those that say nothing of the shape either.
_OF_ITSELF = {
    getattr(Tensor, name).__get__
    for name in ("device", "is_cuda", "is_sparse", "_version", "requires_grad", "is_leaf", "grad", "grad_fn")
}
# Those that copy all memory of a tensor.
_OF_ALL_MEMORY = {Tensor.__reduce_ex__, Tensor.__deepcopy__}
# Those that would give a part of the table other memory.
_OF_MEMORY = {Tensor.set_, Tensor.resize_, Tensor.resize_as_}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class PlaneView(Tensor):
    """A whole plane in ``optimizer.state``: what is done with it finds every row with all steps so far.

    Where its memory would not show that (it is encoded, a cache has some of its rows, or it grows) functions get a copy, which
    is written back if they change it. State dicts, copies and pickles get a plain tensor.

    Parameters
    ----------
    rows : Rows
    name : str
        Of the plane.
    dtype : torch.dtype, optional
        Of the state, if it is another than that of the plane.
    """

    @staticmethod
    def __new__(cls, rows: Rows, name: str, dtype: torch.dtype | None = None) -> PlaneView:  # noqa: D102
        if _is_shown_by_memory(rows, name):
            stored = rows.table.stored(name).view(rows.shape_of(name))
            return Tensor._make_subclass(cls, stored if dtype is None else stored.view(dtype))
        stored = rows.table.stored(name)
        found = dtype or (stored.dtype if rows.is_viewable(name) else torch.float32)
        stand_in = torch.zeros((), dtype=found, device="cpu" if stored.is_meta else stored.device)
        return Tensor._make_subclass(cls, stand_in.expand(rows.shape_of(name)))

    def __init__(self, rows: Rows, name: str, dtype: torch.dtype | None = None) -> None:
        # Weak: an optimizer that is no longer used must not keep the table.
        self._of: tuple[Callable[[], Rows | None], str, torch.dtype | None] = weakref.ref(rows), name, dtype
        self.has_memory = _is_shown_by_memory(rows, name)
        self._copies: weakref.WeakSet[Copied] = weakref.WeakSet()

    def drop(self) -> None:
        """Show the memory of now from now on, or nothing: the plane is removed, and another may get its name."""
        for copy in self._copies:
            copy.detach_from_table(copy.values)
        self._of = (lambda: None), *self._of[1:]

    def decode(self) -> Tensor:
        """Return the values, ``(num_rows, *tail)``, maybe in the memory of the table as of now."""
        rows, name, dtype = self._of[0](), *self._of[1:]
        if rows is not None:
            values = rows.whole(name)
            return values if dtype is None else values.view(dtype)
        if not self.has_memory:
            raise OptimizerError(
                f"the table of this state is gone, or another optimizer has it, and state {name!r} with it; take state_dict() "
                "before"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def _for_a_call(self, of_all_memory: bool) -> Tensor:
        """Return what a function is called with: the values, or a copy of them that is written back."""
        rows, values = self._of[0](), self.decode()
        if of_all_memory:
            # That of a part of records is all of them.
            return values.contiguous()
        if self.has_memory or rows is None:
            return values
        if rows.is_viewable(self._of[1]):
            values = values.clone()
        found: Tensor = writing_back(values, [Copied(_PlaneRows(self, rows), values)])
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT or func in _OF_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args if func in _OF_ITSELF else tree_map_only(PlaneView, _shaped, args), **kwargs or {})
        if func in _OF_MEMORY:
            raise OptimizerError(
                f"{func.__name__} gives a tensor other memory, but this state is a part of a table; write into it with copy_"
            )
        if func == _SET_DATA and isinstance(args[0], cls):
            if args[1].shape != args[0].shape:
                raise OptimizerError(
                    f"data has shape {tuple(args[1].shape)} but the state is {tuple(args[0].shape)}; pass values of that shape"
                )
            func = Tensor.copy_
        found, versions = dict[int, PlaneView](), list[tuple[Rows, Tensor, int]]()

        def decoded(view: PlaneView) -> Tensor:
            rows = view._of[0]()
            # Copies are made by all of them.
            if rows is not None and rows.own is not None and func is not Tensor.__deepcopy__:
                raise OptimizerError(
                    f"state {view._of[1]!r} is in memory that processes share, so that none may read or write it alone; "
                    "st.save_checkpoint saves it"
                )
            values = view._for_a_call(func in _OF_ALL_MEMORY)
            found[id(values)] = view
            if view.has_memory and rows is not None and not rows.table.writable:
                versions.append((rows, values, values._version))
            return values

        args, kwargs = tree_map_only(PlaneView, decoded, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for rows, values, before in versions:
            if values._version != before:
                # In a child of fork, where it may have been a copy.
                rows.table.check_writable()
        # What has changed in place, or is on the device already, stays what the optimizer has.
        return found.get(id(result), result)


def _is_shown_by_memory(rows: Rows, name: str) -> bool:
    """Tell whether the memory of a plane shows it, as long as no row has missed a step."""
    # It has neither what a cache has nor rows that come later.
    return rows.is_viewable(name) and rows.table.cache_rows is None and rows.table.max_rows is None


def _shaped(view: PlaneView) -> Tensor:
    """Return a tensor of the shape that a plane has by now."""
    rows = view._of[0]()
    if view.has_memory or rows is None:
        return view
    return torch.empty(rows.shape_of(view._of[1]), dtype=view.dtype, device="meta")


class _PlaneRows:
    """What `copied_rows.Copied` needs to read a copy of a plane again and to write it back."""

    def __init__(self, view: PlaneView, rows: Rows) -> None:
        self.view, self.rows, self.table = view, rows, rows.table

    def __str__(self) -> str:
        return f"state {self.view._of[1]!r} of a table"

    def whole(self) -> Tensor:
        """Return the values of now, maybe in the memory of the table."""
        return self.view.decode()

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, rounded to nearest."""
        _, name, dtype = self.view._of
        self.rows.load(name, values if dtype is None else values.view(self.rows.table.stored(name).dtype))

    def track_alias(self, copy: Copied) -> None:
        """Remember a copy, which stays as it is once the plane is removed."""
        self.view._copies.add(copy)
