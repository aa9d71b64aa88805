"""The placeholder in `optimizer.state` for a plane of which no view shows the values; they are read when saved or copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import OptimizerError
from speedtransfer.rows import Rows


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
        raise AttributeError(
            f"optimizer.state has a placeholder for state {self._name!r}, which has no {attribute!r}; "
            "optimizer.state_dict() has the values"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        values = self.decode()
        return values if self._dtype is None else values.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A tensor, so that the pickle can be loaded without this package.
        return self.decode().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)})"
