"""Which process has which row of a table that is cut into shards. Knows no torch.distributed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A prime, so that ids with a common stride spread over the buckets too.
BUCKETS = 4093
# Places from the first of an interleaved process to that of the next: more than the rows that any has.
_STRIDE = 1 << 40


class Partition:
    """A permutation of the ids of a table, which does not depend on the number of ranks, cut into equal parts.

    An id falls into the bucket of its remainder by `BUCKETS`, and buckets are put into an order in which consecutive ones are
    far apart (multiples of the golden ratio). So the most frequent ids, which are often the first, spread evenly; a shard is a
    contiguous range of places; and the rows of a bucket are every `BUCKETS`-th row of an ``nn.Embedding``.
    """

    def __init__(self, num_rows: int, ranks: int) -> None:
        self.num_rows, self.ranks = num_rows, ranks
        # Rows of each rank; the last ones may have fewer.
        self.per_rank = max(1, -(-num_rows // ranks))

    @property
    def saved_sizes(self) -> list[int] | None:
        """How many rows each process saves in a checkpoint, after those of the one before; None: at their places."""
        return None

    @property
    def num_saved(self) -> int:
        """How many rows a checkpoint has."""
        return self.num_rows

    def copy(self) -> Partition:
        """Return one for a table of the same rows, which may grow by itself."""
        return self

    def first_missing(self, rows: Tensor) -> int | None:
        """Return the first of `rows` (n,), within the whole table, that nobody has; None: there is none."""
        return None

    def start(self, rank: int) -> int:
        """Return the first place that `rank` owns."""
        return min(rank * self.per_rank, self.num_rows)

    def size(self, rank: int) -> int:
        """Return the number of rows that `rank` owns."""
        return self.start(rank + 1) - self.start(rank)

    def places(self, ids: Tensor) -> Tensor:
        """Return the places of `ids`, (n,) int64."""
        bucket_of, _, starts = _buckets(self.num_rows, ids.device)
        return starts[bucket_of[ids % len(bucket_of)]] + ids // len(bucket_of)

    def places_of(self, rank: int, ids: Tensor) -> Tensor:
        """Return where in the shard of `rank` the rows `ids` (n,) are: not from 0 to its size where it does not own them."""
        return self.places(ids) - self.start(rank)

    def owners(self, places: Tensor) -> Tensor:
        """Return the ranks that own `places`, (n,) int64."""
        return places // self.per_rank

    def ids(self, places: Tensor) -> Tensor:
        """Return the ids at `places`, (n,) int64."""
        _, residue_of, starts = _buckets(self.num_rows, places.device)
        bucket = torch.searchsorted(starts, places, right=True) - 1
        return residue_of[bucket] + (places - starts[bucket]) * len(residue_of)

    def ids_of(self, rank: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the ids of the rows that `rank` owns, in the order of its shard; or those from `start` to `stop`."""
        first, stop = self.start(rank), self.size(rank) if stop is None else stop
        return self.ids(torch.arange(first + start, first + stop, device="cpu"))


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


@functools.lru_cache(maxsize=64)
def _buckets(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bucket of each remainder, the remainder of each bucket, and the first place of each bucket."""
    count = max(1, min(BUCKETS, num_rows))
    turn = max(1, round(count * 0.6180339887))
    while math.gcd(turn, count) != 1:
        turn += 1
    with torch.inference_mode(False):
        residues = torch.arange(count, device="cpu")
        bucket_of = residues * turn % count
        residue_of = torch.empty_like(residues)
        residue_of[bucket_of] = residues
        sizes = num_rows // count + (residue_of < num_rows % count).long()
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        # An id past the end, of rows that nobody has, would start a bucket of its own.
        return bucket_of.to(device), residue_of.to(device), starts[:-1].to(device)
