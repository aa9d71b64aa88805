"""Number the rows of a table in turn among the processes that own them: those that there are keep theirs if others come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtransfer.ranks.partition import Partition

# Places from the first of a process to that of the next: more than the rows that any has.
_STRIDE = 1 << 40


class Interleaved(Partition):
    """Row i of process r is row ``i * ranks + r`` of the whole table, which has for each as many as the one with most.

    The `sizes` are the rows of each process, which `grow` alone may change.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(0, len(sizes))
        self.per_rank = _STRIDE
        self.grow(sizes)

    @property
    def saved_sizes(self) -> list[int] | None:  # noqa: D102
        return self.sizes

    @property
    def num_saved(self) -> int:  # noqa: D102
        return sum(self.sizes)

    def copy(self) -> Interleaved:  # noqa: D102
        return Interleaved(self.sizes)

    def first_missing(self, rows: Tensor) -> int | None:  # noqa: D102
        sizes = torch.tensor(self.sizes, device=rows.device)
        missing = rows[rows // self.ranks >= sizes[rows % self.ranks]]
        return int(missing[0]) if len(missing) else None

    def grow(self, sizes: Sequence[int]) -> None:
        """Let the processes have so many rows each."""
        self.sizes, self.num_rows = list(sizes), max(sizes) * self.ranks

    def start(self, rank: int) -> int:  # noqa: D102
        return rank * _STRIDE

    def size(self, rank: int) -> int:  # noqa: D102
        return self.sizes[rank]

    def places(self, ids: Tensor) -> Tensor:  # noqa: D102
        return ids % self.ranks * _STRIDE + ids // self.ranks

    def ids(self, places: Tensor) -> Tensor:  # noqa: D102
        return places % _STRIDE * self.ranks + places // _STRIDE
