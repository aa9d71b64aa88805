"""Embedding tables compared by suites `step` and `memory`, this library's and torch's, and training steps on them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.environment import Room
from speedtransfer.benchmark.measure import cycle
from speedtransfer.benchmark.results import Role
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import HostMemoryError
from speedtransfer.nn import Embedding

DIM = 128
ROW_BYTES = DIM * 4  # float32
# Planes of a table with weights and optimizer state.
PLANES = {"AdamW": 3, "SGD": 1, "SGD with momentum": 2, "RMSprop": 2, "Adamax": 3}
OURS = "speedtransfer, {}"  # name of our table, by its memory
BATCHES = 4


@dataclass(frozen=True)
class Contender:
    """A table with its optimizer.

    `place` is the memory it takes ("host" or "device"), `planes` how many arrays as large as the weights it holds in a step,
    a dense gradient included. `make` returns the module with the given number of rows, all zeros. `idle` and `memory` are
    those of our tables.
    """

    name: str
    role: Role
    place: str
    planes: int
    make: Callable[[int], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    idle: str = "lazy"
    memory: str = ""


class _Ours(Embedding):
    def reset_parameters(self) -> None:
        """Keep the zeros: filling many gigabytes takes long, and few rows are used."""


class _Torch(nn.Embedding):
    def reset_parameters(self) -> None:
        """Start from zeros as well."""
        nn.init.zeros_(self.weight)


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
}


def contenders(device: torch.device, optimizer: str = "AdamW", idle: str = "lazy") -> list[Contender]:
    """Return all contenders on `device`, trained with `optimizer` (a key of `PLANES`); our default memory comes first."""
    # On the CPU memory="device" would be "pageable" again.
    names = ("pinned", "device", "pageable", "mmap") if device.type == "cuda" else ("pageable", "mmap")
    first, *rest = (_ours(memory, device, optimizer, idle) for memory in names)
    return [first, _torch(device, optimizer, sparse=True), _torch(device, optimizer, sparse=False), *rest]


def our_name(memory: str, idle: str) -> str:
    """Return the name of our table; lazy idle rows are the default."""
    return OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")


def _ours(memory: Any, device: torch.device, optimizer: str, idle: Any) -> Contender:
    def make(rows: int) -> nn.Module:
        if memory != "mmap":
            return _Ours(rows, DIM, device=device, memory=memory, idle=idle)
        folder = tempfile.mkdtemp(prefix="speedtransfer-bench-")
        emb = _Ours(rows, DIM, device=device, memory=memory, path=Path(folder, "table.safetensors"), idle=idle)
        weakref.finalize(emb, shutil.rmtree, folder, ignore_errors=True)
        return emb

    place, planes = "device" if memory == "device" else "host", PLANES[optimizer]
    return Contender(our_name(memory, idle), "ours", place, planes, make, _OPTIMIZERS[optimizer], idle, memory)


def _torch(device: torch.device, optimizer: str, sparse: bool) -> Contender:
    def make(rows: int) -> nn.Module:
        return _Torch(rows, DIM, sparse=sparse, device=device)

    name = "SparseAdam" if sparse and optimizer == "AdamW" else optimizer
    title = f"nn.Embedding{'(sparse=True)' * sparse} + {name}"
    place, planes = "device" if device.type == "cuda" else "host", PLANES[optimizer] + (not sparse)
    return Contender(title, "other", place, planes, make, _OPTIMIZERS[name])


def fitting(
    chosen: Iterable[Contender], rows: int, room: dict[str, float]
) -> Iterator[tuple[Contender, HostMemoryError | None]]:
    """Yield each contender with the error of a table that does not fit beside the earlier ones, or None.

    `room` has the bytes that tables may take, by place.
    """
    left = Room(room)
    for contender in chosen:
        yield contender, left.take(contender.planes * rows * ROW_BYTES, contender.place)


class Batches:
    """Batches of ids with the same access pattern for every table size, spread over the whole table."""

    def __init__(self, rows: int, lookups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.lookups, self.seed = rows, lookups, seed
        self._ids = [zipf_ids(rows, lookups, generator) for _ in range(BATCHES)]
        self._touched = torch.cat(self._ids).unique()
        self.values = torch.randn(len(self._touched), DIM, generator=generator)
        # Eighths: sums are exact, and no sum is nearly zero, where the sign in Adam's first step would be arbitrary.
        self.grad = torch.randint(-8, 9, (lookups, DIM), generator=generator) / 8

    def ids(self, rows: int) -> list[Tensor]:
        """Return the batches for a table of `rows` rows."""
        return [self._place(ids, rows) for ids in self._ids]

    def touched(self, rows: int) -> Tensor:
        """Return the sorted rows that occur in any batch; their initial values are `values`."""
        return self._place(self._touched, rows)

    def _place(self, ids: Tensor, rows: int) -> Tensor:
        factor = rows // self.rows
        # Equal distances would map to the same cache sets.
        return ids * factor + ids * 2_654_435_761 % factor


class Step:
    """A training step. The table is made in the first one, so that running out of memory fails this case alone."""

    def __init__(self, contender: Contender, rows: int, device: torch.device, batches: Batches) -> None:
        self.contender, self.rows, self.device, self.batches = contender, rows, device, batches
        self.emb: Any = None
        self._turn: Callable[[], Tensor]

    def run(self) -> None:
        """Take a step."""
        if self.emb is None:
            self._build()
        self.emb(self._turn()).backward(self._grad)
        self._opt.step()
        self._opt.zero_grad()

    def _build(self) -> None:
        emb = self.contender.make(self.rows)
        touched, values = (t.to(self.device) for t in (self.batches.touched(self.rows), self.batches.values))
        if isinstance(emb, Embedding):
            emb.table.scatter(touched, values)
        else:
            emb.get_parameter("weight").data[touched] = values
        self._opt = self.contender.optimizer(list(emb.parameters()))
        self._grad = self.batches.grad.to(self.device)
        self._turn = cycle([ids.to(self.device) for ids in self.batches.ids(self.rows)])
        self.emb = emb

    def check(self) -> None:
        """Compare the first step with dense training on the touched rows; then run the other batches once.

        Rows get memory when they are first touched, which must not be timed.
        """
        ours = isinstance(self.emb, Embedding)
        touched, before = self.batches.touched(self.rows), self.batches.values
        inverse = torch.searchsorted(touched, self.batches.ids(self.rows)[0])
        weight = nn.Parameter(before.clone())
        F.embedding(inverse, weight).backward(self.batches.grad)
        sparse = isinstance(self._opt, torch.optim.SparseAdam)
        (torch.optim.AdamW([weight], weight_decay=0) if sparse else self.contender.optimizer([weight])).step()
        first = torch.zeros(len(touched), dtype=torch.bool).index_fill_(0, inverse, True)

        plane = self.emb.table.torch() if ours else self.emb.weight.detach()
        after = plane[touched.to(plane.device)].cpu()
        torch.testing.assert_close(after[first], weight.detach()[first], rtol=1e-4, atol=1e-5)
        if ours:
            assert torch.equal(after[~first], before[~first]), "a step changed rows that it does not touch"
        for _ in range(BATCHES - 1):
            self.run()
