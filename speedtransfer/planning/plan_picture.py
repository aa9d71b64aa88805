"""Pictures of plans: the time of a step against the size of the tables, bytes of hosts, and machines in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speedtransfer.drawing import (
    COLOURS,
    INK,
    QUIET,
    bars,
    legend_below,
    line_style,
    plain_numbers,
    require_matplotlib,
    tidy,
)
from speedtransfer.errors import format_bytes
from speedtransfer.planning.configurations import Option
from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.footprint import DENSE, DEVICE, MMAP, PAGEABLE, PINNED, SPARSE, footprint, misfit
from speedtransfer.planning.hosts import Hosts
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.rank import Ranking
from speedtransfer.planning.workload import Workload
from speedtransfer.system import replace_file

_FACTORS = tuple(10 ** (step / 8) for step in range(-16, 13))
_LOOKS = {DENSE: 3, SPARSE: 6, DEVICE: 2, PINNED: 0, PAGEABLE: 5, MMAP: 1}


class Line(NamedTuple):
    """Seconds of one configuration at sizes that fit (bytes of the weights in float32); `ends`: larger ones do not fit."""

    option: Option
    sizes: list[float]
    seconds: list[float]
    ends: bool


def lines_of(workload: Workload, machine: Machine, options: Sequence[Option], best: Option | None) -> Iterator[Line]:
    """Yield a line for each configuration in float32 whose time is known, and for the best."""
    seen = set[str]()
    float32 = [option for option in options if option.form == options[0].form]
    for option in [*float32, *([best] if best is not None and best not in float32 else [])]:
        if option.step_s is None or (option.memory in seen and option is not best):
            continue
        seen.add(option.memory)
        line = Line(option, [], [], False)
        for factor in _FACTORS:
            work = workload.with_rows(factor)
            if misfit(footprint(work, option.form, option.memory, machine), machine):
                line = line._replace(ends=True)
                break
            found = _seconds_at(workload, machine, option, factor)
            if found is not None:
                line.sizes.append(4.0 * sum(table.rows * table.dim for table in work.tables))
                line.seconds.append(found)
        if line.sizes:
            yield line


def _seconds_at(workload: Workload, machine: Machine, option: Option, factor: float) -> float | None:
    """Return the time of a step with `factor` times the rows: parts of what was measured in proportion, or an estimate."""
    work = workload.with_rows(factor)
    found = estimate_step(work, option.form, option.memory, machine)
    if option.trial is None:
        return None if found is None else found.seconds + option.dense_s
    trial, disk = option.trial, 0.0 if found is None else found.disk_s
    more = work.unique / workload.unique
    return trial.fixed_s + trial.unique_s * more + trial.rows_s * factor + disk + option.dense_s


def draw_plan(path: Path, workload: Workload, machine: Machine, options: Sequence[Option], best: Option | None) -> None:
    """Draw the time of a step against the size of the tables into a PNG as wide as a telephone."""
    figure = require_matplotlib()(4.8, 5.0)
    axes = figure.subplots()
    lines = list(lines_of(workload, machine, options, best))
    for line in lines:
        option, colour = line.option, COLOURS[_LOOKS[line.option.memory]]
        other = option.form != options[0].form
        style: dict[str, Any] = {"color": colour, "lw": 2.4 if option.is_table else 1.6}
        style |= {"ls": (0, (4, 2)) if other or not option.same else "-"}
        label = f"{option.memory}, {option.form}" if other else option.memory
        label += "" if option.same else " (SparseAdam)"
        axes.plot(line.sizes, [1e3 * value for value in line.seconds], label=label, **style)
        if line.ends:
            axes.plot(line.sizes[-1:], [1e3 * line.seconds[-1]], "X", color=colour, ms=10, mec="white", zorder=5)
    tidy(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    here = 4.0 * sum(table.rows * table.dim for table in workload.tables)
    axes.axvline(here, color=QUIET, lw=1, ls=":", label="planned")
    plain_numbers(axes)
    _show_bytes(axes.xaxis)
    axes.set_xlabel("weights in float32; X: larger ones do not fit", fontsize=10, color=QUIET)
    how = "measured here" if any(line.option.trial is not None for line in lines) else "estimated"
    tables = f"{len(workload.tables)} tables, " if len(workload.tables) > 1 else ""
    about = f"{workload.trainer.name}, {tables}{workload.lookups:,} lookups a step, {machine.device or machine.name}"
    axes.set_title(f"ms of a step of the tables, {how}\n{about}", fontsize=10.5, color=INK, loc="left")
    legend_below(figure, axes)
    with replace_file(path) as file:
        figure.savefig(file, format="png")


def _show_bytes(axis: Any) -> None:
    """Write sizes as 1 GB."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axis.set_minor_formatter(NullFormatter())


def draw_hosts(path: Path, hosts: Hosts) -> None:
    """Draw the bytes that the mean and the busiest owner send in a step, by the number of hosts, as a PNG."""
    figure = require_matplotlib()(4.8, 3.6)
    axes, found = figure.subplots(), list(hosts.by_number())
    for name, number, factors in (
        ("the busiest owner", 1, [each.busiest for each in found]),
        ("the mean", 0, [1.0] * len(found)),
    ):
        sent = [each.cost.sent * factor for each, factor in zip(found, factors, strict=True)]
        axes.plot([each.number for each in found], sent, label=name, **line_style(number, ours=number == 0))
    tidy(axes)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    plain_numbers(axes, "x")
    axes.set_xticks([each.number for each in found])
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.set_xlabel("hosts", fontsize=10, color=QUIET)
    work = hosts.workload
    rows, ids = sum(table.rows for table in work.tables), f"ids by Zipf's law with exponent {work.zipf:g}"
    title = f"bytes that an owner sends in a step\n{rows:,} rows, {work.lookups:,} lookups a host, {ids}"
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    legend_below(figure, axes)
    with replace_file(path) as file:
        figure.savefig(file, format="png")


def draw_ranking(path: Path, ranking: Ranking) -> None:
    """Draw a column of bars for each measure, of values relative to the best; "-" where there is none; a PNG."""
    names, columns = [f"{each.machine.name} ({each.machine.devices})" for each in ranking.ranked], ranking.columns()
    figure = require_matplotlib()(2.0 + 2.2 * len(columns), 1.0 + 0.34 * len(names))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for number, (axes, (title, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        texts = ["-" if value is None else f"{value:.2f}" for value in values]
        bars(axes, names, [value or 0.0 for value in values], texts, [COLOURS[number]] * len(names), fontsize=10)
        axes.set_xticks([])
        axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("1: the best of its column", fontsize=10, color=QUIET)
    with replace_file(path) as file:
        figure.savefig(file, format="png")
