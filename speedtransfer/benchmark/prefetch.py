"""Suite `prefetch`: a table in a file, mostly not in memory. How much of the wait for its pages can be hidden?

The same model looks up batches in a file, with `speedtransfer.prefetch` and without, and in memory. No page of the file is in
memory when a run of steps begins, and none is needed twice within it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.cold_tables import DIM, ColdTables
from speedtransfer.benchmark.environment import host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.errors import check_size
from speedtransfer.nn import Embedding, prefetch
from speedtransfer.page_cache import PAGE, read_pages
from speedtransfer.units import format_share

NOTE = (
    "Before each stretch of steps all pages of the file are written to the disk and dropped; a stretch begins with steps that "
    "are not timed, until reading ahead has found its pace. Ids are uniform, but no page is wanted twice in a stretch. "
    "Tables are on the CPU, whatever the device. The waiting is the time in a file less that in memory, and a share of it is "
    "hidden. The roof reads the same pages by single reads on many threads, and computes nothing."
)
FIELDS = 8  # lookups per example
WITHOUT, AHEAD, IN_MEMORY = "without prefetch", "prefetch, depth ", "table in memory"
PREADS = "reads of the same pages on {} threads"
DEPTHS, THREADS = (1, 2, 4), (1, 32)

_ROWS, _QUICK_ROWS = 1 << 22, 1 << 18
_SHARE = 0.25  # share of the host's memory for the table in memory and its state
_PLANES = 3  # with AdamW's state


class Sizes(NamedTuple):
    """Sizes of a group: examples of a batch, untimed and timed steps, and turns."""

    examples: int
    warm: int
    steps: int
    turns: int


FULL, QUICK = Sizes(256, 5, 12, 4), Sizes(64, 5, 8, 3)
# Networks that take about a tenth of the time that the disk needs for a batch, and more than that time.
WIDTHS, QUICK_WIDTHS = (512, 2048), (1024,)


def describe(group: GroupResult, case: CaseResult) -> str:
    """Return the share of the waiting that reading ahead hides: all is as fast as a table in memory."""
    without, in_memory = group.by_name.get(WITHOUT), group.by_name.get(IN_MEMORY)
    if without is None or in_memory is None or not case.name.startswith(AHEAD):
        return ""
    waiting = without.median_s - in_memory.median_s
    share = (without.median_s - case.median_s) / waiting if waiting > 0 else 0.0
    # A negative share is a loss, whose digits would mean nothing.
    return f"{'none' if share < 0.005 else format_share(share)} of the waiting hidden"


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each width of the network; tables are always on the CPU."""
    fitting = int(host_room(_SHARE) / (4 * DIM * _PLANES))
    rows = check_size(rows or min(_QUICK_ROWS if quick else _ROWS, fitting), "rows", 1)
    sizes, tables = QUICK if quick else FULL, ColdTables(rows, seed)
    lookups = sizes.examples * FIELDS
    about = f"AdamW step, {lookups:,} lookups in {rows:,} x {DIM} float32 in a file, MLP of width"
    effort = {"turns": sizes.turns, "samples": 1}
    return [
        Group(
            f"{about} {width}",
            functools.partial(_cases, tables, width, sizes),
            {"experiment": "training", "rows": rows, "dim": DIM, "lookups": lookups, "width": width},
            effort,
        )
        for width in (QUICK_WIDTHS if quick else WIDTHS)
    ]


class _Dense(nn.Module):
    """A network on the rows of an example, with its own optimizer: computation that reading can overlap with."""

    def __init__(self, width: int, examples: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FIELDS * DIM, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), fused=True)
        self.target = torch.rand(examples)

    def loss(self, rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.layers(rows.flatten(1))[:, 0], self.target)


class _Runs:
    """Runs of steps on a table, with `prefetch` of a depth or, with depth 0, without."""

    def __init__(self, tables: ColdTables, dense: _Dense, sizes: Sizes, depth: int = 0, in_file: bool = True) -> None:
        self.tables, self.dense, self.sizes, self.depth, self.in_file = tables, dense, sizes, depth, in_file
        self._batches: Iterator[Tensor] | None = None

    def before(self) -> None:
        """Drop all pages of the file, and take the untimed steps."""
        emb, _ = self._table()
        # Also for a table in memory, which pages being written to the disk would disturb.
        self.tables.drop_pages()
        # More batches follow the timed ones, so that as many are read meanwhile as are used.
        count = self.sizes.warm + self.sizes.steps + self.depth
        batches = list(self.tables.ids(count, self.sizes.examples, FIELDS))
        self._batches = iter(prefetch(batches, lambda ids: {emb: ids}, self.depth) if self.depth else batches)
        self._take(self._batches, self.sizes.warm)

    def run(self) -> None:
        assert self._batches is not None
        self._take(self._batches, self.sizes.steps)
        self.tables.in_flight, self._batches = self._batches if self.depth else None, None

    def check(self) -> None:
        emb, _ = self._table()
        ids = self.tables.ids(self.sizes.examples, FIELDS)
        found = emb(emb.prefetch(ids) if self.depth else ids).detach()
        assert torch.equal(found, emb.table.torch()[ids]), "rows are not those of the table"

    def _table(self) -> tuple[Embedding, torch.optim.Optimizer]:
        return self.tables.in_file if self.in_file else self.tables.in_memory

    def _take(self, batches: Iterator[Tensor], count: int) -> None:
        emb, optimizer = self._table()
        for _ in range(count):
            take_step(self.dense.loss(emb(next(batches))), optimizer, self.dense.optimizer)


class _Reads:
    """Reads the pages that a run of steps needs, one by one."""

    def __init__(self, tables: ColdTables, sizes: Sizes, threads: int) -> None:
        self.tables, self.sizes, self.threads = tables, sizes, threads

    def before(self) -> None:
        self.tables.drop_pages()

    def run(self) -> None:
        rows = self.tables.ids(self.sizes.steps * self.sizes.examples * FIELDS)
        read_pages(self.tables.pages(rows), self.threads)


def _cases(tables: ColdTables, width: int, sizes: Sizes) -> list[Case]:
    dense = _Dense(width, sizes.examples)
    page_bytes = sizes.examples * FIELDS * PAGE * _PLANES
    step: Callable[..., _Runs] = functools.partial(_Runs, tables, dense, sizes)
    methods = {WITHOUT: step()} | {f"{AHEAD}{depth}": step(depth) for depth in DEPTHS}
    pages: dict[str, Any] = {"payload_bytes": page_bytes, "parts": sizes.steps}
    found = [Case.of(name, method, "ours", **pages) for name, method in methods.items()]
    found.append(Case.of(IN_MEMORY, step(in_file=False), parts=sizes.steps))
    for threads in THREADS:
        name = PREADS.format(threads).replace("1 threads", "1 thread")
        found.append(Case.of(name, _Reads(tables, sizes, threads), "roof", **pages))
    return found
