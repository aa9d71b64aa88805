"""Pictures of plans: the time of a step in each memory, bytes of hosts, and machines in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedtransfer import drawing
from speedtransfer.errors import format_bytes
from speedtransfer.planning.configurations import ESTIMATED, MEASURED, Option
from speedtransfer.planning.hosts import Hosts
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import Workload
from speedtransfer.system import replace_file
from speedtransfer.units import format_count, format_seconds


def _titled(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10.5, color=drawing.INK, loc="left")


def _save(figure: Any, path: Path) -> None:
    with replace_file(path) as file:
        figure.savefig(file, format="png")


def draw_plan(path: Path, workload: Workload, machine: Machine, options: Sequence[Option], best: Option | None) -> None:
    """Draw the time of a step in each memory in float32, and of the best configuration, as a PNG."""
    shown = [each for each in options if each.step_s and (each.form == options[0].form or each is best)]
    names = [each.memory if each.form == options[0].form else f"{each.memory}, {each.form}" for each in shown]
    names = [name if each.fits else f"{name}: no room" for name, each in zip(names, shown, strict=True)]
    colours = [drawing.COLOURS[0] if each is best else drawing.PALE for each in shown]
    figure = drawing.require_matplotlib()(6.4, 1.2 + 0.34 * len(shown))
    axes = figure.subplots()
    texts = [format_seconds(each.step_s) for each in shown]
    drawing.bars(axes, names, [1e3 * (each.step_s or 0.0) for each in shown], texts, colours)
    how = "measured here" if any(MEASURED in each.how for each in shown) else ESTIMATED
    tables = f"{len(workload.tables)} tables, " if len(workload.tables) > 1 else ""
    about = f"{workload.trainer.name}, {tables}{workload.lookups:,} lookups a step, {machine.device or machine.name}"
    _titled(axes, f"ms of a step of the tables, {how}\n{about}")
    _save(figure, path)


def draw_hosts(path: Path, hosts: Hosts) -> None:
    """Draw the bytes that the mean and the busiest owner send in a step, by the number of hosts, as a PNG."""
    figure = drawing.require_matplotlib()(4.8, 3.6)
    axes, found = figure.subplots(), list(hosts.by_number())
    numbers, mean = [each.number for each in found], [each.cost.sent for each in found]
    busiest = [each.cost.sent * each.busiest for each in found]
    axes.plot(numbers, busiest, label="the busiest owner", **drawing.line_style(1, ours=False))
    axes.plot(numbers, mean, label="the mean", **drawing.line_style(0, ours=True))
    drawing.tidy(axes)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    drawing.plain_numbers(axes, "x")
    axes.set_xticks(numbers)
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.set_xlabel("hosts", fontsize=10, color=drawing.QUIET)
    work = hosts.workload
    rows = format_count(sum(table.rows for table in work.tables))
    about = f"{rows} rows, {work.lookups:,} lookups a host, Zipf exponent {work.zipf:g}"
    _titled(axes, f"bytes that an owner sends in a step\n{about}")
    drawing.legend_below(figure, axes)
    _save(figure, path)


def draw_ranking(path: Path, names: Sequence[str], columns: Mapping[str, Sequence[float | None]]) -> None:
    """Draw a column of drawing.bars for each measure, of values relative to the best; "-" where there is none; a PNG."""
    figure = drawing.require_matplotlib()(2.0 + 2.2 * len(columns), 1.0 + 0.34 * len(names))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for number, (axes, (title, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        texts = ["-" if value is None else f"{value:.2f}" for value in values]
        drawing.bars(
            axes, names, [value or 0.0 for value in values], texts, [drawing.COLOURS[number]] * len(names), fontsize=10
        )
        axes.set_xticks([])
        _titled(axes, title)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("1: the best of its column", fontsize=10, color=drawing.QUIET)
    _save(figure, path)
