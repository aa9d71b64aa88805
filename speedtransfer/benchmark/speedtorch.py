"""Suite `speedtorch`: the benchmark that SpeedTorch published, on this machine, with today's torch beside it.

131,072 rows of a table of 1,000,000 x 128 float32, kept in CUDA memory or in page-locked host memory, go to a CUDA tensor and
back (https://github.com/Santosh-Gupta/SpeedTorch; its issue #10 quotes the code). Its ids were drawn with repeats; here they
are distinct, so that the rows written can be checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.methods import CHECKS, Method, our_methods
from speedtransfer.benchmark.report import PUBLISHED as PUBLISHED_ROW
from speedtransfer.benchmark.report import TextTable, pivot, show_time
from speedtransfer.benchmark.results import GroupResult, case_names, noise, split_by, times_the_speed
from speedtransfer.benchmark.rival_methods import BEST_TORCH, CUPY, OVERLAPPED_TORCH, PLAIN_TORCH, other_methods
from speedtransfer.benchmark.workload import Tables, Workload, workload
from speedtransfer.drawing import INK, QUIET, bars_beside, legend_below, plain_numbers, tidy
from speedtransfer.engines import Direction
from speedtransfer.errors import check_size
from speedtransfer.units import format_seconds

ROWS, TABLE_ROWS, DIM = 131_072, 1_000_000, 128

# Seconds on a Tesla K80 with a 2-core CPU, from the table in SpeedTorch's README (September 2019): to, from, sum.
PUBLISHED = {
    "SpeedTorch, PinnedCPU": (0.0154, 0.0065, 0.0219),
    "SpeedTorch, cuda": (0.0087, 0.0035, 0.0122),
    "PyTorch, PinnedCPU": (0.0478, 2.6641, 2.7119),
    "PyTorch, cuda": (0.0014, 0.0341, 0.0355),
}

NOTE = """\
Where 110x and 410x came from. SpeedTorch's README of September 2019 compares CuPy kernels that reach across the bus \
with PyTorch's t[idx] and t[idx] = rows on a page-locked CPU tensor, on a Tesla K80 with two CPU cores: 2.66 s against \
6.5 ms for writing rows back (410x; an earlier run had 2.82 s against 25.5 ms, 110x), 48 ms against 15 ms for fetching \
them (3.1x). These rows are 67 MB: in 2.66 s that is 25 MB/s, which no bus is slow enough to explain. PyTorch had a \
fault then: its indexed assignment walked rows in the wrong order. pytorch#24083 (August 2019) measures 4.38 s before \
and 0.044 s after the repair, for 300,000 x 128 on one thread, and the README names versions 1.1 and 1.2 as those with \
an indexing fault. Our inference: scaled to 131,072 rows that is 1.9 s of the 2.66 s before and 0.02 s after it, so \
nearly all of 110x and 410x was the fault, not the transfer. What remained, about 3x, is real: a CPU with few cores \
gathers slowly through t[idx], which also allocates its result each time. "PyTorch at its best" (index_select or \
index_copy_ through page-locked memory, on all cores, in parts that cross the bus while the host works on the next) is what a \
comparison should face."""


_KINDS: tuple[tuple[str, str, tuple[Direction, ...]], ...] = (
    ("to", "to the compute device", ("gather",)),
    ("from", "from the compute device", ("scatter",)),
    ("sum", "sum of to and from", ("gather", "scatter")),
)
_PLACES = {"device": "cuda", "pageable": "CPU"}  # what SpeedTorch calls our memories


def groups(device: torch.device, quick: bool, rows: int = ROWS, seed: int = 0, **others: Any) -> list[Group]:
    """Make groups for both directions and their sum; `rows` are moved, and the table keeps its proportion to them."""
    rows = check_size(rows, "rows", 1)
    table_bytes = 4 * DIM * max(rows, rows * TABLE_ROWS // ROWS)
    memories = ("pinned", "device") if device.type == "cuda" else ("pageable",)
    tables = Tables(device)

    def make(memory: str, directions: Sequence[Direction]) -> list[Case]:
        work = workload(tables.table(memory, table_bytes, DIM), rows, seed=seed)
        return _cases(work, directions)

    found = []
    for memory in memories:
        for column, (kind, title, directions) in enumerate(_KINDS):
            place = _PLACES.get(memory, memory)
            published = {
                name: seconds[column]
                for name, seconds in PUBLISHED.items()
                if memory == "pageable" or name.endswith({"pinned": "PinnedCPU"}.get(place, place))
            }
            found.append(
                Group(
                    f"{title}, {rows:,} rows of {DIM} float32, {place} table",
                    functools.partial(make, memory, directions),
                    {"kind": kind, "memory": place, "published": published},
                )
            )
    return found


def _cases(work: Workload, directions: Sequence[Direction]) -> list[Case]:
    """Make a case of each method, with SpeedTorch's names, that moves rows in one direction after the other."""
    place = _PLACES.get(work.table.memory, work.table.memory)
    columns = [_named(work, direction) for direction in directions]
    turn = cycle(work.sets)
    cases = []
    for name, first in columns[0].items():
        steps = [column[name] for column in columns]

        def run(steps: list[Method] = steps) -> None:
            ids = turn()
            for step in steps:
                step.move(ids)

        def check(steps: list[Method] = steps) -> None:
            for step, direction in zip(steps, directions, strict=True):
                CHECKS[direction](step, work)

        payload = work.payload_bytes * len(directions)
        queues = all(step.queues for step in steps)
        cases.append(Case(f"{name} ({place})", run, check, payload, first.role, queues=queues))
    return cases


