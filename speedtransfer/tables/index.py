"""What counts as an index, and the checks that come before anything is read or written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.engines.bounds import out_of_range
from speedtransfer.errors import InvalidTypeError, InvalidValueError

_INTEGER = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_INT64_MAX = 2**63 - 1


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
    given = index if isinstance(index, Tensor) else _array_of(index)
    tensor = given if isinstance(given, Tensor) else _tensor_of(given)
    if tensor.dtype not in _INTEGER:
        kind = "a boolean mask" if tensor.dtype == torch.bool else f"of dtype {tensor.dtype}"
        remedy = "mask.nonzero().flatten()" if tensor.dtype == torch.bool else "index.long()"
        raise InvalidTypeError(f"index is {kind} but rows are named by integers; pass {remedy}")
    if tensor.dtype == torch.uint64:  # a value of 2**63 or more would turn negative
        tensor = torch.where(tensor.view(torch.int64) < 0, num_rows, tensor.view(torch.int64))
    flat = tensor.detach().to(device=device, dtype=torch.int64).reshape(-1).contiguous()
    check_bounds(flat, num_rows, given)
    return flat, tuple(tensor.shape)


def _array_of(index: Any) -> np.ndarray:
    """Return the ints of a sequence as they are: Python's own, as objects, where they exceed 64 bits."""
    try:
        array = np.asarray(index)
        if array.size == 0 and not isinstance(index, np.ndarray):
            return array.astype(np.int64)  # NumPy makes float64 of an empty list
        if array.dtype.kind in "fO" and not isinstance(index, np.ndarray):
            # NumPy also makes float64 of [-1, 2**63].
            objects = np.asarray(index, dtype=object)
            if all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in objects.flat):
                return objects
    except ValueError:
        raise InvalidValueError(
            "index is a ragged sequence but needs one shape; pad it or pass one flat list"
        ) from None
    if array.dtype.kind not in "iu":
        what = "boolean" if array.dtype.kind == "b" else str(array.dtype)
        raise InvalidTypeError(f"index holds {what} values but rows are named by integers; pass integers")
    return array


def _tensor_of(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "O":
        array = np.clip(array, -1, _INT64_MAX)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 4:
        array = np.minimum(array, np.uint64(_INT64_MAX))
    array = np.asarray(array, dtype=np.int64, order="C")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_bounds(flat: Tensor, num_rows: int, given: Tensor | np.ndarray) -> None:
    """Raise `RowIndexError` for the first value of `flat` outside ``[0, num_rows)``, as it stands in `given`."""
    if flat.numel() == 0:
        return
    # NumPy's calls have no threads to wake: for an index they are faster than torch's, and steadier on a busy machine.
    array = flat.numpy() if flat.device.type == "cpu" else flat
    if int(array.min()) >= 0 and int(array.max()) < num_rows:
        return
    first = int(((flat < 0) | (flat >= num_rows)).nonzero()[0])
    where = ", ".join(str(int(i)) for i in np.unravel_index(first, tuple(given.shape))) if given.ndim else ""
    values = given.detach().cpu().numpy() if isinstance(given, Tensor) else given  # torch cannot read a large uint64
    value = int(values.reshape(-1)[first])
    raise out_of_range(f"index[{where}]" if where else "index", value, num_rows)


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


class UniqueRows(NamedTuple):
    """The unique values of an index, and the index grouped by them.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, sorted.
    inverse : Tensor
        Where each value of the index is in `ids`.
    order, starts : Tensor or None
        The positions of the index sorted by value, each group in its old order, and where in `order` the ``n`` groups begin;
        None where the device finds the unique values without them.
    """

    ids: Tensor
    inverse: Tensor
    order: Tensor | None
    starts: Tensor | None


def unique_rows(flat: Tensor) -> UniqueRows:
    """Return the unique values of `flat` (1-D int64, none negative)."""
    count = flat.numel()
    bits = count.bit_length()
    if flat.device.type != "cpu" or count == 0 or int(flat.numpy().max()) >> (63 - bits):
        ids, inverse = torch.unique(flat, return_inverse=True)
        return UniqueRows(ids, inverse, None, None)
    # One sort of "value, position" in a single integer: NumPy sorts plain integers with vector instructions, and sorting
    # with indices, as torch.unique does, costs twice that and more.
    key = (flat.numpy() << bits) | np.arange(count)
    key.sort()
    order = key & ((1 << bits) - 1)
    key >>= bits
    first = np.empty(count, dtype=bool)
    first[0] = True
    np.not_equal(key[1:], key[:-1], out=first[1:])
    place = np.empty(count, dtype=np.int64)
    place[order] = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    ids, inverse = torch.from_numpy(key[starts]), torch.from_numpy(place)
    return UniqueRows(ids, inverse, torch.from_numpy(order), torch.from_numpy(starts))
