"""A plan: what fits where, how long a step takes in each memory, and which configuration to use; in words and as data."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.errors import check_png, format_bytes
from speedtransfer.planning.configurations import ESTIMATED, MEASURED, Option
from speedtransfer.planning.footprint import DENSE, DEVICE, MMAP, SPARSE, Bytes, Form, is_exact, size_of, state_planes
from speedtransfer.planning.hosts import Hosts
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import Load, Workload
from speedtransfer.text_table import text_table
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share

WIDTH = 132
_MOST_TABLES, _MOST_LINES = 8, 4
_SHORT = {SPARSE: "sparse nn.Embedding"}
_LOST = (  # by the level of a form
    "nothing is rounded",
    "rows or state in fewer bits are the first that fit",
    "8-bit rows are the first that fit",
    "only files are large enough",
)


@dataclass(frozen=True)
class CacheSize:
    """What a cache of hot rows on the device would serve.

    It keeps so many `rows` of all tables together (`cache_rows`), which take `num_bytes` on the device with their state, and
    serves a `share` of the distinct rows of a step: those that are used most, for good. `up` and `down` are the bytes that a
    step still moves over the bus.
    """

    rows: int
    num_bytes: int
    share: float
    up: float
    down: float


@dataclass(frozen=True)
class Plan:
    """What :func:`speedtransfer.plan` has found; ``print`` shows it.

    `workload` has the tables, with the lookups and expected distinct rows of a step, and `machine` is what was planned for,
    this one if `here`. `bytes` are those of weights, state, last steps and scales, by form. Among the `options`, which are all
    configurations, `best` is the one to use and `smallest` the one that takes the least; None where none fits. `cache` are
    caches of several sizes for the best configuration with rows in host memory, or for the first that there is, and
    `dense_bytes` all other parameters of the model, with gradients and state. `hosts` is what several hosts send one another;
    all else is then of one of them, with its share of the rows.
    """

    workload: Workload
    machine: Machine
    here: bool
    bytes: dict[Form, Bytes]
    options: tuple[Option, ...]
    best: Option | None
    smallest: Option | None
    cache: tuple[CacheSize, ...] = ()
    dense_bytes: float = 0.0
    hosts: Hosts | None = None

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
        console.print(as_renderable(self))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def data(self) -> dict[str, Any]:
        """Return the plan as plain data, as ``speedtransfer plan --json`` writes it."""
        names, work = ("name", "rows", "dim", "lookups", "unique", "kind"), self.workload
        return {
            "tables": [{name: getattr(table, name) for name in names} for table in work.tables],
            **{name: getattr(work, name) for name in ("batch", "zipf", "idle")},
            "optimizer": work.trainer.name,
            "dense_bytes": self.dense_bytes,
            "machine": {**dataclasses.asdict(self.machine), "sources": dict(self.machine.sources)},
            "this_machine": self.here,
            "bytes": [
                {"storage_dtype": form.storage, "state_dtype": form.state, "total": held.total, **held._asdict()}
                for form, held in self.bytes.items()
            ],
            "options": [option.data() for option in self.options],
            **{name: one and one.data() for name in ("best", "smallest", "hosts") for one in [getattr(self, name)]},
            "cache": [dataclasses.asdict(size) for size in self.cache],
        }

    def draw(self, path: str | Path) -> None:
        """Draw the time of a step in each memory, or of hosts the bytes that each sends by their number, as a PNG.

        Raises `InvalidValueError` for another ending, `StorageError` where it cannot be written, and `MissingPackageError`
        where matplotlib is not installed.
        """
        path = check_png(path)
        # Drawing is loaded where a picture is wanted.
        from speedtransfer.planning.plan_picture import draw_hosts, draw_plan

        if self.hosts is not None:
            draw_hosts(path, self.hosts)
            return
        draw_plan(path, self.workload, self.machine, self.options, self.best)


# --- in words -----------------------------------------------------------------------------------------------------------


def as_renderable(plan: Plan, steps: bool = True) -> RenderableType:
    """Return what a console prints; with `steps` also what a step moves and how long it takes."""
    parts: list[RenderableType] = [Text(line) for line in _about(plan, steps)]
    parts += [Text(f"{plan.machine.name}: {_memories(plan)}"), Text(""), _options(plan, steps), Text("")]
    parts += [Text(line) for line in _notes(plan)]
    if plan.cache and steps:
        parts += [Text(""), _cache(plan)]
    if plan.hosts is not None:
        parts += [Text(""), *(Text(line) for line in _hosts(plan, plan.hosts))]
    parts += [Text(""), *(Text(line) for line in _advice(plan))]
    return Group(*parts)


def _about(plan: Plan, steps: bool) -> Iterable[str]:
    work = plan.workload
    if plan.hosts is not None:
        yield f"one of {plan.hosts.number:,} hosts, with its share of the rows; distinct are those that any of them looks up"

    def looked_up(part: Load | Workload) -> str:
        return f", {part.lookups:,} lookups a step, {part.unique:,.0f} of them distinct" if steps else ""

    for table in work.tables[:_MOST_TABLES]:
        yield f"{table.name}: {table.rows:,} x {table.dim}{looked_up(table)}"
    if len(work.tables) > _MOST_TABLES:
        rows = sum(table.rows for table in work.tables)
        yield f"... {len(work.tables)} tables in all: {rows:,} rows{looked_up(work)}"
    first, held = next(iter(plan.bytes.items()))
    parts = {"weights": held.weight, "state": held.state, "last steps": held.last_step, "scales": held.scale}
    counted = ", ".join(f"{format_bytes(count)} of {name}" for name, count in parts.items() if count)
    idle = f", idle rows {'exact' if is_exact(work) else 'lazy'}" if work.trainer.make is not None else ""
    ids = f", ids by Zipf's law with exponent {work.zipf:g}" if steps else ""
    sizes = sorted({size_of(work, table, first).row_bytes for table in work.tables})
    a_row = " or ".join(f"{size:,}" for size in sizes)
    yield f"{work.trainer.name}{idle}{ids}; in {_form_words(plan, first)} {counted}, {a_row} bytes a row"
    if plan.dense_bytes:
        yield f"all other parameters, with gradients and state: {format_bytes(plan.dense_bytes)}"


def _memories(plan: Plan) -> str:
    machine = plan.machine
    parts = []
    if machine.device is not None:
        parts.append(f"{format_bytes(machine.device_bytes or 0)} of {machine.device}")
    for count, words in ((machine.host_bytes, "host memory"), (machine.disk_bytes, "disk")):
        parts.append(f"{words} not known" if count is None else f"{format_bytes(count)} of {words}")
    return ", ".join(parts) + (" are available" if plan.here else "")


def _form_words(plan: Plan, form: Form) -> str:
    if not state_planes(plan.workload) or form.storage == form.state:
        return form.storage
    return f"{form.storage}, {form.state} state"


def _shown_options(plan: Plan) -> list[Option]:
    """Return the configurations that a person wants to see: float32 in every memory, other forms where they fit first."""
    first = plan.options[0].form
    shown, seen = [], set[Form]()
    for option in plan.options:
        keep = option.form == first or option in (plan.best, plan.smallest)
        if not keep and option.form not in seen and option.memory != MMAP:
            of_form = [other for other in plan.options if other.form == option.form and other.memory != MMAP]
            fitting = [other for other in of_form if other.fits]
            keep = (
                option is min(fitting, key=lambda other: other.step_s or math.inf) if fitting else option is of_form[-1]
            )
        if keep:
            seen.add(option.form)
            shown.append(option)
    return shown


def _options(plan: Plan, steps: bool) -> TextTable:
    table = TextTable(box=None, pad_edge=False)
    for label in ("memory", "stored as"):
        table.add_column(label, no_wrap=True)
    gpu = plan.machine.device is not None
    ahead = gpu and any(each.ahead_s for each in plan.options)
    wanted = ["device"] * gpu + ["host", "disk"] + ["bus a step", "step", *["read ahead"] * ahead] * steps
    for label in wanted:
        # Without a GPU rows cross no bus.
        shown = "rows a step" if label == "bus a step" and not gpu else label
        table.add_column(shown, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", min_width=22)
    for option in _shown_options(plan):
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
    return table


def _size(count: float) -> str:
    return format_bytes(count) if count else ""


def _remark(option: Option, steps: bool) -> str:
    if option.reason:
        known = "unknown" if "not known" in option.reason else "no room"
        places = {"memory on the": "device", "host memory": "host memory", "disk": "disk"}
        short = [place for words, place in places.items() if f"of {words}" in option.reason]
        return f"{known}: {', '.join(short)}"
    if not steps:
        return "fits"
    parts = [option.how] if option.how else ["time not known"]
    if option.bound:
        parts.append(option.bound)
    if not option.same:
        parts.append("other numbers")
    return ", ".join(parts)


def _notes(plan: Plan) -> Iterable[str]:
    hidden = len(plan.options) - len(_shown_options(plan))
    if hidden:
        yield f"{hidden} more in plan.data() and --json; * recommended"
    if plan.here and any(MEASURED in option.how for option in plan.options):
        yield "measured here, on tables that were cut to fewer rows where they are larger; the rest of the model is not in it"
    if any(option.how == ESTIMATED for option in plan.options):
        yield "estimated from the figures of the machine and assumed costs of the host; the rest of the model is not in it"
    yield from plan.machine.notes


def _cache(plan: Plan) -> TextTable:
    rows = []
    for size in plan.cache:
        cells = [format_bytes(size.num_bytes), format_share(size.share), format_bytes(size.up), format_bytes(size.down)]
        rows.append([f"{format_count(size.rows)} rows", *cells])
    return text_table(("a cache of", "takes", "serves", "left up", "left down"), rows)


def _hosts(plan: Plan, hosts: Hosts) -> Iterable[str]:
    """Yield what hosts send one another, and the time of a step with it."""
    cost, parts = hosts.cost, {name: format_seconds(seconds) for name, seconds in hosts.parts.items()}
    kinds = {name: format_bytes(getattr(cost, name)) for name in ("ids", "rows", "gradients", "control")}
    yield f"{hosts.number:,} hosts, a process each, by {hosts.link}"
    yield f"a step sends from each: {', '.join(f'{size} of {name}' for name, size in kinds.items())}"
    yield f"    the busiest owner has {hosts.busiest:.2f} times the mean, which is waited for"
    yield (
        f"    {parts['bytes']} for the bytes, {parts['delays']} for {cost.delays} delays one after another, "
        f"{parts['calls']} for {cost.calls} calls: {format_seconds(hosts.seconds)}"
    )
    if hosts.apart > cost.calls:
        yield f"    where the ids of all tables are parts of one tensor; else {hosts.apart} calls"
    if plan.best is not None and plan.best.step_s is not None:
        both = format_seconds(plan.best.step_s + hosts.seconds)
        yield f"a step of all hosts: {format_seconds(plan.best.step_s)} as above and the exchange, {both}"


def _advice(plan: Plan) -> Iterable[str]:
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


def _why(plan: Plan, best: Option) -> str:
    words = f"{best.memory}, {_form_words(plan, best.form)}"
    if not best.is_table:
        known = "no table is faster" if best.step_s is not None else "whether a table is faster is not known"
        return f"{words}: it fits, and {known}; keep torch.nn"
    if len(plan.bytes) == 1:
        return f"{words}: the fastest that fits"
    why = _LOST[best.level]
    dense = plan.options[0]
    if dense.memory == DENSE and dense.fits and dense.step_s and best.step_s:
        why += f", {format_ratio(dense.step_s / best.step_s)} the speed of dense nn.Embedding"
    return f"{words}: {why}"
