"""Figures as text: tables and sentences from the recorded JSON of a suite, for the terminal, markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from speedtransfer.benchmark.headlines import headlines
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.shown_exchange import sent_in_all
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.benchmark.units import format_count, format_rate, format_ratio, format_seconds, format_share
from speedtransfer.errors import format_bytes

PUBLISHED = "published (K80, 2019): "


class TextTable(NamedTuple):
    """A table of texts. The first column names the row; names in `ours` are those of this library."""

    title: str
    header: list[str]
    rows: list[list[str]]
    ours: frozenset[str] = frozenset()

    def without(self, *labels: str) -> TextTable:
        """Return the table without the columns that `labels` name."""
        kept = [i for i, label in enumerate(self.header) if label not in labels]
        rows = [[row[i] for i in kept] for row in self.rows]
        return self._replace(header=[self.header[i] for i in kept], rows=rows)


def groups_of(result: dict[str, Any]) -> list[GroupResult]:
    """Return the groups of a recorded suite."""
    return [GroupResult.from_json(group) for group in result["groups"]]


def group_table(group: GroupResult) -> TextTable:
    """Return everything about a group, fastest case first; columns that it has nothing for are left out."""
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
        *_memory_columns(),
    ]
    cases = sorted(group.ran, key=lambda case: case.median_s)
    if any(case.memory for case in cases) and not figures:  # it is about room, not about time
        cases, columns = group.ran, columns[-2:]
    elif group.roof is None or figures:
        columns = [column for column in columns if column[0] != "of roof"]
    rows = [[case.name, *(show(case) for _, show in columns)] for case in cases]
    rows += [
        [PUBLISHED + name, *(format_seconds(seconds) if label == "median" else "" for label, _ in columns)]
        for name, seconds in group.params.get("published", {}).items()
    ]
    kept = [0, *(i for i in range(1, len(columns) + 1) if any(row[i] for row in rows))]
    header = ["", *(label for label, _ in columns)]
    ours = frozenset(case.name for case in cases if case.role == "ours")
    return TextTable(group.title, [header[i] for i in kept], [[row[i] for i in kept] for row in rows], ours)


def accuracy(case: CaseResult) -> str:
    """Return the share of answers that are right, as a percentage; nothing where none is known."""
    return f"{100 * case.figures['accuracy']:.1f}%" if "accuracy" in case.figures else ""


def sent(case: CaseResult) -> str:
    """Return the bytes that a process sends to others, and whether they are computed; nothing where none are known."""
    if "sent_bytes" in case.figures:
        return format_bytes(case.figures["sent_bytes"])
    computed = case.figures.get("computed_sent_bytes")
    return "" if computed is None else f"{format_bytes(computed)} (computed)"


def _memory_columns() -> list[tuple[str, Callable[[CaseResult], str]]]:
    def shown(key: str) -> Callable[[CaseResult], str]:
        return lambda case: format_bytes(case.memory[key]) if key in case.memory else ""

    return [("host memory", shown("host_bytes")), ("device memory", shown("device_bytes"))]


def summary_tables(result: dict[str, Any]) -> list[TextTable]:
    """Return the compact tables of a suite: a line for each case, a column for each group that belongs beside the others."""
    groups = [group for group in groups_of(result) if group.ran]
    suite = result["suite"]
    if suite == "transfer":
        title = "{}, GB/s and share of a plain copy, by bytes of a row"
        return [
            _pivot(title.format(direction), part, lambda group: f"{group.params['row_bytes']:,} B", _rate_and_share)
            for direction, part in _by(sweep(groups), "direction").items()
        ]
    if suite == "speedtorch":
        return [_with_published(part) for part in _by(groups, "memory").values()]
    if suite == "tax":
        return [
            _pivot(f"{experiment}, time by size", part, lambda group: f"{group.params['size']:,}", _time)
            for experiment, part in _by(groups, "experiment").items()
        ]
    if suite == "step":
        parts = _by(groups, "experiment")
        by_size = parts.pop("size", [])
        table = _pivot("a step, by rows of the table", by_size, lambda group: format_count(group.params["rows"]), _time)
        return [table, *(group_table(group) for part in parts.values() for group in part)]
    if suite in _BY_BATCH:
        return [
            _pivot(f"{title}, by examples of a batch", groups, lambda group: f"{group.params['batch']:,}", show)
            for title, show in _BY_BATCH[suite].items()
        ]
    if suite == "ranks":
        columns = {"a step": _time, "sent a step by a process": lambda group, case: sent(case)}
        return [
            _pivot(f"{title}, by processes", groups, lambda group: f"{group.params['ranks']}", show)
            for title, show in columns.items()
        ]
    if suite == "exchange":
        columns = {
            "sent by a process until then": lambda group, case: format_bytes(sent_in_all(case)),
            "steps": lambda group, case: f"{case.figures['steps']:,.0f}",
            "time": _time,
        }
        return [
            _pivot(f"{kind}, {title}, by processes", part, lambda group: f"{group.params['ranks']}", show)
            for kind, part in _by(groups, "kind").items()
            for title, show in columns.items()
        ]
    return [group_table(group) for group in groups]


def _with_published(groups: list[GroupResult]) -> TextTable:
    """Return the figures of suite `speedtorch` for one memory, and below them those of 2019."""
    memory = groups[0].params.get("memory")
    title = "time a call" + (f", {memory} table" if memory else "")
    table = _pivot(title, groups, lambda group: str(group.params["kind"]), _time)
    published = [group.params["published"] for group in groups]
    names = dict.fromkeys(name for column in published for name in column)
    extra = [[PUBLISHED + name, *(format_seconds(column.get(name)) for column in published)] for name in names]
    return table._replace(rows=table.rows + extra)


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


def _by(groups: Iterable[GroupResult], key: str) -> dict[Any, list[GroupResult]]:
    parts: dict[Any, list[GroupResult]] = {}
    for group in groups:
        parts.setdefault(group.params.get(key), []).append(group)
    return parts


def _time(group: GroupResult, case: CaseResult) -> str:
    return format_seconds(case.median_s)


def _held(group: GroupResult, case: CaseResult) -> str:
    return format_bytes(sum(case.memory.values())) if case.memory else ""


# What is shown of the suites whose groups differ by the size of a batch.
_BY_BATCH: dict[str, dict[str, Callable[[GroupResult, CaseResult], str]]] = {
    "precision": {
        "a step": _time,
        "moved a step": lambda group, case: format_bytes(case.figures["moved_bytes"]),
        "memory": _held,
        "loss reached": lambda group, case: f"{case.figures['loss']:.4f}",
    },
    "mixed": {"a step": _time, "memory": _held, "accuracy": lambda group, case: accuracy(case)},
}


def _rate_and_share(group: GroupResult, case: CaseResult) -> str:
    share = group.share_of_roof(case) if case.role != "roof" else None
    return format_rate(case.gb_per_s) + (f" ({format_share(share)})" if share is not None else "")


def _pivot(
    title: str,
    groups: list[GroupResult],
    label: Callable[[GroupResult], str],
    show: Callable[[GroupResult, CaseResult], str],
) -> TextTable:
    found = [{case.name: show(group, case) for case in group.ran} for group in groups]
    names = list(dict.fromkeys(name for column in found for name in column))
    # A way that one group alone has would be a line of blanks.
    names = [name for name in names if 2 * sum(name in column for column in found) >= len(found)]
    ours = frozenset(case.name for group in groups for case in group.ran if case.role == "ours")
    header = ["", *(label(group) for group in groups)]
    return TextTable(title, header, [[name, *(column.get(name, "") for column in found)] for name in names], ours)


def missing(result: dict[str, Any]) -> list[str]:
    """Return what could not run, and why."""
    groups = groups_of(result)
    lines = [f"{group.title}: {group.skipped}" for group in groups if group.skipped]
    return lines + [
        f"{group.title}, {case.name}: {case.error}" for group in groups for case in group.cases if case.error
    ]


def provenance(result: dict[str, Any]) -> str:
    """Return device, versions, commit and date in one line."""
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
    """Return `table` as markdown, its title at the top of the first column."""
    lines = [[table.title, *table.header[1:]], ["---", *("---:" for _ in table.header[1:])]]
    lines += [[f"**{name}**" if name in table.ours else name, *rest] for name, *rest in table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
