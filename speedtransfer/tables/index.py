"""Check indices before anything is read or written."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.engines import out_of_range
from speedtransfer.errors import InvalidTypeError, InvalidValueError

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_INT64_MAX = 2**63 - 1
_MARK_ROWS = 64  # up to so many rows of the table for each one named, marking those is faster than sorting them


def as_index(
    index: Any, num_rows: int, device: torch.device, check: bool = True, own: bool = False
) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return `index` as a contiguous 1-D int64 tensor, its shape, and whether its values are known to be in range.

    What is given on the host stays there and is checked; anything else goes to `device` unchecked, since the host would have
    to wait for it: the caller has it checked on the device, or along with something that it waits for anyway.

    Parameters
    ----------
    index : tensor, ndarray, int or (nested) sequence of ints
        Any integer dtype, any shape, any device.
    num_rows : int
        Rows of the table.
    device : torch.device
        The compute device.
    check : bool
        False: the caller checks whether values on the host are in range.
    own : bool
        Copy what is given on the host, so that nobody changes it once it is checked.

    Raises
    ------
    InvalidTypeError
        The values are no integers (bool counts as none).
    RowIndexError
        A value on the host is negative or not below `num_rows`.
    """
    given = index if isinstance(index, Tensor) else ints_of(index)
    tensor = given if isinstance(given, Tensor) else _tensor_of(given)
    if tensor.dtype not in INTEGERS:
        kind = "a boolean mask" if tensor.dtype == torch.bool else f"of dtype {tensor.dtype}"
        remedy = "mask.nonzero().flatten()" if tensor.dtype == torch.bool else "index.long()"
        raise InvalidTypeError(f"index is {kind} but rows are named by integers; pass {remedy}")
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        refuse_layout(tensor, "index")
    if tensor.dtype == torch.uint64:  # a value of 2**63 or more would turn negative
        tensor = torch.where(tensor.view(torch.int64) < 0, num_rows, tensor.view(torch.int64))
    on_host = tensor.device.type == "cpu"
    where = tensor.device if on_host else device
    flat = tensor.detach()
    if flat.dtype != torch.int64 or flat.device != where:
        flat = flat.to(device=where, dtype=torch.int64)
    # A view costs as much as all of the other calls here.
    flat = flat if flat.dim() == 1 and flat.is_contiguous() else flat.reshape(-1).contiguous()
    if own and on_host:
        flat = flat.clone()
    if on_host and check:
        check_bounds(flat, num_rows, given)
    return flat, tuple(tensor.shape), on_host and check


def refuse_layout(tensor: Tensor, name: str) -> NoReturn:
    """Raise `InvalidTypeError` for integers that are nested, sparse or on the meta device."""
    if tensor.is_nested:
        raise InvalidTypeError(
            f"{name} is a nested tensor but rows come back in its shape; pass {name}.values(), and put the rows together "
            f"again (torch.nested.nested_tensor_from_jagged(rows, {name}.offsets()))"
        )
    if tensor.layout != torch.strided:
        raise InvalidTypeError(
            f"{name} is a sparse tensor ({tensor.layout}) but each of its values names a row, zeros too; pass "
            f"{name}.to_dense()"
        )
    raise InvalidTypeError(
        f"{name} is on the meta device, which has no values, but each value names a row; pass {name} on the CPU or on the "
        "device of the rows"
    )


def ints_of(given: Any, name: str = "index", rule: str = "rows are named by integers; pass integers") -> np.ndarray:
    """Return the ints of a sequence as they are: Python's own, as objects, where they exceed 64 bits.

    Errors call it `name`, and end with the `rule`.
    """
    try:
        array = np.asarray(given)
        # NumPy makes float64 of [-1, 2**63], and of [].
        if array.dtype.kind == "O" or (array.dtype.kind == "f" and not (isinstance(given, np.ndarray) and array.size)):
            objects = np.asarray(given, dtype=object)
            if all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in objects.flat):
                return objects
    except ValueError:
        raise InvalidValueError(
            f"{name} is a ragged sequence but needs one shape; pad it or pass one flat list"
        ) from None
    if array.dtype.kind not in "iu":
        what = "boolean" if array.dtype.kind == "b" else str(array.dtype)
        raise InvalidTypeError(f"{name} holds {what} values but {rule}")
    return array


def _tensor_of(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "O":
        array = np.clip(array, -1, _INT64_MAX)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 4:
        array = np.minimum(array, np.uint64(_INT64_MAX))
    array = np.asarray(array, dtype=np.int64, order="C")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_bounds(flat: Tensor, num_rows: int, given: Any) -> None:
    """Raise `RowIndexError` for the first value of `flat` outside ``[0, num_rows)``, as it stands in `given`."""
    if flat.numel() == 0:
        return
    # NumPy's calls have no threads to wake: for an index they are faster than torch's, and steadier on a busy machine.
    array = flat.numpy() if flat.device.type == "cpu" else flat
    if int(array.min()) >= 0 and int(array.max()) < num_rows:
        return
    first = int(((flat < 0) | (flat >= num_rows)).nonzero()[0])
    given = given if isinstance(given, Tensor) else np.asarray(given)
    where = ", ".join(str(int(i)) for i in np.unravel_index(first, tuple(given.shape))) if given.ndim else ""
    values = given.detach().cpu().numpy() if isinstance(given, Tensor) else given  # torch cannot read a large uint64
    value = int(values.reshape(-1)[first])
    raise out_of_range(f"index[{where}]" if where else "index", value, num_rows)


def check_distinct(flat: Tensor, num_rows: int, given: Any, checked: bool) -> None:
    """Raise if `flat`, (n,) int64, repeats a row: the result would be undefined.

    `given` is the index as the caller has it, for the message. Values not yet `checked` are checked to be in range as well.
    """
    if flat.device.type == "cpu":
        # In NumPy: after a call of torch its threads spin for a while, on the cores that are to move the rows.
        array = flat.numpy()
        if bool((array[1:] > array[:-1]).all()):
            return  # the index of a training step comes sorted
        if num_rows <= _MARK_ROWS * len(array):
            named = np.zeros(num_rows, dtype=bool)
            named[array] = True
            if np.count_nonzero(named) == len(array):
                return
        in_order = np.sort(array)
        repeats = in_order[1:][in_order[1:] == in_order[:-1]]
        if not len(repeats):
            return
        row = int(repeats[0])
    else:
        if not len(flat):
            return
        check_not_capturing("looking for rows that an index names twice", "pass check=False if there are none")
        ordered = flat.sort().values
        repeated = ordered[1:] == ordered[:-1]
        first = ordered[1:].masked_fill(~repeated, num_rows).amin() if len(flat) > 1 else ordered.new_tensor(num_rows)
        low, high, row = torch.stack([ordered[0], ordered[-1], first]).tolist()  # waits for the device, once
        if not checked and (low < 0 or high >= num_rows):
            check_bounds(flat, num_rows, given)
        if row == num_rows:
            return
    at = (flat == row).nonzero().flatten()[:2].tolist()
    raise InvalidValueError(
        f"index names row {row} twice (positions {at[0]} and {at[1]}) but scatter writes each row once; "
        "combine the rows first, for instance with torch.unique(index, return_inverse=True) and index_add_"
    )
