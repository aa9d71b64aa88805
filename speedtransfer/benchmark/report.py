"""Reports of recorded suites from their JSON: sentences, tables and a picture, as the module of each suite declares."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from speedtransfer import drawing
from speedtransfer.benchmark.measure import SUITES, Suite
from speedtransfer.benchmark.results import CaseResult, GroupResult, case_names
from speedtransfer.errors import format_bytes
from speedtransfer.units import format_count, format_rate, format_ratio, format_seconds, format_share

Show = Callable[[GroupResult, CaseResult], str]


class TextTable(NamedTuple):
    """A table of texts whose first column names the rows; those in `ours` are of this library."""

    title: str
    header: list[str]
    rows: list[list[str]]
    ours: frozenset[str] = frozenset()


def groups_of(result: dict[str, Any]) -> list[GroupResult]:
    """Return the groups of a recorded suite."""
    return [GroupResult.from_json(group) for group in result["groups"]]


# --- what is shown of a case --------------------------------------------------------------------------------------------


def show_time(group: GroupResult, case: CaseResult) -> str:
    """Format the time of a case."""
    return format_seconds(case.median_s)


def show_held(group: GroupResult, case: CaseResult) -> str:
    """Format the memory of a case, of host and device together."""
    return format_bytes(sum(case.memory.values())) if case.memory else ""


def show_rate(group: GroupResult, case: CaseResult) -> str:
    """Format GB/s and the share of the roof; nothing for a case without payload."""
    share = group.share_of_roof(case) if case.role != "roof" else None
    return format_rate(case.gb_per_s) + (f" ({format_share(share)})" if share is not None else "")


def show_figure(name: str, form: str = "", scale: float = 1.0) -> Show:
    """Return what formats a figure of a case, by default with four digits; "" where there is none."""

    def show(group: GroupResult, case: CaseResult) -> str:
        value = scale * case.figures.get(name, 0.0)
        return (form or ("{:,.4g}" if abs(value) < 1e4 else "{:,.0f}")).format(value) if name in case.figures else ""

    return show


def _describe_rate(group: GroupResult, case: CaseResult) -> str:
    share = group.share_of_roof(case)
    return "" if share is None else f"{format_rate(case.gb_per_s)} GB/s, {format_share(share)} of the roof"


def _ratio(group: GroupResult, case: CaseResult) -> str:
    return format_ratio(case.median_s / group.ran[0].median_s)


def _has_times(group: GroupResult) -> bool:
    """Return whether a group is about time: cases were timed, and not only for their memory."""
    ran = group.ran
    return all(case.samples_s for case in ran) and (any(c.figures for c in ran) or not any(c.memory for c in ran))


# --- sentences ----------------------------------------------------------------------------------------------------------


def headlines(suite: Suite, groups: Iterable[GroupResult]) -> list[str]:
    """Return a sentence on each group that stands alone: its first case, and the time of each other over that of the first."""
    groups = [group for group in groups if group.ran]
    alone = [group for group in _in_series(suite, groups).get("", ()) if group.params.get("headline", True)]
    about: Callable[..., list[str]] = suite.declared("about", lambda groups: [])
    return [*about(groups), *(_sentence(group, suite.declared("describe", _describe_rate)) for group in alone)]


def _sentence(group: GroupResult, describe: Show) -> str:
    first, parts = group.ran[0], []
    for case in group.ran:
        said = [describe(group, case), "noisy" if case.noisy else ""]
        if _has_times(group):
            said.insert(0, show_time(group, case) if case is first else _ratio(group, case))
        shown, *more = [*filter(None, said), ""]
        parts.append(f"{case.name} {shown}" + (f" ({', '.join(filter(None, more))})" if any(more) else ""))
    return f"{group.title}: {'; '.join(parts)}"


# --- tables -------------------------------------------------------------------------------------------------------------


def _in_series(suite: Suite, groups: Iterable[GroupResult]) -> dict[str, list[GroupResult]]:
    """Return groups by the title of their series, in the order of what they differ by; "": those that stand alone.

    Where several groups of a series have the same value the first is in it.
    """
    by = suite.declared("BY", None)
    title = suite.declared("series", lambda group: suite.title if by else "")
    found: dict[str, dict[Any, GroupResult]] = {}
    for number, group in enumerate(groups):
        name, value = title(group), group.params.get(by[0]) if by else None
        if not name or value in found.get(name, {}):
            name, value = "", number
        found.setdefault(name, {})[value] = group
    return {name: [part[value] for value in sorted(part)] for name, part in found.items()}


def series_tables(suite: Suite, groups: Iterable[GroupResult]) -> list[TextTable]:
    """Return the tables of each series: a row for each case, a column for each group."""
    columns: dict[str, Show] = suite.declared("COLUMNS", {"time": show_time})
    parts = {name: part for name, part in _in_series(suite, groups).items() if name}
    tables = [
        _pivot(suite, f"{name}, {title}" if len(parts) > 1 else title, part, show)
        for name, part in parts.items()
        for title, show in columns.items()
    ]
    return [table for table in tables if table.rows]


def _pivot(suite: Suite, title: str, groups: list[GroupResult], show: Show) -> TextTable:
    key, label = suite.declared("BY", None)
    found = [{case.name: show(group, case) for case in group.ran} for group in groups]
    # A case of few groups would be a row of blanks.
    names = [n for n in case_names(groups) if 2 * sum(n in cells for cells in found) >= len(found)]
    names = [name for name in names if any(column.get(name) for column in found)]
    ours = frozenset(case.name for group in groups for case in group.ran if case.role == "ours")
    rows = [[name, *(column.get(name, "") for column in found)] for name in names]
    return TextTable(f"{title}, by {label}", ["", *(f"{group.params[key]:,}" for group in groups)], rows, ours)


def group_table(suite: Suite, group: GroupResult) -> TextTable:
    """Return all figures of a group, fastest case first, without empty columns; or `COLUMNS` of a suite without series."""
    cases, own = group.ran, None if suite.declared("BY", None) else suite.declared("COLUMNS", None)
    if own is None and _has_times(group):
        cases = sorted(cases, key=lambda case: case.median_s)
    header = {"": lambda group, case: case.name, **(_every_column(group) if own is None else own)}
    rows = [[show(group, case) for show in header.values()] for case in cases]
    kept = [i for i in range(len(header)) if not i or any(row[i] for row in rows)]
    ours = frozenset(case.name for case in cases if case.role == "ours")
    return TextTable(group.title, [list(header)[i] for i in kept], [[row[i] for i in kept] for row in rows], ours)


def _every_column(group: GroupResult) -> dict[str, Show]:
    """Return what there is to show of the cases of a group."""
    columns: dict[str, Show] = {}
    if group.ran and _has_times(group):
        columns["GB/s"] = lambda group, case: format_rate(case.gb_per_s)
        if group.roof is not None:
            columns["of roof"] = lambda group, case: (
                format_share(group.share_of_roof(case)) if case.role != "roof" else "roof"
            )
        columns |= {f"x {group.ran[0].name}": _ratio, "median": show_time}
        columns["quartiles"] = lambda group, case: (
            " to ".join(map(format_seconds, case.quartiles_s)) if len(case.samples_s) > 1 else ""
        )
        if group.params.get("kind") == "overhead":
            columns["host"] = lambda group, case: format_seconds(case.median_host_s)
    names = dict.fromkeys(name for case in group.ran for name in case.figures)
    columns |= {name.replace("_", " "): show_figure(name) for name in names}
    for place in ("host", "device"):
        columns[f"{place} memory"] = lambda group, case, key=f"{place}_bytes": (  # type: ignore[misc]
            format_bytes(case.memory[key]) if key in case.memory else ""
        )
    return columns


# --- pictures -----------------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any]) -> bytes | None:
    """Return the picture of a recorded suite as PNG: lines of each series, else bars; None if there is nothing to show."""
    make_figure, suite = drawing.require_matplotlib(), SUITES[result["suite"]]
    groups = [group for group in groups_of(result) if group.ran]
    if not groups or suite.declared("VALUE", True) is None:
        return None
    with warnings.catch_warnings():
        # A single point, for which matplotlib widens the axis.
        warnings.filterwarnings("ignore", message="Attempting to set identical")
        panels = {title: part for title, part in _in_series(suite, groups).items() if title}
        drawn = _curves if suite.declared("CURVES", None) else _bars
        figure = _lines(make_figure, suite, panels) if panels else drawn(make_figure, suite, groups)
        device = result["environment"]["device"] + (" (quick run)" if result["quick"] else "")
        figure.suptitle(device, fontsize=8, color=drawing.QUIET, parse_math=False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


_MILLISECONDS = (lambda case: 1e3 * case.median_s, "milliseconds, less is better")


def _bars(make_figure: Callable[..., Any], suite: Suite, groups: Sequence[GroupResult]) -> Any:
    """Draw a panel for each group, `ACROSS` in a row, with a bar for each case, followed by what is said of it."""
    describe, (value, label) = suite.declared("describe", _describe_rate), suite.declared("VALUE", _MILLISECONDS)
    height, across = max(len(group.ran) for group in groups), suite.declared("ACROSS", 1)
    rows = -(-len(groups) // across)
    figure = make_figure(11 if across == 1 else 7 * across, 0.8 + (0.7 + 0.32 * height) * rows)
    for axes, group in zip(figure.subplots(rows, across, squeeze=False).flat, groups, strict=False):
        times = [show_time] if _has_times(group) else []
        texts = [", ".join(filter(None, (show(group, case) for show in (*times, describe)))) for case in group.ran]
        colours = [drawing.COLOURS[0] if case.role == "ours" else drawing.PALE for case in group.ran]
        names, values = zip(*((case.name, value(case) or 0.0) for case in group.ran), strict=True)
        drawing.bars(axes, names, values, texts, colours, room=0.8)
        if suite.declared("LOGARITHMIC", False):
            axes.set(xscale="log", xlim=(min(values) / 3, 5 * max(values)), xticks=[])
            axes.minorticks_off()
        axes.set_title(group.title, fontsize=10, color=drawing.INK, loc="left", parse_math=False)
    figure.supxlabel(label, fontsize=9, color=drawing.INK)
    return figure


def _lines(make_figure: Callable[..., Any], suite: Suite, panels: dict[str, list[GroupResult]]) -> Any:
    """Draw a panel for each series, with a line for each case."""
    (key, by), (value, label) = suite.declared("BY", None), suite.declared("VALUE", _MILLISECONDS)
    figure = make_figure(1 + 5.4 * len(panels), 4.8)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, groups) in zip(row, panels.items(), strict=True):
        sizes = [group.params[key] for group in groups]
        for number, name in enumerate(case_names(groups)):
            cases = [group.by_name.get(name) for group in groups]
            ours = any(case is not None and case.role == "ours" for case in cases)
            drawing.line(axes, sizes, [case and value(case) for case in cases], name, drawing.line_style(number, ours))
        axes.set(xscale="log", yscale="log", xlabel=by, ylabel=label)
        axes.set_xticks(sizes, [format_count(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(title, fontsize=11, color=drawing.INK)
        drawing.tidy(axes)
        drawing.plain_numbers(axes)
    drawing.legend_below(figure, row[0])
    return figure


def _curves(make_figure: Callable[..., Any], suite: Suite, groups: Sequence[GroupResult]) -> Any:
    """Draw a row for each group and a panel for each of `CURVES`; lines on each other are both visible, the later thinner."""
    curves: dict[str, tuple[str, str]] = suite.declared("CURVES", {})
    figure = make_figure(3 + 4.5 * len(curves), 4.4 * len(groups))
    panels = figure.subplots(len(groups), len(curves), squeeze=False)
    for row, group in zip(panels, groups, strict=True):
        for axes, (key, (title, scale)) in zip(row, curves.items(), strict=True):
            for number, case in enumerate(group.ran):
                found, last = case.values.get(key, []), len(group.ran) - 1
                steps = case.values.get(f"{key}_steps") or group.params.get("steps_shown") or range(1, len(found) + 1)
                style = {"color": drawing.COLOURS[number], "lw": 1 + 5 * (last - number) / max(last, 1)}
                if found:
                    axes.plot(steps[len(steps) - len(found) :], found, label=case.name, **style)
            axes.set(yscale=scale, xlabel="step")
            axes.set_title(title, fontsize=10, color=drawing.INK)
            drawing.tidy(axes)
    drawing.legend_below(figure, max(panels.flat, key=lambda axes: len(axes.lines)))
    return figure


# --- markdown -----------------------------------------------------------------------------------------------------------


def commit_and_date(result: dict[str, Any]) -> str:
    """Return by which code a result was measured, and when."""
    facts = result["environment"]
    return f"commit {facts['commit'][:12]}{' with changes' * bool(facts['dirty'])}, {facts['date'][:10]}"


def markdown(result: dict[str, Any], short: bool = False) -> str:
    """Return the figures of a recorded suite as markdown; `short`: without the tables of groups that stand alone."""
    suite = SUITES[result["suite"]]
    groups = [group for group in groups_of(result) if group.ran]
    alone = [] if short else _in_series(suite, groups).get("", [])
    tables = series_tables(suite, groups)[: 1 if short else None]
    facts, versions = result["environment"], result["environment"]["versions"]
    about = [facts["device"], *(f"{name} {versions[name]}" for name in ("torch", "cupy") if versions.get(name))]
    about += [commit_and_date(result), *["quick run: small sizes and few samples"] * bool(result.get("quick"))]
    medians = "; medians; x: times that of the first" * any(group.params.get("headline", True) for group in groups)
    parts = [f"**{suite.title}** ({', '.join(about)}{medians})"]
    parts += ["\n".join(f"- {line}" for line in headlines(suite, groups))]
    parts += [markdown_table(table) for table in [*tables, *(group_table(suite, group) for group in alone)]]
    if not short:
        parts += [suite.declared("NOTE", ""), "\n".join(f"- not run: {line}" for line in _missing(groups_of(result)))]
    return "\n\n".join(filter(None, parts))


def _missing(groups: Sequence[GroupResult]) -> Iterator[str]:
    """Yield the groups that could not run, then the cases, with the reason."""
    yield from (f"{group.title}: {group.skipped}" for group in groups if group.skipped)
    yield from (f"{group.title}, {case.name}: {case.error}" for group in groups for case in group.cases if case.error)


def markdown_table(table: TextTable) -> str:
    """Return a table as markdown, with its title as the header of the first column."""
    lines = [[table.title, *table.header[1:]], ["---", *("---:" for _ in table.header[1:])]]
    lines += [[f"**{name}**" if name in table.ours else name, *rest] for name, *rest in table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
