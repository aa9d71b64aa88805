"""What stands in an optimizer's state for a plane that has no view of its values."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedtransfer.errors import OptimizerError

if TYPE_CHECKING:
    from speedtransfer.rows import RowStore


class EncodedPlane:
    """Stands in ``optimizer.state`` for a plane that is stored in 8 bits. State dicts, copies and pickles get its values."""

    def __init__(self, store: RowStore, name: str, shape: tuple[int, ...]) -> None:
        self._store, self._name = weakref.ref(store), name  # the table must not live as long as an old optimizer
        self.shape = torch.Size(shape)

    def decode(self) -> Tensor:
        """Return the values, ``(num_rows, *tail)`` float32: a copy."""
        store = self._store()
        if store is None:
            raise OptimizerError("the table of this state is gone, and the state with it; take state_dict() before")
        return store.whole(self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decode()

    def __reduce__(self) -> Any:
        return _same, (self.decode(),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)})"


def _same(values: Tensor) -> Tensor:
    return values
