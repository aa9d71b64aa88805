"""Pictures of plans: the time of a step in each memory, bytes of hosts, and machines in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speedtransfer.drawing import (
    COLOURS,
    INK,
    PALE,
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
from speedtransfer.planning.hosts import Hosts
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.rank import Ranking
from speedtransfer.planning.workload import Workload
from speedtransfer.system import replace_file
from speedtransfer.units import format_count, format_seconds


def draw_plan(path: Path, workload: Workload, machine: Machine, options: Sequence[Option], best: Option | None) -> None:
    """Draw the time of a step in each memory in float32, and of the best configuration, as a PNG."""
    shown = [each for each in options if each.step_s and (each.form == options[0].form or each is best)]
    names = [each.memory if each.form == options[0].form else f"{each.memory}, {each.form}" for each in shown]
    names = [name if each.fits else f"{name}: no room" for name, each in zip(names, shown, strict=True)]
    colours = [COLOURS[0] if each is best else PALE for each in shown]
    figure = require_matplotlib()(6.4, 1.2 + 0.34 * len(shown))
    axes = figure.subplots()
    texts = [format_seconds(each.step_s) for each in shown]
    bars(axes, names, [1e3 * (each.step_s or 0.0) for each in shown], texts, colours)
    how = "measured here" if any(each.trial is not None for each in shown) else "estimated"
    tables = f"{len(workload.tables)} tables, " if len(workload.tables) > 1 else ""
    about = f"{workload.trainer.name}, {tables}{workload.lookups:,} lookups a step, {machine.device or machine.name}"
    axes.set_title(f"ms of a step of the tables, {how}\n{about}", fontsize=10.5, color=INK, loc="left")
    with replace_file(path) as file:
        figure.savefig(file, format="png")


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
    rows = format_count(sum(table.rows for table in work.tables))
    about = f"{rows} rows, {work.lookups:,} lookups a host, Zipf exponent {work.zipf:g}"
    title = f"bytes that an owner sends in a step\n{about}"
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
