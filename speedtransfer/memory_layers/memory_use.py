"""Count which values a memory layer reads, and choose those that new data alone uses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size


class MemoryUse:
    """How often each row of the values of a memory layer was read, as :meth:`~speedtransfer.MemoryLayer.counting` counts it.

    Parameters
    ----------
    num_values : int

    Attributes
    ----------
    counts : Tensor
        ``(num_values,)`` int64 on the CPU, how often each row was read: of each position `heads * k` are, some perhaps twice.
    batches : int
        Forward calls.
    batch_counts : Tensor
        ``(num_values,)`` int64 on the CPU, in how many of these calls each row was read.
    """

    def __init__(self, num_values: int) -> None:
        self.num_values = check_size(num_values, "num_values", 1)
        self.counts, self.batch_counts = torch.zeros(2, num_values, dtype=torch.int64, device="cpu")
        self.batches = 0

    @property
    def unused(self) -> int:
        """How many rows were never read."""
        return self.num_values - int(self.counts.count_nonzero())

    def add(self, rows: Tensor) -> None:
        """Count the row numbers of a batch, int64 of any shape and device."""
        used, times = rows.unique(return_counts=True)
        used = used.cpu()
        self.counts[used] += times.cpu()
        self.batch_counts[used] += 1
        self.batches += 1

    def tf_idf(self, background: MemoryUse) -> Tensor:
        """Return how much more each row is used here than in the `background`, ``(num_values,)`` float64.

        For row i, with c its counts here, and in the background B batches of which b_i read it (arXiv:2510.15103)::

            c_i / sum_j c_j * log((B + 1) / (b_i + 1))

        Raises
        ------
        InvalidTypeError, InvalidValueError
            `background` is not the use of as many values.
        """
        check_use(background, self.num_values, "background")
        share = self.counts.double() / max(int(self.counts.sum()), 1)
        return share * (math.log(background.batches + 1) - (background.batch_counts + 1).double().log())

    def top_rows(self, background: MemoryUse, most: int) -> Tensor:
        """Return the rows used here with the largest :meth:`tf_idf`, at most `most`, ascending: (n,) int64 on the CPU.

        :meth:`~speedtransfer.MemoryLayer.train_rows` takes them. Of rows with equal values the first are returned.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            `background` is not the use of as many values, or `most` no number of rows.
        """
        most = check_size(most, "most", 1)
        scores, used = self.tf_idf(background), self.counts.nonzero()[:, 0]
        best = scores[used].sort(descending=True, stable=True).indices[:most]
        return used[best].sort().values

    def __repr__(self) -> str:
        """Say how many rows were read."""
        used = self.num_values - self.unused
        return f"MemoryUse({used:,} of {self.num_values:,} values used in {self.batches:,} batches)"


def check_use(use: Any, num_values: int, name: str) -> None:
    """Raise unless `use`, an argument called `name`, counts `num_values` values."""
    if not isinstance(use, MemoryUse):
        raise InvalidTypeError(
            f"{name} is a {type(use).__name__} but must be a MemoryUse; pass what layer.counting() gives"
        )
    if use.num_values != num_values:
        raise InvalidValueError(f"{name} counts {use.num_values} values but not {num_values}; count the same layer")


@uncompiled
def count_rows_in(uses: list[MemoryUse], rows: Tensor) -> None:
    """Count the rows of a batch in all of `uses`; not within a compiled graph."""
    for use in uses:
        use.add(rows.detach())
