"""What `optimizer.state` has for a plane between steps: a view of the whole of it, or a placeholder where there is none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from speedtransfer.errors import OptimizerError
from speedtransfer.rows import Rows

# Properties and methods that say nothing of the values.
_ABOUT: set[Any] = {Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size}
_ABOUT |= {Tensor.__len__, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex}
_ABOUT |= {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "_version")
}
# Those that copy all memory of a tensor.
_OF_ALL_MEMORY = {Tensor.__reduce_ex__, Tensor.__deepcopy__}
# Those that would give a part of the table other memory.
_OF_MEMORY = {Tensor.set_, Tensor.resize_, Tensor.resize_as_}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class PlaneView(Tensor):
    """A view of a whole plane in ``optimizer.state``: what is done with it finds every row with all steps so far.

    State dicts, copies and pickles get a plain tensor.

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
        stored = rows.table.stored(name).view(rows.shape_of(name))
        return Tensor._make_subclass(cls, stored if dtype is None else stored.view(dtype))

    def __init__(self, rows: Rows, name: str, dtype: torch.dtype | None = None) -> None:
        self._of: tuple[Callable[[], Rows | None], str, torch.dtype | None] = weakref.ref(rows), name, dtype

    def drop(self) -> None:
        """Show the memory of now from now on: the plane is removed, and another may get its name."""
        self._of = (lambda: None), "", None

    def decode(self) -> Tensor:
        """Return the values, ``(num_rows, *tail)``, in the memory of the table."""
        rows, name, dtype = self._of[0](), *self._of[1:]
        if rows is None:
            with torch._C.DisableTorchFunctionSubclass():
                return self.as_subclass(Tensor)
        values = rows.whole(name)
        return values if dtype is None else values.view(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
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
            values = view.decode()
            if func in _OF_ALL_MEMORY:
                # That of a part of records is all of them.
                values = values.contiguous()
            found[id(values)] = view
            if rows is not None and not rows.table.writable:
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


class PlaceholderError(OptimizerError, AttributeError):
    """State of which there is no view was used as a tensor."""


class EncodedPlane:
    """Hold the place of a plane in ``optimizer.state`` that is encoded, that grows, or of which a cache has rows.

    State dicts, copies and pickles get its values.

    Parameters
    ----------
    rows : Rows
    name : str
        Of the plane.
    dtype : torch.dtype, optional
        Of the state, where the plane is stored without a codec.
    """

    def __init__(self, rows: Rows, name: str, dtype: torch.dtype | None = None) -> None:
        # Weak: an optimizer that is no longer used must not keep the table.
        self._rows: Callable[[], Rows | None] = weakref.ref(rows)
        self._name, self._dtype = name, dtype
        self._num_rows, *self._tail = rows.shape_of(name)

    def drop(self) -> None:
        """Show nothing from now on: the plane is removed, and another may get its name."""
        self._rows = lambda: None

    def renewed(self) -> EncodedPlane:
        """Show nothing from now on, and return a placeholder that shows the plane."""
        rows = self._rows()
        assert rows is not None
        self.drop()
        return EncodedPlane(rows, self._name, self._dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the values, ``(num_rows, *tail)``."""
        rows = self._rows()
        if rows is not None:
            self._num_rows = rows.table.num_rows
        return torch.Size((self._num_rows, *self._tail))

    def decode(self) -> Tensor:
        """Return the values, ``(num_rows, *tail)``, contiguous: float32 of an encoded plane, else maybe a view as of now."""
        rows = self._rows()
        if rows is None:
            raise OptimizerError(
                f"the table of this state is gone, or another optimizer has it, and state {self._name!r} with it; take "
                "state_dict() before"
            )
        values = rows.whole(self._name)
        return (values if self._dtype is None else values.view(self._dtype)).contiguous()

    def __getattr__(self, attribute: str) -> Any:
        # What code that expects a tensor meets.
        raise PlaceholderError(
            f"optimizer.state has a placeholder for state {self._name!r}, which has no {attribute!r}; "
            "optimizer.state_dict() has the values"
        )

    def __setattr__(self, attribute: str, value: Any) -> None:
        if not attribute.startswith("_"):
            self.__getattr__(attribute)
        super().__setattr__(attribute, value)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PlaceholderError(
            f"optimizer.state has a placeholder where {func.__name__} needs a tensor; optimizer.state_dict() has the values"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        values = self.decode()
        return values if self._dtype is None else values.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A tensor, so that the pickle can be loaded without this package.
        return self.decode().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)})"


def _refuse(operator: str) -> None:
    setattr(EncodedPlane, operator, lambda self, *operands: self.__getattr__(operator))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _way in ("", "r", "i"):
        _refuse(f"__{_way}{_name}__")
for _name in ("__getitem__", "__setitem__", "__iter__", "__neg__", "__lt__", "__gt__"):
    _refuse(_name)
