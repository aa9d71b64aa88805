"""A plan in words and as a table, for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.errors import format_bytes
from speedtransfer.planning.configurations import Option
from speedtransfer.planning.findings import Findings
from speedtransfer.planning.footprint import DEVICE, MMAP, SPARSE
from speedtransfer.planning.forms import Form, has_wide_state
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share

WIDTH = 132
_MOST_TABLES, _MOST_LINES = 8, 4
_SHORT = {SPARSE: "sparse nn.Embedding"}


def as_text(plan: Findings) -> str:
    """Return what ``print`` shows."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
    console.print(as_renderable(plan))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_renderable(plan: Findings, heading: bool = True, steps: bool = True) -> RenderableType:
    """Return what a console prints.

    Parameters
    ----------
    plan : Plan
    heading : bool
        Begin with the tables and their optimizer.
    steps : bool
        Show what a step moves and how long it takes.
    """
    parts: list[RenderableType] = [Text(line) for line in _about(plan)] if heading else []
    parts += [Text(f"{plan.machine.name}: {_memories(plan)}"), Text(""), _options(plan, steps), Text("")]
    parts += [Text(line) for line in _notes(plan)]
    if plan.cache and steps:
        parts += [Text(""), _cache(plan)]
    parts += [Text(""), *(Text(line) for line in _advice(plan))]
    return Group(*parts)


def _about(plan: Findings) -> Iterable[str]:
    work = plan.workload
    for table in work.tables[:_MOST_TABLES]:
        yield (
            f"{table.name}: {table.rows:,} x {table.dim}, {table.lookups:,} lookups a step, "
            f"{table.unique:,.0f} of them distinct"
        )
    if len(work.tables) > _MOST_TABLES:
        rows = sum(table.rows for table in work.tables)
        yield (
            f"... {len(work.tables)} tables in all: {rows:,} rows, {work.lookups:,} lookups a step, "
            f"{work.unique:,.0f} of them distinct"
        )
    first = next(iter(plan.bytes))
    held = plan.bytes[first]
    parts = {"weights": held.weight, "state": held.state, "last steps": held.last_step, "scales": held.scale}
    counted = ", ".join(f"{format_bytes(count)} of {name}" for name, count in parts.items() if count)
    yield f"{work.trainer.name}, ids by Zipf's law with exponent {work.zipf:g}; in {_form_words(plan, first)} {counted}"
    if plan.dense_bytes:
        yield f"all other parameters, with gradients and state: {format_bytes(plan.dense_bytes)}"


def _memories(plan: Findings) -> str:
    machine = plan.machine
    parts = []
    if machine.device is not None:
        parts.append(f"{format_bytes(machine.device_bytes or 0)} of {machine.device}")
    for count, words in ((machine.host_bytes, "host memory"), (machine.disk_bytes, "disk")):
        parts.append(f"{words} not known" if count is None else f"{format_bytes(count)} of {words}")
    return ", ".join(parts) + (" are available" if plan.here else "")


def _form_words(plan: Findings, form: Form) -> str:
    if not has_wide_state(plan.workload) or form.storage == form.state:
        return form.storage
    return f"{form.storage}, {form.state} state"


def shown_options(plan: Findings) -> list[Option]:
    """Return the configurations that a person wants to see: float32 in every memory, other forms where they fit first."""
    first = plan.options[0].form
    shown, seen = [], set[Form]()
    for option in plan.options:
        keep = option.form == first or option in (plan.best, plan.smallest)
        if not keep and option.form not in seen and option.memory != MMAP:
            of_form = [other for other in plan.options if other.form == option.form and other.memory != MMAP]
            fitting = [other for other in of_form if other.fits]
            keep = option is min(fitting, key=_seconds) if fitting else option is of_form[-1]
        if keep:
            seen.add(option.form)
            shown.append(option)
    return shown


def _seconds(option: Option) -> float:
    return float("inf") if option.step_s is None else option.step_s


