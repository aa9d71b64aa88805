"""Suite `step`: a whole AdamW training step (forward, backward, step, zero_grad). Its cost must not grow with the table."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import DIM, OURS, PLANES, ROW_BYTES, Kind, kinds
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import HostMemoryError, check_size, format_bytes
from speedtransfer.nn import Embedding
from speedtransfer.tables.memory import physical_bytes

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that."
)
LARGE, SMALL = OURS.format("pinned"), OURS.format("pinned") + ", 1 GB table"  # the cases of experiment "gpu limit"
SMALL_BYTES, LARGE_BYTES, LIMIT_BYTES = 1e9, 50e9, 5e9  # their weights, and the GPU memory that they get

_ROWS, _LOOKUPS, _BATCHES = 1_000_000, 98_304, 4  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
_SHARE, _LARGE_SHARE = 0.6, 0.8  # of the memory of this machine or its device that tables may take


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        The compute device.
    quick : bool
        Small tables only.
    rows : int, optional
        Of the smallest table.
    max_bytes : int, optional
        The most that the tables of a group may take together, of the host and of the device.
    seed : int, optional
    """
    rows = check_size(options.get("rows") or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most = options.get("max_bytes") or (_QUICK_BYTES if quick else float("inf"))
    batches = _Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), options.get("seed") or 0)
    room = {"host": min(most, _SHARE * (physical_bytes() or 8e9))}
    if device.type == "cuda":
        room["device"] = min(most, _SHARE * torch.cuda.get_device_properties(device).total_memory)

    def group(size: int, chosen: list[Kind], experiment: str, title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        params = {"experiment": experiment, "rows": size, "dim": DIM}
        return Group(title, functools.partial(_compare, chosen, device, size, batches, room), params)

    every = kinds(device)
    in_memory, in_file = ([k for k in every if (k.name == OURS.format("mmap")) == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: beside them it is a small one, and one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [group(size, every if size == rows else in_memory, "size") for size in sizes]
    if not quick:
        found.append(group(4 * rows, in_file, "file", ", in a file"))
    if device.type == "cuda" and not quick:
        found.append(_under_gpu_limit(device, batches, min(most, _LARGE_SHARE * physical_bytes())))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and larger numbers of rows up to `last`: times four where that gives three or more, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


class _Batches:
    """Batches of ids that are the same accesses whatever the size of the table: they spread over all of it."""

    def __init__(self, rows: int, lookups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.lookups = rows, lookups
        self._ids = [zipf_ids(rows, lookups, generator) for _ in range(_BATCHES)]
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


def _compare(
    chosen: list[Kind], device: torch.device, rows: int, batches: _Batches, room: dict[str, float]
) -> list[Case]:
    """Return a step of each kind. Those that memory cannot hold beside the ones before them say so when they run."""
    gc.collect()  # tables of the group before may be left in cycles
    left, cases = dict(room), []
    for kind in chosen:
        num_bytes, error = kind.planes * rows * ROW_BYTES, None
        if num_bytes <= left[kind.place]:
            left[kind.place] -= num_bytes
        else:
            error = HostMemoryError(
                f"takes {format_bytes(num_bytes)} but of the {kind.place}'s memory the tables beside it leave "
                f"{format_bytes(left[kind.place])}"
            )
        step = _Step(kind, rows, device, batches, error)
        cases.append(Case(kind.name, step.run, step.check, role=kind.role))
    return cases


class _Step:
    """A training step. The table is made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(
        self, kind: Kind, rows: int, device: torch.device, batches: _Batches, error: Exception | None = None
    ) -> None:
        self.kind, self.rows, self.device, self.batches, self.error = kind, rows, device, batches, error
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
        if self.error is not None:
            raise self.error
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
        """Compare the table after the first step with dense AdamW on the touched rows alone; ours leaves all others.

        Then take the other batches: their rows take memory when they are first touched, which is no cost of a step.
        """
        ours = isinstance(self.emb, Embedding)
        touched, before = self.batches.touched(self.rows), self.batches.values
        inverse = torch.searchsorted(touched, self.batches.ids(self.rows)[0])
        weight = nn.Parameter(before.clone())
        F.embedding(inverse, weight).backward(self.batches.grad)
        decays = not isinstance(self._opt, torch.optim.SparseAdam)
        torch.optim.AdamW([weight], weight_decay=self._opt.defaults["weight_decay"] if decays else 0).step()
        first = torch.zeros(len(touched), dtype=torch.bool).index_fill_(0, inverse, True)

        plane = self.emb.table.torch() if ours else self.emb.weight.detach()
        after = plane[touched.to(plane.device)].cpu()
        torch.testing.assert_close(after[first], weight.detach()[first], rtol=1e-4, atol=1e-5)
        if ours:
            assert torch.equal(after[~first], before[~first]), "a step changed rows that it does not touch"
        for _ in range(_BATCHES - 1):
            self.run()


# --- a table far larger than the GPU's memory ---------------------------------------------------------------------------


class _GpuLimit:
    """Limits what this process may take of the GPU's memory, until nobody holds this any more."""

    def __init__(self, device: torch.device, limit_bytes: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        weakref.finalize(self, torch.cuda.set_per_process_memory_fraction, 1.0, device)


class _LimitedStep(_Step):
    limit: _GpuLimit


def _under_gpu_limit(device: torch.device, batches: _Batches, room_bytes: float) -> Group:
    """Return steps on a small table and on the largest that memory holds beside it, both pinned."""
    planes, unit = PLANES["AdamW"], batches.rows  # sizes are multiples of the smallest table
    large_bytes = min(LARGE_BYTES, room_bytes / planes - SMALL_BYTES)
    small, large = (max(1, round(b / ROW_BYTES / unit)) * unit for b in (SMALL_BYTES, large_bytes))

    def make() -> list[Case]:
        limit, kind = _GpuLimit(device, LIMIT_BYTES), kinds(device)[0]
        cases = []
        for name, rows in ((LARGE, large), (SMALL, small)):
            step = _LimitedStep(kind, rows, device, batches)
            step.limit = limit
            cases.append(Case(name, step.run, step.check, role=kind.role))
        return cases

    taken = f"{format_bytes(large * ROW_BYTES)} ({format_bytes(planes * large * ROW_BYTES)} with its state)"
    title = f"AdamW step with {format_bytes(LIMIT_BYTES)} of GPU memory, pinned table of {taken} and one of 1 GB"
    params = {"experiment": "gpu limit", "rows": large, "dim": DIM, "limit_bytes": int(LIMIT_BYTES)}
    return Group(title, make, params)
