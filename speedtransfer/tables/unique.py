"""Find the unique rows of an index; on a CUDA device without a number that the host would have to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.jit import compiled_module
from speedtransfer.tables.index import check_bounds

_FEW_IDS = 1 << 10  # torch.unique is faster for no more
_LARGEST = (1 << 63) - 1


class Known(NamedTuple):
    """What is known of the ids of some rows, (n,) int64, without waiting for the device that they are on.

    Attributes
    ----------
    length : Tensor, optional
        ``(1,)`` int64 there, how many name a row; those after are padding (:mod:`~speedtransfer.tables.padded`). None: all do.
    host : Tensor, optional
        ``(n,)``, what they were moved from, on the host.
    noted : tuple, optional
        What else the host finds the same rows by.
    check : Tensor, optional
        What padded ones are the unique rows of: ``(m,)``, which the device is to check when it reads them.
    """

    length: Tensor | None = None
    host: Tensor | None = None
    noted: tuple[Any, ...] | None = None
    check: Tensor | None = None


NOTHING = Known()


class UniqueRows(NamedTuple):
    """The unique values of an index, and the index grouped by them.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, sorted. Padded ones end in values that name no row.
    inverse : Tensor
        Where each value of the index is in `ids`.
    order, starts : Tensor or None
        ``(count,)``, the positions of the index sorted by value, each group in its old order, and ``(n + 1,)``, where in
        `order` the groups begin and, last, `count`. None where the index is on the CPU and short.
    found : int
        Position in `ids` of the row that was looked for; -1 where it is not among them, and where `ids` are padded.
    known : Known
        Of `ids`.
    """

    ids: Tensor
    inverse: Tensor
    order: Tensor | None = None
    starts: Tensor | None = None
    found: int = -1
    known: Known = NOTHING

    def to(self, device: torch.device) -> UniqueRows:
        """Return the same on `device`."""
        return self if self.ids.device == device else move_together([self], [], device)[0][0]


def move_together(
    groups: Sequence[UniqueRows], more: Sequence[Tensor], device: torch.device
) -> tuple[list[UniqueRows], list[Tensor]]:
    """Return `groups` and further tensors, each (any,) int64 on the CPU, on `device`: all in one copy."""
    tensors = [part for rows in groups for part in rows[:4] if part is not None] + list(more)
    sizes = [len(tensor) for tensor in tensors]
    joined = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    parts = iter(torch.cat(tensors, out=joined).to(device, non_blocking=True).split(sizes))
    moved = []
    for rows in groups:
        ids, inverse, order, starts = (cast(Any, None if part is None else next(parts)) for part in rows[:4])
        moved.append(UniqueRows(ids, inverse, order, starts, rows.found, Known(host=rows.ids)))
    return moved, list(parts)


def unique_rows(
    flat: Tensor, num_rows: int | None = None, given: Any = None, look_for: int | None = None, grouped: bool = False
) -> UniqueRows:
    """Return the unique values of `flat`, (n,) int64, and where among them `look_for` is; if `grouped` also their groups.

    On a CUDA device the host waits once, for these answers and, where `num_rows` is given, for whether all are in range.

    Raises
    ------
    RowIndexError
        A value is out of range; the message shows it as it stands in `given`.
    """
    count = flat.numel()
    if count == 0:
        return UniqueRows(flat, flat, flat, flat.new_zeros(1)) if grouped else UniqueRows(flat, flat)
    if flat.device.type != "cpu":
        return _unique_on_device(flat, num_rows, given, look_for)
    if count > _FEW_IDS or grouped:
        made, spare = (buffers.empty(shape, torch.int64, flat.device) for shape in ((4, count + 1), (2, count)))
        group = compiled_module("speedtransfer.tables.numba_unique").group
        unique = group(flat.numpy(), _LARGEST if num_rows is None else num_rows, made.numpy(), spare.numpy())
        if unique > 0:
            ids, inverse, order, starts = made
            found = -1 if look_for is None else _position(ids[:unique].numpy(), look_for)
            return UniqueRows(ids[:unique], inverse[:count], order[:count], starts[: unique + 1], found)
    # What torch.unique calls.
    ids, inverse, _ = torch._unique2(flat, True, True)
    array = ids.numpy()
    if num_rows is not None and (array[0] < 0 or array[-1] >= num_rows):
        check_bounds(flat, num_rows, flat if given is None else given)
    return UniqueRows(ids, inverse, found=-1 if look_for is None else _position(array, look_for))


def _position(ids: np.ndarray, wanted: int) -> int:
    at = int(np.searchsorted(ids, wanted))
    return at if at < len(ids) and ids[at] == wanted else -1


def _unique_on_device(flat: Tensor, num_rows: int | None, given: Any, look_for: int | None) -> UniqueRows:
    ordered, order = flat.sort(stable=True)
    first = torch.ones_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    place = first.cumsum(0) - 1
    inverse = torch.empty_like(flat).scatter_(0, order, place)
    ids = torch.empty_like(flat).scatter_(0, place, ordered)  # repeats write the same value to the same place
    found = place.masked_fill(ordered != (-1 if look_for is None else look_for), -1).max()
    last, low, high, at = torch.stack([place[-1], ordered[0], ordered[-1], found]).tolist()  # the host waits here
    if num_rows is not None and (low < 0 or high >= num_rows):
        check_bounds(flat, num_rows, flat if given is None else given)
    starts = torch.searchsorted(place, torch.arange(last + 2, device=flat.device))
    return UniqueRows(ids[: last + 1], inverse, order, starts, -1 if look_for is None else at)