def _options(plan: Findings, steps: bool) -> TextTable:
    table = TextTable(box=None, pad_edge=False)
    for label in ("memory", "stored as"):
        table.add_column(label, no_wrap=True)
    gpu = plan.machine.device is not None
    wanted = [*(["device"] if gpu else []), "host", "disk"]
    if steps:
        wanted += [
            "bus a step",
            "step",
            *(["read ahead"] if gpu and any(each.ahead_s for each in plan.options) else []),
        ]
    for label in wanted:
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", min_width=22)
    shown = shown_options(plan)
    for option in shown:
        cells = {
            "device": _size(option.need.device),
            "host": _size(option.need.host),
            "disk": _size(option.need.disk),
            # Rows on the device do not cross the bus.
            "bus a step": "" if option.memory == DEVICE else _size(option.moved.up + option.moved.down),
            "step": format_seconds(option.step_s),
            "read ahead": format_seconds(option.ahead_s),
        }
        mark = "*" if option is plan.best else " "
        name = f"{mark} {_SHORT.get(option.memory, option.memory)}"
        values = [cells[label] for label in wanted]
        table.add_row(name, _form_words(plan, option.form), *values, _remark(option, steps))
    if steps and not gpu:
        table.columns[2 + wanted.index("bus a step")].header = "rows a step"
    return table


def _size(count: float) -> str:
    return format_bytes(count) if count else ""


def _remark(option: Option, steps: bool) -> str:
    if option.reason:
        known = "unknown" if "not known" in option.reason else "no room"
        short = [name for name in ("memory on the", "host memory", "disk") if f"of {name}" in option.reason]
        return (
            f"{known}: {', '.join(name.replace('memory on the', 'device') for name in short) or 'page-locked memory'}"
        )
    if not steps:
        return "fits"
    parts = [option.how] if option.how else ["time not known"]
    if option.bound:
        parts.append(option.bound)
    if not option.same:
        parts.append("other numbers")
    return ", ".join(parts)


def _notes(plan: Findings) -> Iterable[str]:
    hidden = len(plan.options) - len(shown_options(plan))
    if hidden:
        yield f"{hidden} more in plan.data() and --json; * recommended"
    if plan.here and any(option.trial is not None for option in plan.options):
        yield "measured here, on tables that were cut to fewer rows where they are larger; the rest of the model is not in it"
    if any(option.how == "estimated" for option in plan.options):
        yield "estimated from the figures of the machine and assumed costs of the host; the rest of the model is not in it"
    yield from plan.machine.notes


def _cache(plan: Findings) -> TextTable:
    table = TextTable("a cache of", box=None, pad_edge=False)
    for label in ("takes", "serves", "left up", "left down", "step, estimated"):
        table.add_column(label, justify="right", no_wrap=True)
    for size in plan.cache:
        moved = format_bytes(size.up), format_bytes(size.down)
        table.add_row(
            f"{format_count(size.rows)} rows",
            format_bytes(size.num_bytes),
            format_share(size.share),
            *moved,
            format_seconds(size.step_s),
        )
    return table


def _advice(plan: Findings) -> Iterable[str]:
    best, smallest = plan.best, plan.smallest
    if best is None:
        least = min(plan.options, key=lambda option: option.total_bytes)
        yield f"nothing fits; the smallest, {least.memory}, {_form_words(plan, least.form)}, {least.reason}"
        return
    yield f"recommended: {_why(plan, best)}"
    yield from _code(best)
    if smallest is not None and smallest is not best:
        yield f"smallest: {smallest.memory}, {_form_words(plan, smallest.form)}, {format_bytes(smallest.total_bytes)}"
        yield from _code(smallest)


def _code(option: Option) -> Iterable[str]:
    lines = option.code.splitlines()
    shown = lines if len(lines) <= _MOST_LINES else lines[: _MOST_LINES - 1]
    yield from (f"    {line}" for line in shown)
    if len(shown) < len(lines):
        yield f"    ... and {len(lines) - len(shown)} more lines in plan.data() and --json"


def _why(plan: Findings, best: Option) -> str:
    words = f"{best.memory}, {_form_words(plan, best.form)}"
    if not best.is_table:
        known = "no table is faster" if best.step_s is not None else "whether a table is faster is not known"
        return f"{words}: it fits, and {known}; keep torch.nn"
    lost = (
        "nothing is rounded",
        "rows or state in fewer bits are the first that fit",
        "8-bit rows are the first that fit",
    )
    if len(plan.bytes) == 1:
        return f"{words}: the fastest that fits"
    why = "only files are large enough" if best.level == 3 else lost[best.level]
    dense = plan.options[0]
    if dense.fits and dense.step_s and best.step_s:
        why += f", {format_ratio(dense.step_s / best.step_s)} the speed of dense nn.Embedding"
    return f"{words}: {why}"
