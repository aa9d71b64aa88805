"""The placeholder in `optimizer.state` for an encoded plane; decoded when saved or copied."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import OptimizerError
from speedtransfer.rows import Rows


class EncodedPlane:
    """Placeholder in ``optimizer.state`` for an encoded plane. State dicts, copies and pickles get its values."""

    def __init__(self, rows: Rows, name: str) -> None:
        self._rows, self._name = weakref.ref(rows), name  # the table must not live as long as an old optimizer
        self.shape = torch.Size(rows.shape_of(name))

    def decode(self) -> Tensor:
        """Return the values, ``(num_rows, *tail)`` float32: a copy."""
        rows = self._rows()
        if rows is None:
            raise OptimizerError("the table of this state is gone, and the state with it; take state_dict() before")
        return rows.whole(self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decode()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)  # names nothing of this package

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)})"
