"""Pictures of recorded suites, one a suite, drawn from their JSON alone: old results can be drawn again at any time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from speedtransfer.benchmark import (
    shown_cache,
    shown_exchange,
    shown_lookup,
    shown_mixed,
    shown_ngram,
    shown_prefetch,
    shown_ranks,
    shown_vocabulary,
)
from speedtransfer.benchmark.drawing import (
    COLOURS,
    INK,
    QUIET,
    end_at,
    legend_below,
    line,
    line_style,
    plain_numbers,
    require_matplotlib,
    tidy,
)
from speedtransfer.benchmark.measure import DEFAULT, UNCHECKED, CaseResult, GroupResult
from speedtransfer.benchmark.report import groups_of, sweep
from speedtransfer.benchmark.units import format_count, format_seconds

# Percent of a plain copy, the most that the picture of transfers shows: more is a noisy roof, and would flatten the rest.
_MOST_SHARE = 160


def plot(result: dict[str, Any]) -> bytes | None:
    """Return the picture of a recorded suite as PNG; None where it has nothing to show."""
    make_figure = require_matplotlib()
    groups = [group for group in groups_of(result) if group.ran]
    draw = {
        "transfer": _transfer,
        "speedtorch": _speedtorch,
        "tax": _tax,
        "step": _step,
        "precision": _precision,
        "mixed": shown_mixed.draw,
        "memory": _memory,
        "prefetch": shown_prefetch.draw,
        "cache": shown_cache.draw,
        "lookup": shown_lookup.draw,
        "vocabulary": shown_vocabulary.draw,
        "ranks": shown_ranks.draw,
        "exchange": shown_exchange.draw,
        "ngram": shown_ngram.draw,
    }[result["suite"]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to set identical")  # one point only: it widens the axis
        figure = draw(make_figure, groups) if groups else None
        if figure is None:
            return None
        device = result["environment"]["device"] + (" (quick run)" if result["quick"] else "")
        figure.suptitle(device, fontsize=8, color=QUIET, parse_math=False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


# --- one function a suite -----------------------------------------------------------------------------------------------


def _transfer(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
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
            cases = [_cases(group).get(name) for group in part]
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
    names = _names(groups, lambda case: case.role != "roof")
    return [name for name in names if sum(name in _cases(group) for group in groups) > 1][: len(COLOURS)]


def _speedtorch(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    kinds = list(dict.fromkeys(group.params["kind"] for group in groups))
    names = _names(groups, lambda case: True)
    published = list(dict.fromkeys(name for group in groups for name in group.params["published"]))
    labels = [*names, *(f"K80, 2019: {name}" for name in published)]
    figure = make_figure(10, 1.8 + 0.45 * len(labels))
    axes = figure.subplots()
    height = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        part = [group for group in groups if group.params["kind"] == kind]  # one for each memory
        times = {case.name: case.median_s for group in part for case in group.ran}
        times_2019 = {name: s for group in part for name, s in group.params["published"].items()}
        seconds = [*map(times.get, names), *map(times_2019.get, published)]
        shown = [(place, s) for place, s in enumerate(seconds) if s]
        places = [place + (number - (len(kinds) - 1) / 2) * height for place, _ in shown]
        bars = axes.barh(places, [1e3 * s for _, s in shown], height * 0.92, color=COLOURS[number], label=kind)
        for bar, (place, _) in zip(bars, shown, strict=True):
            bar.set_alpha(1.0 if place < len(names) else 0.45)
        axes.bar_label(bars, [f" {format_seconds(s)}" for _, s in shown], fontsize=7.5, color=INK)
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


def _tax(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    from speedtransfer.benchmark.tax import COPIES, HOST, RESIDENT, pays

    titles = {"matmul": "matrix product, n x n", "mlp": "training step of an MLP, width n"}
    experiments = list(dict.fromkeys(group.params["experiment"] for group in groups))
    figure = make_figure(5.5 * len(experiments), 4.8)
    panels = figure.subplots(1, len(experiments), squeeze=False)[0]
    for axes, experiment in zip(panels, experiments, strict=True):
        part = sorted((g for g in groups if g.params["experiment"] == experiment), key=lambda g: g.params["size"])
        sizes = [group.params["size"] for group in part]
        times = {name: [_milliseconds(group, name) for group in part] for name in _names(part, lambda case: True)}
        for number, (name, values) in enumerate(times.items()):
            line(axes, sizes, values, name, line_style(number, False))
        for fast in (RESIDENT, COPIES) if all(group.params.get("cuda") for group in part) else ():
            size = pays(part, HOST, fast)[1]
            if size is not None:
                there = [(n, ms) for n, ms in zip(sizes, times[fast], strict=True) if ms is not None]
                _mark(axes, size, *zip(*there, strict=True))
        axes.set(xscale="log", yscale="log", xlabel="n", ylabel="milliseconds")
        axes.set_title(titles.get(experiment, experiment), fontsize=11, color=INK)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axes.minorticks_off()
        tidy(axes)
        plain_numbers(axes)
    legend_below(figure, panels[0])
    return figure


def _mark(axes: Any, size: float, sizes: Sequence[float], values: Sequence[Any]) -> None:
    """Mark where two lines cross, on the line of `values`."""
    at = float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))
    axes.plot([size], [at], "o", ms=13, mfc="none", mec=INK, mew=1.4, zorder=5)
    axes.annotate(
        f"crossing at {size:,.0f}", (size, at), (12, -16), textcoords="offset points", fontsize=8.5, color=INK
    )


def _step(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    groups = sorted((g for g in groups if g.params["experiment"] == "size"), key=lambda group: group.params["rows"])
    if not groups:
        return None
    figure = make_figure(8, 5.2)
    axes = figure.subplots()
    sizes = [group.params["rows"] for group in groups]
    for number, name in enumerate(_names(groups, lambda case: True)):
        ours = any(case.name == name and case.role == "ours" for group in groups for case in group.ran)
        label = name + _end_of(groups, name)
        line(axes, sizes, [_milliseconds(group, name) for group in groups], label, line_style(number, ours))
    axes.set(xscale="log", yscale="log", xlabel="rows of the table", ylabel="milliseconds a step")
    axes.set_xticks(sizes, [format_count(size) for size in sizes])
    axes.minorticks_off()
    axes.set_title("A training step: the cost must not grow with the table", fontsize=11, color=INK)
    tidy(axes)
    plain_numbers(axes)
    legend_below(figure, axes)
    return figure


def _end_of(groups: list[GroupResult], name: str) -> str:
    """Return why the line of case `name` ends before the last of `groups`, where that is for lack of room."""
    last = max(i for i, group in enumerate(groups) if name in _cases(group))
    failed = any(case.name == name and case.error for group in groups[last + 1 : last + 2] for case in group.cases)
    return f" (no room beyond {format_count(groups[last].params['rows'])} rows)" if failed else ""


def _precision(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    groups = sorted(groups, key=lambda group: group.params["batch"])
    figure = make_figure(10, 4.8)
    time, memory = figure.subplots(1, 2)
    sizes = [group.params["batch"] for group in groups]
    for number, name in enumerate(_names(groups, lambda case: True)):
        cases = [_cases(group).get(name) for group in groups]
        line(time, sizes, [_milliseconds(group, name) for group in groups], name, line_style(number, False))
        taken = [case and sum(case.memory.values()) / 1e9 for case in cases]
        line(memory, sizes, taken, name, line_style(number, False))
    time.set(yscale="log", ylabel="milliseconds a step", title="Time")
    memory.set(ylabel="GB, table and state (GPU: and a step)", title="Memory", ylim=(0, None))
    for axes in (time, memory):
        axes.set(xscale="log", xlabel="examples of a batch")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        tidy(axes)
    plain_numbers(time)
    legend_below(figure, time)
    return figure


def _memory(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    bars = [(group, case) for group in groups for case in group.ran if case.memory]
    if not bars:
        return None
    several = len({_table_of(group) for group, _ in bars}) > 1
    labels = [f"{case.name}\n{_table_of(group)}" if several else case.name for group, case in bars]
    figure = make_figure(9, 1.6 + (0.55 if several else 0.42) * len(bars))
    axes = figure.subplots()
    left = np.zeros(len(bars))
    for number, (key, label) in enumerate((("host_bytes", "host"), ("device_bytes", "device"))):
        sizes = np.array([case.memory.get(key, 0) / 1e9 for _, case in bars])
        if not sizes.any():
            continue  # a machine without a GPU has no device memory to tell of
        axes.barh(range(len(bars)), sizes, 0.7, left=left, color=COLOURS[number], label=label)
        left += sizes
    for place, total in enumerate(left):
        axes.annotate(f"{total:.3g}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), labels, fontsize=8.5, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GB")
    title = "Memory that a table takes" + ("" if several else f": {_table_of(bars[0][0])}")
    axes.set_title(title, fontsize=11, color=INK)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    legend_below(figure, axes)
    return figure


def _table_of(group: GroupResult) -> str:
    rows, dim, optimizer = (group.params.get(key, "") for key in ("rows", "dim", "optimizer"))
    return f"{rows:,} x {dim}" + (f", {optimizer}" if optimizer else "")


def _cases(group: GroupResult) -> dict[str, CaseResult]:
    return {case.name: case for case in group.ran}


def _names(groups: Sequence[GroupResult], wanted: Callable[[CaseResult], bool]) -> list[str]:
    return list(dict.fromkeys(case.name for group in groups for case in group.ran if wanted(case)))


def _milliseconds(group: GroupResult, name: str) -> float | None:
    case = _cases(group).get(name)
    return None if case is None else 1e3 * case.median_s


def _short_bytes(size: int) -> str:
    return f"{size // 1024} K" if size >= 1024 and size % 1024 == 0 else str(size)
