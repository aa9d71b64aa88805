"""Suite `transfer`: chosen rows to the compute device and back, against PyTorch's and CuPy's ways and a plain copy.

Batches of ids take turns, drawn from a table much larger than the cache: what is measured is memory and the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from speedtransfer.benchmark import rival_ways, ways
from speedtransfer.benchmark.drawing import COLOURS, INK, end_at, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.report import TextTable, pivot
from speedtransfer.benchmark.results import (
    DEFAULT,
    UNCHECKED,
    CaseResult,
    GroupResult,
    case_names,
    noise,
    split_by,
    times_the_speed,
)
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES
from speedtransfer.benchmark.together import together_cases
from speedtransfer.benchmark.units import format_rate, format_seconds, format_share
from speedtransfer.benchmark.ways import Way
from speedtransfer.benchmark.workload import Tables, Workload, default_table_bytes, workload
from speedtransfer.engines import DIRECTIONS, Direction, MappedEngine
from speedtransfer.errors import check_size, format_bytes

ROWS, ROW_BYTES = 131_072, 512  # of the headline: SpeedTorch's own batch
_CALL_BYTES = 1 << 28  # the most that one call moves: a million rows of 256 bytes
_SECOND_TABLE_BYTES = 1 << 30  # of other memories than the main one
_OVERHEAD_ROWS = 1000
FEW_BLOCKS = 16  # that should do: a launch so small leaves the device to training
_LAUNCH_S = 8.0  # that a run with little time keeps for each of the groups which tell

# Percent of a plain copy, the most that the picture shows: more is a noisy roof, and would flatten the rest.
_MOST_SHARE = 160

NOTE = """\
The roof is one cudaMemcpy of page-locked memory; without CUDA it is the faster of torch's copy_ on all cores and a copy that \
writes past the cache. Batches with repeated ids (Zipf) can beat it: their rows are read once and sent often. Distinct ids \
exceed it only by noise or by what a cache still holds. "speedtransfer" is the call as anyone makes it, with all checks; \
check=False is what training uses, which knows that its ids are distinct and in range."""


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        The compute device.
    quick : bool
        Few sizes.
    rows, table_bytes, seed : int, optional
        Rows of a batch, size of the table, seed of the ids.
    """
    cuda = device.type == "cuda"
    plan = _Plan(
        device,
        check_size(options.get("rows", ROWS if cuda or not quick else ROWS // 2), "rows", 1),
        check_size(options.get("table_bytes", default_table_bytes(device, quick)), "table_bytes", MIN_TABLE_BYTES),
        options.get("seed", 0),
    )
    found = [plan.ways(d, all_of_them=True, headline=True) for d in DIRECTIONS]
    sizes = (64, 4096) if quick else (4, 16, 64, 256, 1024, 4096, 16384)
    found += [plan.ways(d, row_bytes=size, headline=size == 256) for size in sizes for d in DIRECTIONS]
    if not quick:
        found += [plan.ways(d, rows=n, row_bytes=256) for n in (1000, 10_000, 1_000_000) for d in DIRECTIONS]
    found += [plan.ways(d, ids="zipf") for d in DIRECTIONS]
    found += [plan.overhead(d) for d in DIRECTIONS]
    if not quick:
        found += [plan.stride(d) for d in DIRECTIONS]
    if cuda:
        found += [plan.both()]
    memories = ("pageable", "mmap", "device") if cuda else () if quick else ("mmap",)
    found += [plan.ways(d, memory=memory) for memory in memories for d in DIRECTIONS]
    if cuda and not quick:
        found += [plan.launch(d) for d in DIRECTIONS]
        # The last: what goes wrong in the youngest of kernels must not take the other figures along.
        found += [plan.bulk(d, size) for size in (256, 512, 4096) for d in DIRECTIONS]
    # In a small table several sizes come to the same number of rows; the first keeps its place.
    return list({group.title: group for group in reversed(found)}.values())[::-1]


class _Plan:
    """Makes groups over tables that share their memory."""

    def __init__(self, device: torch.device, rows: int, table_bytes: int, seed: int) -> None:
        self.device, self.rows, self.table_bytes, self.seed = device, rows, table_bytes, seed
        self.main = "pinned" if device.type == "cuda" else "pageable"
        self.tables = Tables(device)

    def ways(
        self,
        direction: Direction,
        memory: str = "",
        rows: int = 0,
        row_bytes: int = ROW_BYTES,
        ids: str = "uniform",
        all_of_them: bool = False,
        headline: bool = False,
    ) -> Group:
        """Return the ways to move `rows` rows."""

        def make(work: Workload) -> list[Way]:
            found = ways.our_ways(work, direction) + rival_ways.other_ways(work, direction, all_of_them)
            both = all_of_them and work.table.memory == "pinned" and direction == "gather"
            return [*found, ways.both_engines_way(work)] if both else found

        count = self._count(rows or self.rows, row_bytes, memory)
        return self._group("ways", direction, make, memory, count, row_bytes, ids, headline)

    def overhead(self, direction: Direction) -> Group:
        """Return what a call costs that moves next to nothing."""

        def make(work: Workload) -> list[Way]:
            found = ways.our_ways(work, direction) + rival_ways.other_ways(work, direction, all_of_them=False)
            if self.device.type == "cuda":
                found.append(Way("empty launch", lambda ids: torch.cuda._sleep(0), queues=True, kind="empty"))
            return found

        count = self._count(min(_OVERHEAD_ROWS, self.rows), ROW_BYTES)
        return self._group("overhead", direction, make, count=count, headline=True)

    def launch(self, direction: Direction) -> Group:
        """Return how many blocks a kernel needs: those it leaves are free for training."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def make(work: Workload) -> list[Way]:
            sizes = sorted(
                {4, FEW_BLOCKS // 2, FEW_BLOCKS, *(int(processors * share) for share in (1 / 4, 1 / 2, 1, 2, 4, 8))}
            )
            engines = [(f"{size} blocks", MappedEngine(self.device, max_blocks=size)) for size in sizes]
            return [ways.engine_way(name, engine, work, direction, unsorted=False) for name, engine in engines]

        return self._group("launch", direction, make, count=self._count(self.rows, ROW_BYTES))

    def bulk(self, direction: Direction, row_bytes: int) -> Group:
        """Return whether the bulk copies of Hopper cross the bus faster than the loads of every kernel."""

        def make(work: Workload) -> list[Way]:
            kernels = [(kernel, MappedEngine(self.device, kernel=kernel)) for kernel in ("lanes", "bulk")]
            return [
                ways.engine_way(f"mapped ({name})", engine, work, direction, unsorted=False) for name, engine in kernels
            ]

        return self._group("bulk", direction, make, count=self._count(self.rows, row_bytes), row_bytes=row_bytes)

    def _group(
        self,
        kind: str,
        direction: Direction,
        make: Callable[[Workload], list[Way]],
        memory: str = "",
        count: int = 0,
        row_bytes: int = ROW_BYTES,
        ids: str = "uniform",
        headline: bool = False,
    ) -> Group:
        memory = memory or self.main

        def cases() -> list[Case]:
            table = self.tables.table(memory, self._bytes(memory), row_bytes // 4)
            work = workload(table, count, ids, repeats=direction == "gather", seed=self.seed)
            if kind in ("launch", "bulk"):  # as training gives ids to an engine
                work.sort()
            return [ways.as_case(way, work, direction) for way in [*make(work), *ways.roofs(work, direction)]]

        reserved_s = _LAUNCH_S if kind == "launch" else 0.0
        what = {"overhead": "overhead: ", "launch": "launch size: ", "bulk": "bulk copies: "}.get(kind, "")
        draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
        title = f"{what}{direction} {count:,} rows of {row_bytes:,} B{draw.get((ids, direction), '')}"
        title += f", {memory} table of {format_bytes(self._bytes(memory))}"
        params = self._params(kind, direction, memory, count, row_bytes, ids, headline)
        return Group(title, cases, params, reserved_s)

    def stride(self, direction: Direction) -> Group:
        """Return whether it pays to pad rows of 400 bytes to 512, a multiple of what memory and bus move at once."""
        dim, padded = 100, 128
        count = self._count(self.rows, 4 * padded)

        def cases() -> list[Case]:
            found = []
            for stride, how in ((dim, "dense rows"), (padded, "padded rows")):
                table = self.tables.table(self.main, self.table_bytes, dim, stride)
                work = workload(table, count, seed=self.seed)
                name, engine = ways.engines(self.main, self.device)[0]
                way = ways.engine_way(f"{name}, {how}", engine, work, direction)
                found.append(ways.as_case(way, work, direction))
            return found + [ways.as_case(way, work, direction) for way in ways.roofs(work, direction)]

        title = (
            f"row stride: {direction} {count:,} rows of {4 * dim} B, padded to {4 * padded} B or not, {self.main} table"
        )
        return Group(title, cases, self._params("stride", direction, self.main, count, 4 * dim))

    def both(self) -> Group:
        """Return a gather and a scatter at once, against two plain copies at once."""
        count = self._count(self.rows, ROW_BYTES)

        def cases() -> list[Case]:
            plane = self.tables.table("pinned", self.table_bytes, ROW_BYTES // 4).torch()
            half = len(plane) // 2
            parts = [self.tables.over(part) for part in (plane[:half], plane[half:])]
            return together_cases(*(workload(part, count, seed=self.seed + i) for i, part in enumerate(parts)))

        title = f"both at once: gather and scatter {count:,} rows of {ROW_BYTES} B each, pinned tables"
        return Group(title, cases, self._params("both", "both", "pinned", count, ROW_BYTES, headline=True))

    def _bytes(self, memory: str) -> int:
        return self.table_bytes if memory == self.main else min(self.table_bytes, _SECOND_TABLE_BYTES)

    def _count(self, rows: int, row_bytes: int, memory: str = "") -> int:
        """Return how many rows to move at most: half of the table's, and what one call may move."""
        have = self._bytes(memory or self.main) // row_bytes
        return max(1, min(rows, have // 2, _CALL_BYTES // row_bytes))

    def _params(
        self,
        kind: str,
        direction: str,
        memory: str,
        count: int,
        row_bytes: int,
        ids: str = "uniform",
        headline: bool = False,
    ) -> dict[str, Any]:
        return {
            "kind": kind, "direction": direction, "memory": memory, "rows": count, "row_bytes": row_bytes, "ids": ids,
            "headline": headline, "table_bytes": self._bytes(memory),
        }  # fmt: skip


# --- what was found ---------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group that is a headline."""
    say: dict[str, Callable[[GroupResult], str]] = {"ways": _rows, "both": _rows, "overhead": _overhead}
    return [say[g.params["kind"]](g) for g in groups if g.params.get("headline") and g.ours and g.params["kind"] in say]


def _rows(group: GroupResult) -> str:
    ours = group.ours
    assert ours is not None
    rivals, unchecked = _rivals(group), group.unchecked
    text = f"{group.title}: {format_rate(ours.gb_per_s)} GB/s"
    if group.roof is not None:
        text += f", {format_share(group.share_of_roof(ours))} of {group.roof.name}"
        if unchecked is not None and unchecked is not ours:
            text += f", {format_share(group.share_of_roof(unchecked))} with check=False"
        engines = [case for case in group.ran if case.kind == "engine"]
        if engines:
            best = min(engines, key=lambda case: case.median_s)
            text += f" and {format_share(group.share_of_roof(best))} by {best.name}"
    return text + times_the_speed(ours, rivals) + noise(ours, unchecked, group.roof, *rivals)


def _rivals(group: GroupResult) -> list[CaseResult]:
    """Return the fastest way of torch alone, the plainest (t[idx]), and the fastest that uses CuPy or a view made with it."""
    others = sorted((case for case in group.ran if case.role == "other"), key=lambda case: case.median_s)
    views = [case for case in others if case.kind == "view"]
    torch_only = [case for case in others if case not in views]
    plain = [case for case in torch_only if case.kind == "plain"]
    return list({case.name: case for case in (*torch_only[:1], *plain[:1], *views[:1])}.values())


def _overhead(group: GroupResult) -> str:
    ours = group.ours
    assert ours is not None
    unchecked = group.unchecked
    text = f"{group.title}: {format_seconds(ours.median_host_s)} of host time a call"
    if unchecked is not None and unchecked is not ours:
        text += f", {format_seconds(unchecked.median_host_s)} with check=False"
    empty = next((case for case in group.ran if case.kind == "empty"), None)
    busy = [case for case in group.ran if case.role == "ours" and case.device_s]
    if busy and empty and empty.device_s:
        shown = ", ".join(f"{case.name} {format_seconds(case.device_s)}" for case in busy)
        text += f"; on the device {shown}, an empty launch {format_seconds(empty.device_s)}"
    return text + noise(ours, unchecked, empty)


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return rate and share of the roof by the bytes of a row, a table for each direction."""
    title = "{}, GB/s and share of a plain copy, by bytes of a row"
    return [
        pivot(title.format(direction), part, lambda group: f"{group.params['row_bytes']:,} B", _rate_and_share)
        for direction, part in split_by(sweep(groups), "direction").items()
    ]


def _rate_and_share(group: GroupResult, case: CaseResult) -> str:
    share = group.share_of_roof(case) if case.role != "roof" else None
    return format_rate(case.gb_per_s) + (f" ({format_share(share)})" if share is not None else "")


def sweep(groups: Iterable[GroupResult]) -> list[GroupResult]:
    """Return the groups of suite `transfer` that differ by direction and bytes of a row alone, in that order."""
    same = [group for group in groups if group.params.get("kind") == "ways" and group.params["ids"] == "uniform"]
    if not same:
        return []
    first = same[0].params
    batches = [g for g in same if g.params["memory"] == first["memory"] and g.params["rows"] >= first["rows"] // 8]
    chosen: dict[tuple[str, int], GroupResult] = {}
    for group in batches:
        chosen.setdefault((group.params["direction"], group.params["row_bytes"]), group)
    return [chosen[key] for key in sorted(chosen)]


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw rates, and shares of the roof, by the bytes of a row."""
    wide = sweep(groups)
    if not wide:
        return None
    figure = make_figure(11, 8)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    parts = {d: [group for group in wide if group.params["direction"] == d] for d in ("gather", "scatter")}
    lines = {direction: _sweep_names(part) for direction, part in parts.items()}
    # The ways of the two directions come in the same order: a line is the same idea in both.
    labels = [
        gather if gather == scatter else f"{gather} / {scatter}"
        for gather, scatter in zip(*lines.values(), strict=False)
    ]
    for column, (direction, part) in enumerate(parts.items()):
        sizes = [group.params["row_bytes"] for group in part]
        rate, share = panels[0][column], panels[1][column]
        for number, (name, label) in enumerate(zip(lines[direction], labels, strict=False)):
            cases = [group.by_name.get(name) for group in part]
            style = line_style(number, name in (DEFAULT, UNCHECKED))
            line(rate, sizes, [case and case.gb_per_s for case in cases], label, style)
            shares = [case and group.share_of_roof(case) for group, case in zip(part, cases, strict=True)]
            line(share, sizes, [value and 100 * value for value in shares], label, style)
        roofs = [group.roof and group.roof.gb_per_s for group in part]
        roof_name = next((group.roof.name for group in part if group.roof), "plain copy")
        line(rate, sizes, roofs, f"{roof_name} (roof)", {"color": INK, "ls": "--", "lw": 1.3})
        share.axhline(100, color=INK, ls="--", lw=1.3)
        moved = (
            f"up to {max(g.params['rows'] for g in part):,} rows a call, {part[0].params['memory']} table"
            if part
            else ""
        )
        rate.set_title(f"{direction}: {moved}", fontsize=11, color=INK)
        rate.set_yscale("log")
        share.set_xlabel("bytes of a row")
        for axes in (rate, share):
            tidy(axes)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [_short_bytes(size) for size in sizes])
    panels[0][0].set_ylabel("GB/s of rows")
    panels[1][0].set_ylabel("% of the plain copy")
    # Both directions have one axis.
    highest = min(_MOST_SHARE, panels[1][0].get_ylim()[1])
    panels[1][0].set_ylim(bottom=0)
    for share in panels[1]:
        end_at(share, highest)
    plain_numbers(panels[0][0])
    legend_below(figure, panels[0][0])
    return figure


def _sweep_names(groups: list[GroupResult]) -> list[str]:
    """Return the cases that make a line over `groups`, as many as there are colours."""
    roofs = {case.name for group in groups for case in group.ran if case.role == "roof"}
    names = [name for name in case_names(groups) if name not in roofs]
    return [name for name in names if sum(name in group.by_name for group in groups) > 1][: len(COLOURS)]


def _short_bytes(size: int) -> str:
    return f"{size // 1024} K" if size >= 1024 and size % 1024 == 0 else str(size)
