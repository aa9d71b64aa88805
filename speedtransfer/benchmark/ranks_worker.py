"""Processes of suite `ranks`: each trains on its part of every batch."""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedtransfer.benchmark.by_hand import AdamWByHand, TableByHand
from speedtransfer.benchmark.world import sent_by_tables
from speedtransfer.nn import Embedding

ORDINARY, SHARDED, SHARED = "ordinary table", "sharded", 'memory="shared"'
SPARSE, DENSE, BY_HAND = "nn.Embedding(sparse=True) + SparseAdam", "nn.Embedding + AdamW", "by hand"
BATCHES = 4
_WIDTH = 128


class Sizes(NamedTuple):
    """Sizes of a table, and of batches of `examples` with `fields` lookups each, divided among the processes."""

    rows: int
    dim: int
    examples: int
    fields: int
    exponent: float
    seed: int


@functools.lru_cache(maxsize=1)
def batches_of(sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Return ids ``(examples, fields)`` by Zipf's law, id 0 the most frequent, and targets ``(examples,)`` of each batch."""
    below = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -sizes.exponent)
    draw = np.random.default_rng(sizes.seed)
    shape = BATCHES, sizes.examples, sizes.fields
    # Rounding may leave a draw beyond the last sum.
    ids = np.minimum(np.searchsorted(below, draw.random(shape) * below[-1], side="right"), sizes.rows - 1)
    targets = draw.random(shape[:2], dtype=np.float32)
    return list(zip(torch.from_numpy(ids), torch.from_numpy(targets), strict=True))


def part_of(values: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the examples of a batch for `rank`."""
    each = len(values) // ranks
    return values[rank * each : (rank + 1) * each]


class _Model(nn.Module):
    """A small network on the mean of the rows of an example."""

    def __init__(self, emb: nn.Module, dim: int) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(dim, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.layers(self.emb(ids).mean(1))[:, 0]
        return values


class Training:
    """A model whose table is kept by one method, and its optimizers, in one of `ranks` processes."""

    def __init__(self, method: str, sizes: Sizes, rank: int, ranks: int) -> None:
        torch.manual_seed(sizes.seed)
        self.emb: Any = _make_table(method, sizes.rows, sizes.dim)
        self.net = _Model(self.emb, sizes.dim)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
            self.model: nn.Module = self.net if ranks == 1 else DistributedDataParallel(self.net)
        self.optimizers = _optimizers(method, self.net)
        parts = [
            (part_of(ids, rank, ranks).contiguous(), part_of(targets, rank, ranks))
            for ids, targets in batches_of(sizes)
        ]
        self._turn = itertools.cycle(parts)

    def step(self) -> None:
        """Take a training step."""
        ids, targets = next(self._turn)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(self.model(ids), targets).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def state(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows `ids` (n,) of the table and all other parameters; a collective call."""
        rows = self.emb.table.gather(ids) if isinstance(self.emb, Embedding) else self.emb.weight[ids]
        return rows.detach().clone(), nn.utils.parameters_to_vector(self.net.layers.parameters()).clone()


def _make_table(method: str, rows: int, dim: int) -> nn.Module:
    if method == BY_HAND:
        return TableByHand(rows, dim, torch.device("cpu"))
    if method in (SPARSE, DENSE):
        return nn.Embedding(rows, dim, sparse=method == SPARSE)
    options: dict[str, Any] = {} if method == ORDINARY else {"process_group": dist.group.WORLD}
    if method == SHARED:
        options["memory"] = "shared"
    return Embedding(rows, dim, idle="lazy", device="cpu", **options)


def _optimizers(method: str, net: _Model) -> list[Any]:
    layers = torch.optim.AdamW(net.layers.parameters(), fused=True)
    if method == SPARSE:
        return [torch.optim.SparseAdam(net.emb.parameters()), layers]
    if method == BY_HAND:
        return [AdamWByHand(net), layers]
    return [torch.optim.AdamW(net.parameters(), fused=True)]


# --- the process ------------------------------------------------------------------------------------------------------


class Worker:
    """Commands of a process."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._trainings: dict[str, Training] = {}

    def steps(self, method: str, sizes: Sizes, count: int) -> None:
        """Take steps; the first call makes the model."""
        if method not in self._trainings:
            self._trainings[method] = Training(method, sizes, self.rank, self.ranks)
        for _ in range(count):
            self._trainings[method].step()

    def state(self, method: str, ids: Tensor) -> tuple[Any, int]:
        """Return rows and parameters as arrays (rank 0 only) and their checksum."""
        rows, layers = (values.numpy() for values in self._trainings[method].state(ids))
        return (rows, layers) if self.rank == 0 else None, zlib.crc32(layers.tobytes(), zlib.crc32(rows.tobytes()))

    def sent(self) -> int:
        """Return the bytes that tables have sent to other processes."""
        return sent_by_tables()

    def forget(self, method: str) -> None:
        """Delete a model."""
        self._trainings.pop(method, None)
