"""Reports of recorded suites from their JSON: tables, sentences and a picture, which the module of each suite defines."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from speedtransfer.benchmark.results import CaseResult, GroupResult, case_names
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.drawing import (
    INK,
    QUIET,
    bars,
    legend_below,
    line,
    line_style,
    plain_numbers,
    require_matplotlib,
    tidy,
)
from speedtransfer.errors import format_bytes
from speedtransfer.units import format_count, format_rate, format_ratio, format_seconds, format_share

Show = Callable[[GroupResult, CaseResult], str]


class TextTable(NamedTuple):
    """A table of texts whose first column names the rows; those in `ours` are of this library."""

    title: str
    header: list[str]
    rows: list[list[str]]
    ours: frozenset[str] = frozenset()

    def without(self, *labels: str) -> TextTable:
        """Return the table without some columns."""
        kept = [i for i, label in enumerate(self.header) if label not in labels]
        rows = [[row[i] for i in kept] for row in self.rows]
        return self._replace(header=[self.header[i] for i in kept], rows=rows)


def groups_of(result: dict[str, Any]) -> list[GroupResult]:
    """Return the groups of a recorded suite."""
    return [GroupResult.from_json(group) for group in result["groups"]]


def group_table(group: GroupResult) -> TextTable:
    """Return all figures of a group, fastest case first, without empty columns."""
    base = group.ours or next(iter(group.ran), None)
    overhead = group.params.get("kind") == "overhead"
    figures = any(case.figures for case in group.ran)
    columns: list[tuple[str, Callable[[CaseResult], str]]] = [
        ("GB/s", lambda case: format_rate(case.gb_per_s)),
        ("of roof", lambda case: format_share(group.share_of_roof(case)) if case.role != "roof" else "roof"),
        (
            f"time / {base.name}" if figures and base else "time / ours",
            lambda case: format_ratio(case.median_s / base.median_s) if base and group.ours else "",
        ),
        ("median", lambda case: format_seconds(case.median_s)),
        ("quartiles", lambda case: " to ".join(format_seconds(s) for s in case.quartiles_s)),
        ("host", lambda case: format_seconds(case.median_host_s) if overhead else ""),
        ("device", lambda case: format_seconds(case.device_s) if overhead and case.device_s else ""),
        ("moved", lambda case: format_bytes(case.figures["moved_bytes"]) if "moved_bytes" in case.figures else ""),
        ("loss", lambda case: f"{case.figures['loss']:.4f}" if "loss" in case.figures else ""),
        ("accuracy", accuracy),
        ("steps", lambda case: f"{case.figures['steps']:,.0f}" if "steps" in case.figures else ""),
        ("sent a step", sent),
        ("host memory", lambda case: _memory(case, "host_bytes")),
        ("device memory", lambda case: _memory(case, "device_bytes")),
    ]
    cases = sorted(group.ran, key=lambda case: case.median_s)
    if any(case.memory for case in cases) and not figures:
        # The group is about memory, not time.
        cases, columns = group.ran, columns[-2:]
    elif group.roof is None or figures:
        columns = [column for column in columns if column[0] != "of roof"]
    rows = [[case.name, *(show(case) for _, show in columns)] for case in cases]
    kept = [0, *(i for i in range(1, len(columns) + 1) if any(row[i] for row in rows))]
    header = ["", *(label for label, _ in columns)]
    ours = frozenset(case.name for case in cases if case.role == "ours")
    return TextTable(group.title, [header[i] for i in kept], [[row[i] for i in kept] for row in rows], ours)


def accuracy(case: CaseResult) -> str:
    """Return the accuracy as a percentage, or "" if there is none."""
    return f"{100 * case.figures['accuracy']:.1f}%" if "accuracy" in case.figures else ""


def sent(case: CaseResult) -> str:
    """Return the bytes that a process sends, counted or computed, or "" if there are none."""
    if "sent_bytes" in case.figures:
        return format_bytes(case.figures["sent_bytes"])
    computed = case.figures.get("computed_sent_bytes")
    return "" if computed is None else f"{format_bytes(computed)} (computed)"


def _memory(case: CaseResult, key: str) -> str:
    return format_bytes(case.memory[key]) if key in case.memory else ""


def headlines(suite: str, groups: list[GroupResult]) -> list[str]:
    """Return the results of a suite in sentences."""
    found: list[str] = SUITES[suite].module.sentences([group for group in groups if group.ran])
    return found


def summary_tables(result: dict[str, Any]) -> list[TextTable]:
    """Return the compact tables of a suite, by default all figures of each group."""
    groups = [group for group in groups_of(result) if group.ran]
    module = SUITES[result["suite"]].module
    found: list[TextTable] = module.tables(groups) if hasattr(module, "tables") else [group_table(g) for g in groups]
    return found


def plot(result: dict[str, Any]) -> bytes | None:
    """Return the picture of a recorded suite as PNG; None if there is nothing to show."""
    make_figure = require_matplotlib()
    groups = [group for group in groups_of(result) if group.ran]
    with warnings.catch_warnings():
        # A single point, for which matplotlib widens the axis.
        warnings.filterwarnings("ignore", message="Attempting to set identical")
        figure = SUITES[result["suite"]].module.draw(make_figure, groups) if groups else None
        if figure is None:
            return None
        device = result["environment"]["device"] + (" (quick run)" if result["quick"] else "")
        figure.suptitle(device, fontsize=8, color=QUIET, parse_math=False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def bar_panels(
    make_figure: Callable[..., Any],
    groups: Sequence[GroupResult],
    text: Show,
    colour: Callable[[GroupResult, CaseResult], str],
    room: float = 0.25,
    value: Callable[[CaseResult], float] = lambda case: 1e3 * case.median_s,
    label: str = "milliseconds, less is better",
) -> Any:
    """Draw a panel for each group, with a bar for each case, by default of its time, followed by `text`."""
    height = max(len(group.cases) for group in groups)
    figure = make_figure(11, 0.8 + (0.7 + 0.32 * height) * len(groups))
    for axes, group in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        cases = [case for case in group.cases if case.samples_s or case.memory]
        colours = [colour(group, case) for case in cases]
        texts = [text(group, case) for case in cases]
        bars(axes, [case.name for case in cases], [value(case) for case in cases], texts, colours, room=room)
        axes.set_title(group.title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(label)
    return figure


def lines_by(
    make_figure: Callable[..., Any],
    panels: Mapping[str, Sequence[GroupResult]],
    key: str,
    label: str,
    value: Callable[[CaseResult], float | None] = lambda case: 1e3 * case.median_s,
    what: str = "milliseconds, less is better",
) -> Any:
    """Draw a panel for each list of groups, with a line for each case, by default of its time, by the parameter `key`."""
    panels = {title: groups for title, groups in panels.items() if groups}
    if not panels:
        return None
    figure = make_figure(1 + 5.4 * len(panels), 4.8)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, groups) in zip(row, panels.items(), strict=True):
        sizes = [group.params[key] for group in groups]
        for number, name in enumerate(case_names(groups)):
            cases = [group.by_name.get(name) for group in groups]
            ours = any(case is not None and case.role == "ours" for case in cases)
            line(axes, sizes, [case and value(case) for case in cases], name, line_style(number, ours))
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel=what)
        axes.set_xticks(sizes, [format_count(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(title, fontsize=11, color=INK)
        tidy(axes)
        plain_numbers(axes)
    legend_below(figure, row[0])
    return figure


def show_time(group: GroupResult, case: CaseResult) -> str:
    """Format the time of a case."""
    return format_seconds(case.median_s)


def show_held(group: GroupResult, case: CaseResult) -> str:
    """Format the memory of a case, of host and device together."""
    return format_bytes(sum(case.memory.values())) if case.memory else ""


def pivot(title: str, groups: list[GroupResult], label: Callable[[GroupResult], str], show: Show) -> TextTable:
    """Return a table with a row for each case and a column for each group, with `label` as its header."""
    found = [{case.name: show(group, case) for case in group.ran} for group in groups]
    names = case_names(groups)
    # A case of few groups would be a row of blanks.
    names = [name for name in names if 2 * sum(name in column for column in found) >= len(found)]
    ours = frozenset(case.name for group in groups for case in group.ran if case.role == "ours")
    header = ["", *(label(group) for group in groups)]
    return TextTable(title, header, [[name, *(column.get(name, "") for column in found)] for name in names], ours)


def pivots(by: str, groups: list[GroupResult], key: str, columns: dict[str, Show]) -> list[TextTable]:
    """Return a `pivot` for each of `columns`, with the parameter `key` of each group as header."""
    return [
        pivot(f"{title}, by {by}", groups, lambda group: f"{group.params[key]:,}", show)
        for title, show in columns.items()
    ]


def missing(result: dict[str, Any]) -> list[str]:
    """Return groups and cases that could not run, with the reason."""
    groups = groups_of(result)
    lines = [f"{group.title}: {group.skipped}" for group in groups if group.skipped]
    return lines + [
        f"{group.title}, {case.name}: {case.error}" for group in groups for case in group.cases if case.error
    ]


def provenance(result: dict[str, Any]) -> str:
    """Return device, versions, commit and date."""
    facts = result["environment"]
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("torch", "cupy") if facts["versions"].get(name)
    )
    commit = facts["commit"][:12] + (" with changes" if facts["dirty"] else "")
    quick = ", quick run: small sizes and few samples" if result["quick"] else ""
    return f"{facts['device']}, {versions}, commit {commit}, {facts['date'][:10]}{quick}"


def markdown(result: dict[str, Any]) -> str:
    """Return the compact figures of a recorded suite as markdown."""
    suite = SUITES[result["suite"]]
    parts = [f"**{suite.title}** ({provenance(result)}; medians)"]
    parts += ["\n".join(f"- {line}" for line in headlines(result["suite"], groups_of(result)))]
    parts += [markdown_table(table) for table in summary_tables(result)]
    parts += [suite.note, "\n".join(f"- not run: {line}" for line in missing(result))]
    return "\n\n".join(filter(None, parts))


def markdown_table(table: TextTable) -> str:
    """Return a table as markdown, with its title as the header of the first column."""
    lines = [[table.title, *table.header[1:]], ["---", *("---:" for _ in table.header[1:])]]
    lines += [[f"**{name}**" if name in table.ours else name, *rest] for name, *rest in table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