def _named(work: Workload, direction: Direction) -> dict[str, Method]:
    default, unchecked, *_ = our_methods(work, direction)
    others = {method.name: method for method in other_methods(work, direction)}
    names = {
        "SpeedTorch's way: CuPy t[idx]": (CUPY[direction],),
        "PyTorch t[idx]": (PLAIN_TORCH[direction], "t[idx]", "t[idx] = rows"),
        "PyTorch at its best": (OVERLAPPED_TORCH[direction], "index_select(out=)", "index_copy_"),
        "PyTorch through pinned memory in one piece": (BEST_TORCH[direction],),
    }
    found = {default.name: default, unchecked.name: unchecked}
    for name, candidates in names.items():
        method = next((others[candidate] for candidate in candidates if candidate in others), None)
        if method is not None:
            found[name] = method
    return found


# --- report -------------------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Compare times, for each memory and direction."""
    lines = []
    for group in groups:
        if group.ours is None:
            continue
        ours, *others = [case for case in group.ran if case.role == "ours"]
        rivals = [case for case in group.ran if case.role == "other"]
        text = f"{group.title}: {ours.name} {format_seconds(ours.median_s)}"
        text += "".join(f", {case.name} {format_seconds(case.median_s)}" for case in others)
        lines.append(text + times_the_speed(ours, rivals) + noise(ours, *others, *rivals))
    return lines


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return the times for each memory, followed by those of 2019."""
    return [_with_published(part) for part in split_by(groups, "memory").values()]


def _with_published(groups: list[GroupResult]) -> TextTable:
    memory = groups[0].params.get("memory")
    title = "time a call" + (f", {memory} table" if memory else "")
    table = pivot(title, groups, lambda group: str(group.params["kind"]), show_time)
    published = [group.params["published"] for group in groups]
    names = dict.fromkeys(name for column in published for name in column)
    extra = [[PUBLISHED_ROW + name, *(format_seconds(column.get(name)) for column in published)] for name in names]
    return table._replace(rows=table.rows + extra)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a bar for each method and direction; those of 2019 are pale."""
    kinds = list(dict.fromkeys(group.params["kind"] for group in groups))
    names = case_names(groups)
    published = list(dict.fromkeys(name for group in groups for name in group.params["published"]))
    labels = [*names, *(f"K80, 2019: {name}" for name in published)]
    figure = make_figure(10, 1.8 + 0.45 * len(labels))
    axes = figure.subplots()
    for number, kind in enumerate(kinds):
        part = [group for group in groups if group.params["kind"] == kind]  # one for each memory
        times = {case.name: case.median_s for group in part for case in group.ran}
        times_2019 = {name: s for group in part for name, s in group.params["published"].items()}
        seconds = [*map(times.get, names), *map(times_2019.get, published)]
        shown = {place: 1e3 * s for place, s in enumerate(seconds) if s}
        texts = [format_seconds(s) for s in seconds if s]
        for bar, place in zip(bars_beside(axes, number, len(kinds), shown, texts, kind, 7.5), shown, strict=True):
            bar.set_alpha(1.0 if place < len(names) else 0.45)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.axhline(len(names) - 0.5, color=QUIET, lw=0.8, ls=":")
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.02)
    axes.set_xlabel("milliseconds a call, less is better (log scale)")
    plain_numbers(axes, "x")
    axes.set_title(
        f"SpeedTorch's benchmark: {groups[0].title.split(', ', 1)[1].rpartition(', ')[0]}", fontsize=11, color=INK
    )
    legend_below(figure, axes)
    return figure
