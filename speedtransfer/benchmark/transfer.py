"""Suite `transfer`: selected rows to the compute device and back, against PyTorch, CuPy and a plain copy.

Tables are much larger than the cache, and batches of ids are used in turn: this measures memory and the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.report import TextTable, lines_by, pivot
from speedtransfer.benchmark.results import (
    CaseResult,
    GroupResult,
    noise,
    split_by,
    times_the_speed,
)
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES
from speedtransfer.benchmark.transfer_groups import ROWS, Plan
from speedtransfer.benchmark.workload import default_table_bytes
from speedtransfer.engines import DIRECTIONS
from speedtransfer.errors import check_size
from speedtransfer.units import format_rate, format_seconds, format_share

NOTE = """\
The roof is one cudaMemcpy of page-locked memory; without CUDA it is the faster of torch's copy_ on all cores and a copy that \
writes past the cache. Batches with repeated ids (Zipf) can beat it: their rows are read once and sent often. Distinct ids \
exceed it only by noise or by what a cache still holds. "speedtransfer" is the call as anyone makes it, with all checks; \
check=False is what training uses, which knows that its ids are distinct and in range."""


def groups(
    device: torch.device,
    quick: bool,
    rows: int | None = None,
    table_bytes: int | None = None,
    seed: int = 0,
    **others: Any,
) -> list[Group]:
    """Make all groups of the suite; `rows` are those of a batch."""
    cuda = device.type == "cuda"
    plan = Plan(
        device,
        check_size((ROWS if cuda or not quick else ROWS // 2) if rows is None else rows, "rows", 1),
        check_size(
            default_table_bytes(device, quick) if table_bytes is None else table_bytes, "table_bytes", MIN_TABLE_BYTES
        ),
        seed,
    )
    found = [plan.moves(d, all_of_them=True, headline=True) for d in DIRECTIONS]
    sizes = (64, 4096) if quick else (4, 16, 64, 256, 1024, 4096, 16384)
    found += [plan.moves(d, row_bytes=size, headline=size == 256) for size in sizes for d in DIRECTIONS]
    if not quick:
        found += [plan.moves(d, rows=n, row_bytes=256) for n in (1000, 10_000, 1_000_000) for d in DIRECTIONS]
    found += [plan.moves(d, ids="zipf") for d in DIRECTIONS]
    found += [plan.overhead(d) for d in DIRECTIONS]
    memories = ("pageable", "mmap", "device") if cuda else () if quick else ("mmap",)
    found += [plan.moves(d, memory=memory) for memory in memories for d in DIRECTIONS]
    # In a small table several sizes lead to the same number of rows; the first one keeps its place.
    return list({group.title: group for group in reversed(found)}.values())[::-1]


# --- report -------------------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Describe each group that is a headline."""
    describe: dict[str, Callable[[GroupResult], str]] = {"ways": _rows, "overhead": _overhead}
    chosen = [g for g in groups if g.params.get("headline") and g.ours and g.params["kind"] in describe]
    return [describe[group.params["kind"]](group) for group in chosen]


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
    """Return the fastest method of torch, the simplest (t[idx]), and the fastest that uses CuPy or a view made with it."""
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
    """Return rate and share of the roof by row size, a table for each direction."""
    title = "{}, GB/s and share of a plain copy, by bytes of a row"
    return [
        pivot(title.format(direction), part, lambda group: f"{group.params['row_bytes']:,} B", _rate_and_share)
        for direction, part in split_by(sweep(groups), "direction").items()
    ]


def _rate_and_share(group: GroupResult, case: CaseResult) -> str:
    share = group.share_of_roof(case) if case.role != "roof" else None
    return format_rate(case.gb_per_s) + (f" ({format_share(share)})" if share is not None else "")


def sweep(groups: Iterable[GroupResult]) -> list[GroupResult]:
    """Return the groups that differ by direction and row size only, in that order."""
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
    """Draw rates by row size, a panel for each direction."""
    panels = split_by(sweep(groups), "direction")
    return lines_by(make_figure, panels, "row_bytes", "bytes of a row", lambda case: case.gb_per_s, "GB/s of rows")
