"""Tables and ids of the transfer benchmarks: one memory viewed as rows of any width, and batches of ids used in turn."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import synchronize
from speedtransfer.ranks.zipf import draw_ids
from speedtransfer.system import physical_bytes
from speedtransfer.tables import Table

_BASE_DIM = 128  # columns of the float32 table that all others are views of
# 2**64 divided by the golden ratio, an odd number: multiplying by it scatters consecutive numbers.
MIX = -7046029254386353131
_PRIME = 1_000_000_007
_MAX_SETS = 64


class Ids(NamedTuple):
    """One batch of ids, on the host and on the compute device; each method uses the one that suits it."""

    host: Tensor
    device: Tensor


@dataclass
class Workload:
    """Rows to move, and batches of ids.

    `plane`, (num_rows, dim) float32, are the rows of `table`; `sets` batches of one length. `rows`, (count, dim) on the
    compute device, are scattered; `out` holds gathered rows; `blocks` are contiguous parts of the table for plain copies.
    """

    table: Table
    plane: Tensor
    sets: list[Ids]
    rows: Tensor
    out: Tensor
    blocks: list[Tensor]

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self.table.device

    @property
    def payload_bytes(self) -> int:
        """Bytes of one batch of rows."""
        return self.rows.nbytes


class Tables:
    """Memory of one table at a time, viewed as rows of any width; groups share it because page-locking 10 GB takes seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key: tuple[Any, int] | None = None
        self._base: Any = None

    def table(self, memory: Any, num_bytes: int, dim: int) -> Table:
        """Return a table of about `num_bytes` of float32 rows with distinct values, with its own engine."""
        if self._key != (memory, num_bytes):
            self._key, self._base = (memory, num_bytes), None  # frees the memory of the one before
            # A file without a name lives as long as it is mapped, so nothing is left behind in any event.
            with tempfile.TemporaryDirectory(prefix="speedtransfer-bench-", ignore_cleanup_errors=True) as folder:
                path = Path(folder, "table.npy") if memory == "mmap" else None
                rows = max(1, num_bytes // (4 * _BASE_DIM))
                self._base = Table(rows, _BASE_DIM, memory=memory, path=path, device=self.device)
            words = self._base.torch().view(-1).view(torch.int64)
            torch.arange(len(words), out=words)
            words.mul_(MIX)
        flat = self._base.torch().view(-1)
        num_rows = len(flat) // dim
        return Table.__new__(Table)._adopt(self._base._place, flat[: num_rows * dim].view(num_rows, dim))


def workload(table: Table, count: int, ids: str = "uniform", repeats: bool = True, seed: int = 0) -> Workload:
    """Return batches of `count` rows of `table`.

    `ids` are "uniform", and then distinct in random order, or "zipf"; without `repeats` repeated ids are dropped, and all
    batches cut to the length of the shortest.
    """
    generator = torch.Generator().manual_seed(seed)
    plane = table.torch()
    num_sets = max(3, min(_MAX_SETS, math.ceil(4 * cache_bytes() / max(1, count * table.dim * 4))))
    if ids == "zipf":
        batches = list(zipf_ids(table.num_rows, num_sets * count, generator).split(count))
    elif 2 * num_sets * count <= table.num_rows:
        # No row is in two batches either.
        batches = list(distinct_ids(table.num_rows, num_sets * count, generator).split(count))
    else:
        batches = [distinct_ids(table.num_rows, count, generator) for _ in range(num_sets)]
    if not repeats:
        firsts = (np.unique(batch.numpy(), return_index=True)[1] for batch in batches)
        batches = [batch[np.sort(first)] for batch, first in zip(batches, firsts, strict=True)]
        count = min(map(len, batches))
        batches = [batch[:count] for batch in batches]
    rows = torch.empty(count, table.dim, device=table.device).normal_()
    flat = plane.as_strided((plane.shape[0] * plane.stride(0),), (1,))
    number = max(1, min(num_sets, len(flat) // max(1, rows.numel())))
    blocks = [flat[i * rows.numel() : (i + 1) * rows.numel()].view(rows.shape) for i in range(number)]
    sets = [Ids(batch, batch.to(table.device)) for batch in batches]
    synchronize(table.device)
    return Workload(table, plane, sets, rows, torch.empty_like(rows), blocks)


def distinct_ids(num_rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different ids uniformly, in random order."""
    if num_rows <= 4 * count:
        return torch.randperm(num_rows, generator=generator)[:count]
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < count:
        found = torch.cat([found, torch.randint(num_rows, (count,), generator=generator)]).unique()
    return found[torch.randperm(len(found), generator=generator)[:count]]


def zipf_ids(num_rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw ids with a frequency in proportion to 1 / rank; ranks are spread over the table."""
    draw = np.random.default_rng(int(torch.randint(1 << 62, (1,), generator=generator)))
    return spread(torch.from_numpy(draw_ids(num_rows, 1.0, count, draw)), num_rows)


def spread(ranks: Tensor, num_rows: int) -> Tensor:
    """Return the row of each frequency rank, from 0 on: no two have one, as long as the prime does not divide `num_rows`."""
    return ranks * _PRIME % num_rows


def cache_bytes() -> int:
    """Return the size of the largest cache of this processor, at least 32 MB."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith(("K", "M")):
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes)


def default_table_bytes(device: torch.device, quick: bool) -> int:
    """Return the size of the main table: 10 GB on CUDA, at least ten times the cache on the CPU, at most 1/4 of the memory."""
    if device.type == "cuda":
        wanted = 1_000_000_000 if quick else 10_000_000_000
    else:
        wanted = max(10 * cache_bytes(), 0 if quick else 1_000_000_000)
    return min(wanted, (physical_bytes() or 1 << 40) // 4)
