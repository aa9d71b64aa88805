"""Suite `cache`: ids by Zipf's law. What share of a batch's rows is in a cache, and how much faster is a step?

The same training step on tables in a file (on CUDA: in page-locked memory) with caches of several sizes, and without one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from speedtransfer.benchmark.cold_tables import DIM, ColdTables
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.benchmark.workload import spread, zipf_ids
from speedtransfer.cuda import synchronize
from speedtransfer.errors import check_size
from speedtransfer.nn import Embedding
from speedtransfer.ranks.zipf import expected_cached, expected_unique
from speedtransfer.units import format_share

NOTE = (
    "Ids are drawn with a frequency that falls as 1 / rank. The computed share of hits is that of the distinct rows of a "
    "batch that are among the most probable rows; the measured one is that of `table.stats()`. On the CPU the table is in a "
    "file, of which all pages are dropped before each stretch of steps; pages of hot rows are in memory again soon, with a "
    "cache or without. On CUDA it is in page-locked memory."
)
WITHOUT, BY_COUNTS, BY_USE = "without a cache", "cache of {} of the rows, by counts", "cache of {} of the rows, by use"
MEASURED, COMPUTED = "hit_share", "computed_share"
SHARES = (0.01, 0.1)

_ROWS, _QUICK_ROWS = 1 << 20, 1 << 16
_LOOKUPS, _QUICK_LOOKUPS = 1 << 15, 1 << 12
_WARM, _STEPS = 16, 12  # steps before the first run, and in each
_TOLERANCE = 0.02


def describe(group: GroupResult, case: CaseResult) -> str:
    """Return the share of hits, measured and computed."""
    if MEASURED not in case.figures:
        return ""
    return f"{format_share(case.figures[MEASURED])} hits, {format_share(case.figures[COMPUTED])} computed"


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make the group of the suite."""
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 100)
    lookups = _QUICK_LOOKUPS if quick else _LOOKUPS
    place = "in page-locked memory" if device.type == "cuda" else "in a file"
    title = f"AdamW step, {lookups:,} lookups by Zipf's law in {rows:,} x {DIM} float32 {place}"
    make = functools.partial(_cases, device, rows, lookups, seed)
    params = {"rows": rows, "dim": DIM, "lookups": lookups}
    return [Group(title, make, params, effort={"turns": 2 if quick else 5, "samples": 1})]


class _Runs:
    """Runs of steps on its own table."""

    def __init__(self, device: torch.device, rows: int, lookups: int, seed: int, **cache: Any) -> None:
        self._device, self._rows, self._lookups, self._cache, self._seed = device, rows, lookups, cache, seed
        self._generator = torch.Generator().manual_seed(seed)
        self.figures = dict[str, float]()

    @functools.cached_property
    def cold(self) -> ColdTables:
        return ColdTables(self._rows, self._seed, **self._cache)

    @functools.cached_property
    def table(self) -> tuple[Embedding, torch.optim.Optimizer]:
        """The table and its optimizer, after warm-up steps."""
        if self._device.type != "cuda":
            made = self.cold.in_file
        else:
            emb = Embedding(self._rows, DIM, memory="pinned", device=self._device, idle="lazy", **self._cache)
            made = emb, torch.optim.AdamW(emb.parameters(), fused=True)
        # The most probable rows first, which fill the slots of the cache.
        emb, optimizer = made
        take_step(emb(spread(torch.arange(int(max(SHARES) * self._rows)), self._rows)).square().mean(), optimizer)
        self._take(*made, _WARM)
        made[0].table.reset_stats()
        return made

    def before(self) -> None:
        _ = self.table
        if self._device.type != "cuda":
            self.cold.drop_pages()
        synchronize(self._device)

    def run(self) -> None:
        self._take(*self.table, _STEPS)
        stats = self.table[0].table.stats()
        if stats.cache_hits + stats.cache_misses:
            self.figures[MEASURED] = stats.cache_hits / (stats.cache_hits + stats.cache_misses)

    def check(self) -> None:
        """Raise AssertionError if a cache of the hottest rows has other hits than computed."""
        if COMPUTED in self.figures and "cache_counts" in self._cache:
            measured, computed = self.figures[MEASURED], self.figures[COMPUTED]
            assert abs(measured - computed) < _TOLERANCE, f"{measured:.1%} hits where {computed:.1%} are computed"

    def _take(self, emb: Embedding, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            take_step(emb(zipf_ids(self._rows, self._lookups, self._generator)).square().mean(), optimizer)


def _cases(device: torch.device, rows: int, lookups: int, seed: int) -> list[Case]:
    ranks, counts = torch.arange(rows), torch.empty(rows)
    counts[spread(ranks, rows)] = 1 / (1 + ranks)
    method = functools.partial(_Runs, device, rows, lookups, seed)
    methods: dict[str, _Runs] = {WITHOUT: method()}
    for share in SHARES:
        cached = int(share * rows)
        hits = expected_cached(rows, 1.0, lookups, [cached])[0] / expected_unique(rows, 1.0, lookups)
        for kind, options in ((BY_COUNTS, {"cache_counts": counts}), (BY_USE, {})):
            one = methods[kind.format(f"{share:.0%}")] = method(cache_rows=cached, **options)
            one.figures[COMPUTED] = hits
    return [Case.of(name, one, "ours", parts=_STEPS) for name, one in methods.items()]
