"""Suite `step`: a whole training step (forward, backward, step, zero_grad). Its cost must not grow with the table."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from speedtransfer.benchmark import step_idle, step_models
from speedtransfer.benchmark.contenders import (
    DIM,
    PLANES,
    ROW_BYTES,
    Batches,
    Contender,
    Step,
    contenders,
    fitting,
)
from speedtransfer.benchmark.environment import HOST_SHARE, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.report import TextTable, group_table, lines_by, pivot, show_time
from speedtransfer.benchmark.results import CaseResult, GroupResult, noise, sorted_by, split_by
from speedtransfer.benchmark.step_idle import HISTORY, QUICK_HISTORY
from speedtransfer.errors import check_size
from speedtransfer.units import format_count, format_ratio, format_seconds

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that. Steps with new ids are timed after many others, so that idle rows "
    "have missed as many as in training."
)
_ROWS, _LOOKUPS = 1_000_000, 98_304  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
# Experiments with exact idle rows.
_EXACT = (step_models.SMALL, step_models.MANY, step_models.WHOLE, step_idle.EXPERIMENT)


def groups(
    device: torch.device,
    quick: bool,
    rows: int | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    history: int | None = None,
    **others: Any,
) -> list[Group]:
    """Make all groups of the suite.

    `rows` are those of the smallest table, `max_bytes` limits the tables of a group on host and device, `history` is the
    number of untimed steps that let rows become idle.
    """
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most = max_bytes or (_QUICK_BYTES if quick else float("inf"))
    batches = Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), seed)
    room = {"host": min(most, host_room())}
    if device.type == "cuda":
        room["device"] = min(most, HOST_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def group(size: int, chosen: list[Contender], experiment: str, title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        params = {"experiment": experiment, "rows": size, "dim": DIM}
        return Group(title, functools.partial(_compare, chosen, device, size, batches, room), params)

    every = contenders(device)
    in_memory, in_file = ([k for k in every if (k.memory == "mmap") == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: a small one is compared, a large one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [group(size, every if size == rows else in_memory, "size") for size in sizes]
    history = check_size(history or (QUICK_HISTORY if quick else HISTORY), "history", 1)
    found += step_models.groups(device, rows, batches.seed, history, quick)
    found += step_idle.groups(device, batches, room, history, quick)
    if not quick:
        found.append(group(4 * rows, in_file, "file", ", in a file"))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and multiples of it up to `last`: times four if that gives at least three sizes, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


def _compare(
    chosen: list[Contender], device: torch.device, rows: int, batches: Batches, room: dict[str, float]
) -> list[Case]:
    # Reference cycles may hold tables of the previous group.
    gc.collect()
    return [
        Case.of(contender.name, Step(contender, rows, device, batches), contender.role, error=error)
        for contender, error in fitting(chosen, rows, room)
    ]


# --- report -------------------------------------------------------------------------------------------------------------


def exact_and_lazy(group: GroupResult) -> tuple[CaseResult, CaseResult] | None:
    """Return the exact and the lazy step of a group that compares them, else None."""
    ours = [case for case in group.ran if case.role == "ours"]
    exact, lazy = ([case for case in ours if (case.kind == "exact") == wanted] for wanted in (True, False))
    compared = group.params["experiment"] in _EXACT and exact and lazy
    return (exact[0], lazy[0]) if compared else None


def _idle(group: GroupResult, exact: CaseResult, lazy: CaseResult) -> str:
    ratio = format_ratio(exact.median_s / lazy.median_s)
    others = [case for case in group.ran if case.role == "other"]
    text = f"{group.title}: {format_seconds(exact.median_s)} with idle=exact"
    text += f", {ratio} the {format_seconds(lazy.median_s)} with lazy"
    return text + "".join(f", {format_ratio(exact.median_s / c.median_s)} of {c.name}" for c in others)


def _small(group: GroupResult, exact: CaseResult, lazy: CaseResult) -> str:
    others = [case for case in group.ran if case.role == "other"]
    text = f"{group.title}: {format_seconds(lazy.median_s)}"
    text += "".join(f", {format_ratio(lazy.median_s / case.median_s)} of {case.name}" for case in others)
    return f"{text}; {format_seconds(exact.median_s)} with idle=exact"


def _beside_dense(group: GroupResult) -> str:
    exact, dense = group.ran
    share = format_ratio(exact.median_s / dense.median_s)
    return f"{group.title}: {format_seconds(exact.median_s)} with idle=exact, {share} of {dense.name}"


def sentences(groups: list[GroupResult]) -> list[str]:
    """Say what exact idle rows, small steps and large tables cost."""
    pairs = [(group, *pair) for group in groups if (pair := exact_and_lazy(group))]
    lines = [
        (_small if group.params["experiment"] == step_models.SMALL else _idle)(group, exact, lazy) + noise(*group.ran)
        for group, exact, lazy in pairs
    ]
    lines += [
        _beside_dense(group) + noise(*group.ran)
        for group in groups
        if len(group.ran) == 2 and group.params["experiment"] in _EXACT and exact_and_lazy(group) is None
    ]
    groups = sorted_by((g for g in groups if g.params["experiment"] == "size"), "rows")
    first = {case.name: (group, case) for group in reversed(groups) for case in group.ran}
    last = {case.name: (group, case) for group in groups for case in group.ran}
    for name, (group, case) in last.items():
        small, before = first[name]
        if group is not small:
            growth = format_ratio(case.median_s / before.median_s)
            sizes = f"{format_count(small.params['rows'])} to {format_count(group.params['rows'])} rows"
            lines.append(f"{name}: {format_seconds(case.median_s)} a step, {growth} from {sizes}" + noise(case, before))
    return lines


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return times by table size, and all figures of the other experiments."""
    parts = split_by(groups, "experiment")
    by_size = parts.pop("size", [])
    table = pivot("a step, by rows of the table", by_size, lambda group: format_count(group.params["rows"]), show_time)
    return [table, *(group_table(group) for part in parts.values() for group in part)]


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the time of a step by table size."""
    by_size = sorted_by((group for group in groups if group.params["experiment"] == "size"), "rows")
    title = "A training step: the cost must not grow with the table"
    return lines_by(make_figure, {title: by_size}, "rows", "rows of the table")
