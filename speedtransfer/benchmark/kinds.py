"""The kinds of table that suites `step` and `memory` compare, ours in every memory and torch's, and a step on each."""

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
ROW_BYTES = DIM * 4  # of float32
PLANES = {
    "AdamW": 3,
    "SGD": 1,
    "SGD with momentum": 2,
    "RMSprop": 2,
    "Adamax": 3,
}  # that a table trained with it has: the weights and the optimizer's state
OURS = "speedtransfer, {}"  # and the memory


@dataclass(frozen=True)
class Kind:
    """A kind of table with its optimizer."""

    name: str
    role: Role
    place: str  # whose memory it takes: "host" or "device"
    planes: int  # that it holds in a step, as large as the weights; a dense gradient is one
    make: Callable[[int], nn.Module]  # of so many rows of zeros, on the compute device
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    idle: str = "lazy"  # of ours
    memory: str = ""  # of ours


class _Ours(Embedding):
    def reset_parameters(self) -> None:
        """Stay zero: many gigabytes need not be filled for the few rows that are used."""


class _Torch(nn.Embedding):
    def reset_parameters(self) -> None:
        """Start from zeros as well."""
        nn.init.zeros_(self.weight)


def kinds(device: torch.device, optimizer: str = "AdamW", idle: str = "lazy") -> list[Kind]:
    """Return every kind of table whose compute device is `device`, trained with `optimizer` (a key of `PLANES`).

    The first is the one that this library chooses. On the CPU "device" would be "pageable" once more.
    """
    names = ("pinned", "device", "pageable", "mmap") if device.type == "cuda" else ("pageable", "mmap")
    first, *rest = (_ours(memory, device, optimizer, idle) for memory in names)
    return [first, _torch(device, optimizer, sparse=True), _torch(device, optimizer, sparse=False), *rest]


def _ours(memory: str, device: torch.device, optimizer: str, idle: str) -> Kind:
    def make(rows: int) -> nn.Module:
        if memory != "mmap":
            return _Ours(rows, DIM, device=device, memory=memory, idle=idle)
        folder = tempfile.mkdtemp(prefix="speedtransfer-bench-")
        emb = _Ours(rows, DIM, device=device, memory=memory, path=Path(folder, "table.safetensors"), idle=idle)
        weakref.finalize(emb, shutil.rmtree, folder, ignore_errors=True)
        return emb

    place = "device" if memory == "device" else "host"
    name = OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")
    return Kind(name, "ours", place, PLANES[optimizer], make, _OPTIMIZERS[optimizer], idle, memory)


def _torch(device: torch.device, optimizer: str, sparse: bool) -> Kind:
    def make(rows: int) -> nn.Module:
        return _Torch(rows, DIM, sparse=sparse, device=device)

    name = "SparseAdam" if sparse and optimizer == "AdamW" else optimizer
    planes = PLANES[optimizer] + (not sparse)
    title = f"nn.Embedding({'sparse=True' if sparse else ''}) + {name}".replace("()", "")
    return Kind(title, "other", "device" if device.type == "cuda" else "host", planes, make, _OPTIMIZERS[name])


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
}


BATCHES = 4


class Batches:
    """Batches of ids that are the same accesses whatever the size of the table: they spread over all of it."""

    def __init__(self, rows: int, lookups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.lookups, self.seed = rows, lookups, seed
        self._ids = [zipf_ids(rows, lookups, generator) for _ in range(BATCHES)]
        self._touched = torch.cat(self._ids).unique()
        self.values = torch.randn(len(self._touched), DIM, generator=generator)
        # Eighths: their sums are exact, and none is nearly zero, where Adam's first step, lr * sign(grad), would be chance.
        self.grad = torch.randint(-8, 9, (lookups, DIM), generator=generator) / 8

    def ids(self, rows: int) -> list[Tensor]:
        """Return the batches for a table of `rows`."""
        return [self._place(ids, rows) for ids in self._ids]

    def touched(self, rows: int) -> Tensor:
        """Return the rows, sorted, that any of the batches names; they start from `values`."""
        return self._place(self._touched, rows)

    def _place(self, ids: Tensor, rows: int) -> Tensor:
        factor = rows // self.rows
        return ids * factor + ids * 2_654_435_761 % factor  # not at equal distances, which would share sets of a cache


def fitting(chosen: Iterable[Kind], rows: int, room: dict[str, float]) -> Iterator[tuple[Kind, HostMemoryError | None]]:
    """Yield each kind and why a table of `rows` rows does not fit beside those before it, where it does not.

    `room` says how many bytes tables may take, by place.
    """
    left = Room(room)
    for kind in chosen:
        yield kind, left.take(kind.planes * rows * ROW_BYTES, kind.place)


class Step:
    """A training step. The table is made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(self, kind: Kind, rows: int, device: torch.device, batches: Batches) -> None:
        self.kind, self.rows, self.device, self.batches = kind, rows, device, batches
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
        """Make the table, the first values of the rows in use, and the optimizer."""
        emb = self.kind.make(self.rows)
        touched, values = (t.to(self.device) for t in (self.batches.touched(self.rows), self.batches.values))
        if isinstance(emb, Embedding):
            emb.table.scatter(touched, values)
        else:
            emb.get_parameter("weight").data[touched] = values
        self._opt = self.kind.optimizer(list(emb.parameters()))
        self._grad = self.batches.grad.to(self.device)
        self._turn = cycle([ids.to(self.device) for ids in self.batches.ids(self.rows)])
        self.emb = emb

    def check(self) -> None:
        """Compare the table after the first step with dense training on the touched rows alone; ours leaves all others.

        Then take the other batches: their rows take memory when they are first touched, and that is not part of the step.
        """
        ours = isinstance(self.emb, Embedding)
        touched, before = self.batches.touched(self.rows), self.batches.values
        inverse = torch.searchsorted(touched, self.batches.ids(self.rows)[0])
        weight = nn.Parameter(before.clone())
        F.embedding(inverse, weight).backward(self.batches.grad)
        sparse = isinstance(self._opt, torch.optim.SparseAdam)
        (torch.optim.AdamW([weight], weight_decay=0) if sparse else self.kind.optimizer([weight])).step()
        first = torch.zeros(len(touched), dtype=torch.bool).index_fill_(0, inverse, True)

        plane = self.emb.table.torch() if ours else self.emb.weight.detach()
        after = plane[touched.to(plane.device)].cpu()
        torch.testing.assert_close(after[first], weight.detach()[first], rtol=1e-4, atol=1e-5)
        if ours:
            assert torch.equal(after[~first], before[~first]), "a step changed rows that it does not touch"
        for _ in range(BATCHES - 1):
            self.run()
