"""Check indices before anything is read or written, and sort them into unique rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.engines import out_of_range
from speedtransfer.errors import InvalidTypeError, InvalidValueError

_INTEGER = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_INT64_MAX = 2**63 - 1
_FEW_IDS = 1 << 10  # torch.unique is faster for no more
_MARK_ROWS = 64  # up to so many rows of the table for each one named, marking those is faster than sorting them


def as_index(
    index: Any, num_rows: int, device: torch.device, check: bool = True
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
        False: somebody else looks whether values on the host are in range.

    Raises
    ------
    InvalidTypeError
        The values are no integers (bool counts as none).
    RowIndexError
        A value on the host is negative or not below `num_rows`.
    """
    given = index if isinstance(index, Tensor) else _array_of(index)
    tensor = given if isinstance(given, Tensor) else _tensor_of(given)
    if tensor.dtype not in _INTEGER:
        kind = "a boolean mask" if tensor.dtype == torch.bool else f"of dtype {tensor.dtype}"
        remedy = "mask.nonzero().flatten()" if tensor.dtype == torch.bool else "index.long()"
        raise InvalidTypeError(f"index is {kind} but rows are named by integers; pass {remedy}")
    if tensor.dtype == torch.uint64:  # a value of 2**63 or more would turn negative
        tensor = torch.where(tensor.view(torch.int64) < 0, num_rows, tensor.view(torch.int64))
    on_host = tensor.device.type == "cpu"
    where = tensor.device if on_host else device
    flat = tensor.detach()
    if flat.dtype != torch.int64 or flat.device != where:
        flat = flat.to(device=where, dtype=torch.int64)
    flat = flat.reshape(-1).contiguous()
    if on_host and check:
        check_bounds(flat, num_rows, given)
    return flat, tuple(tensor.shape), on_host and check


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
        None unless the index is on the CPU and long.
    found : int
        Position in `ids` of the row that was looked for; -1 where it is not among them.
    """

    ids: Tensor
    inverse: Tensor
    order: Tensor | None = None
    starts: Tensor | None = None
    found: int = -1

    def to(self, device: torch.device) -> UniqueRows:
        """Return the ids and the way back to them on `device`."""
        if self.ids.device == device:
            return self
        return UniqueRows(to_device(self.ids, device), to_device(self.inverse, device), found=self.found)


def unique_rows(
    flat: Tensor, num_rows: int | None = None, given: Any = None, look_for: int | None = None
) -> UniqueRows:
    """Return the unique values of `flat`, (n,) int64, and where among them `look_for` is.

    On a CUDA device the host waits once, for these answers and, where `num_rows` is given, for whether all are in range.

    Raises
    ------
    RowIndexError
        A value is out of range; the message shows it as it stands in `given`.
    """
    count = flat.numel()
    if count == 0:
        return UniqueRows(flat, flat)
    if flat.device.type != "cpu":
        return _unique_on_device(flat, num_rows, given, look_for)
    bits, largest = count.bit_length(), 0
    if count > _FEW_IDS:
        if num_rows is not None:
            check_bounds(flat, num_rows, flat if given is None else given)
        largest = int(flat.numpy().max())
    if count <= _FEW_IDS or largest >> (63 - bits):
        ids, inverse = torch.unique(flat, return_inverse=True)
        array = ids.numpy()
        if num_rows is not None and (array[0] < 0 or array[-1] >= num_rows):
            check_bounds(flat, num_rows, flat if given is None else given)
        return UniqueRows(ids, inverse, found=-1 if look_for is None else _position(array, look_for))
    # One sort of "value, position" in a single integer: sorting with indices, as torch.unique does, costs twice that and more.
    key = np.sort((flat.numpy() << bits) | np.arange(count))
    order = key & ((1 << bits) - 1)
    key >>= bits
    first = np.empty(count, dtype=bool)
    first[0] = True
    np.not_equal(key[1:], key[:-1], out=first[1:])
    place = np.empty(count, dtype=np.int64)
    place[order] = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    ids = key[starts]
    unique, inverse, positions, edges = (torch.from_numpy(array) for array in (ids, place, order, starts))
    return UniqueRows(unique, inverse, positions, edges, -1 if look_for is None else _position(ids, look_for))


def _position(ids: np.ndarray, wanted: int) -> int:
    at = int(np.searchsorted(ids, wanted))
    return at if at < len(ids) and ids[at] == wanted else -1


def _unique_on_device(flat: Tensor, num_rows: int | None, given: Any, look_for: int | None) -> UniqueRows:
    ordered, order = flat.sort()
    first = torch.ones_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    place = first.cumsum(0) - 1
    inverse = torch.empty_like(flat).scatter_(0, order, place)
    ids = torch.empty_like(flat).scatter_(0, place, ordered)  # repeats write the same value to the same place
    found = place.masked_fill(ordered != (-1 if look_for is None else look_for), -1).max()
    last, low, high, at = torch.stack([place[-1], ordered[0], ordered[-1], found]).tolist()  # the host waits here
    if num_rows is not None and (low < 0 or high >= num_rows):
        check_bounds(flat, num_rows, flat if given is None else given)
    return UniqueRows(ids[: last + 1], inverse, found=-1 if look_for is None else at)
