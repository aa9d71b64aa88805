"""Memory for cached rows of one plane, on the compute device."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer.dtypes import INTEGER_OF_SIZE
from speedtransfer.engines.host import gather_rows, scatter_rows
from speedtransfer.engines.reference import put_rows, select_rows


class PlaneSlots:
    """The slots of one plane: its rows as they are stored, whether there are any, and whether the plane lacks them.

    Two more serve rows that have none: they are written to the first, and read zeros from the second.
    """

    def __init__(self, plane: Tensor, values: Tensor) -> None:
        self.plane, self.values, self.version = plane, values, plane._version
        self.valid = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        # What is dirty but not valid means nothing.
        self.dirty = torch.zeros_like(self.valid)
        # Whether any slot may be valid, or dirty, as far as the host knows.
        self.used = self.written = False

    def read(self, slots: Tensor, rows: Tensor) -> None:
        """Fill `rows` (n, width) from `slots` (n,)."""
        (select_rows if rows.is_cuda else gather_rows)([self.values], slots, [rows])

    def write(self, slots: Tensor, rows: Tensor, known: Tensor, dirty: bool) -> None:
        """Write `rows` (n, width) to `slots` (n,), which become valid where `known` (n,) says so."""
        self.used, self.written = True, self.written or dirty
        # In this order: whatever interrupts it, no row that the plane lacks is taken for one that it has.
        if dirty:
            self.dirty.index_copy_(0, slots, known)
        (put_rows if rows.is_cuda else scatter_rows)([self.values], slots, [rows])
        self.valid.index_copy_(0, slots, known)


def new_values(count: int, plane: Tensor, device: torch.device) -> Tensor:
    """Return zeros for `count` rows of `plane`."""
    word = INTEGER_OF_SIZE.get(plane.element_size(), plane.dtype)
    return torch.zeros((count, plane.shape[1]), dtype=word, device=device).view(plane.dtype)
