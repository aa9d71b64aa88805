"""What counts as an index, and the checks that come before anything is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

_INTEGER = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}


def as_index(index: Any, num_rows: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return `index` as a contiguous 1-D int64 tensor on `device`, every value in ``[0, num_rows)``, and its shape.

    Parameters
    ----------
    index : tensor, ndarray, int or (nested) sequence of ints
        Any integer dtype, any shape, any device.
    num_rows : int
        Rows of the table.
    device : torch.device
        Where the result goes.

    Raises
    ------
    InvalidTypeError
        The values are no integers (bool counts as none).
    RowIndexError
        A value is negative or not below `num_rows`.
    """
    tensor = index if isinstance(index, Tensor) else _from_python(index)
    if tensor.dtype not in _INTEGER:
        kind = "a boolean mask" if tensor.dtype == torch.bool else f"of dtype {tensor.dtype}"
        remedy = "mask.nonzero().flatten()" if tensor.dtype == torch.bool else "index.long()"
        raise InvalidTypeError(f"index is {kind} but rows are named by integers; pass {remedy}")
    if tensor.dtype == torch.uint64:  # a value of 2**63 or more would turn negative and hide its size
        tensor = torch.where(tensor.view(torch.int64) < 0, num_rows, tensor.view(torch.int64))
    flat = tensor.detach().to(device=device, dtype=torch.int64).reshape(-1).contiguous()
    check_bounds(flat, num_rows, tuple(tensor.shape))
    return flat, tuple(tensor.shape)


def _from_python(index: Any) -> Tensor:
    try:
        array = np.asarray(index)
    except ValueError:
        raise InvalidValueError(
            "index is a ragged sequence but needs one shape; pad it or pass one flat list"
        ) from None
    if array.size == 0 and not isinstance(index, np.ndarray):
        array = array.astype(np.int64)  # NumPy makes float64 of an empty list
    if array.dtype.kind not in "iu":
        what = "boolean" if array.dtype.kind == "b" else str(array.dtype)
        raise InvalidTypeError(f"index holds {what} values but rows are named by integers; pass integers")
    if array.dtype.kind == "u" and array.dtype.itemsize > 4:
        array = np.minimum(array, np.uint64(2**63 - 1)).astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64, copy=False))).reshape(array.shape)


def check_bounds(flat: Tensor, num_rows: int, shape: Sequence[int]) -> None:
    """Raise `RowIndexError` for the first value of `flat` (an index of `shape`) outside ``[0, num_rows)``."""
    if flat.numel() == 0:
        return
    low, high = torch.aminmax(flat)
    if int(low) >= 0 and int(high) < num_rows:
        return
    first = int(((flat < 0) | (flat >= num_rows)).nonzero()[0])
    where = ", ".join(str(int(i)) for i in np.unravel_index(first, tuple(shape))) if shape else ""
    value = int(flat[first])
    rule = (
        "negative, and rows count from 0" if value < 0 else f"but the table has {num_rows} rows (0 to {num_rows - 1})"
    )
    raise RowIndexError(f"index[{where}] is {value} {rule}; clamp or filter the index")


def check_unique(flat: Tensor) -> None:
    """Raise `InvalidValueError` if `flat` names a row twice: which of the two values should last is anybody's guess."""
    if flat.numel() < 2 or bool((flat[1:] > flat[:-1]).all()):
        return  # the index of a training step comes sorted
    # NumPy sorts int64 two to three times faster than torch on the CPU, and values alone are enough here.
    ordered = torch.from_numpy(np.sort(flat.numpy())) if flat.device.type == "cpu" else flat.sort().values
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeats.numel():
        row = int(repeats[0])
        at = (flat == row).nonzero().flatten()[:2].tolist()
        raise InvalidValueError(
            f"index names row {row} twice (positions {at[0]} and {at[1]}) but scatter writes each row once; "
            "combine the rows first, for instance with torch.unique(index, return_inverse=True) and index_add_"
        )
