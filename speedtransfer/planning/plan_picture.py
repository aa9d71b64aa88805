"""Draw a plan: the time of a step against the size of the tables, by memory, and where each stops fitting."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, require_matplotlib, tidy
from speedtransfer.planning.configurations import Option
from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.findings import Findings
from speedtransfer.planning.footprint import DENSE, DEVICE, MMAP, PAGEABLE, PINNED, SPARSE, footprint, misfit
from speedtransfer.planning.plan_files import write_bytes

_FACTORS = tuple(10 ** (step / 8) for step in range(-16, 13))
_LOOKS = {DENSE: 3, SPARSE: 6, DEVICE: 2, PINNED: 0, PAGEABLE: 5, MMAP: 1}


@dataclass(frozen=True)
class Line:
    """Times of one configuration at several sizes.

    Attributes
    ----------
    option : Option
    sizes : list of float
        Bytes of the weights in float32, of those sizes that fit.
    seconds : list of float
    ends : bool
        Whether larger tables do not fit.
    """

    option: Option
    sizes: list[float]
    seconds: list[float]
    ends: bool


def lines_of(plan: Findings) -> Iterator[Line]:
    """Yield a line for each configuration whose time is known."""
    seen = set[str]()
    float32 = [option for option in plan.options if option.form == plan.options[0].form]
    more = [option for option in (plan.best,) if option is not None and option not in float32]
    for option in [*float32, *more]:
        if option.step_s is None or (option.memory in seen and option not in more):
            continue
        seen.add(option.memory)
        sizes, seconds, ends = [], [], False
        for factor in _FACTORS:
            work = plan.workload.with_rows(factor)
            if misfit(footprint(work, option.form, option.memory, plan.machine), plan.machine):
                ends = True
                break
            found = _seconds_at(plan, option, factor)
            if found is not None:
                sizes.append(4.0 * sum(table.rows * table.dim for table in work.tables))
                seconds.append(found)
        if sizes:
            yield Line(option, sizes, seconds, ends)


def _seconds_at(plan: Findings, option: Option, factor: float) -> float | None:
    """Return the time of a step with `factor` times the rows: parts of what was measured in proportion, or an estimate."""
    work = plan.workload.with_rows(factor)
    found = estimate_step(work, option.form, option.memory, plan.machine)
    if option.trial is None:
        return None if found is None else found.seconds + option.dense_s
    trial, disk = option.trial, 0.0 if found is None else found.disk_s
    more = work.unique / plan.workload.unique
    return trial.fixed_s + trial.unique_s * more + trial.rows_s * factor + disk + option.dense_s


def save(plan: Findings, path: Path) -> None:
    """Draw a plan into a PNG."""
    write_bytes(path, draw(plan))


def draw(plan: Findings) -> bytes:
    """Return the picture as PNG, to be read on a telephone and on a page."""
    figure = require_matplotlib()(4.8, 5.0)
    axes = figure.subplots()
    lines = list(lines_of(plan))
    for line in lines:
        colour = COLOURS[_LOOKS[line.option.memory]]
        other = line.option.form != plan.options[0].form
        style: dict[str, Any] = {"color": colour, "lw": 2.4 if line.option.is_table else 1.6}
        style |= {"ls": (0, (4, 2)) if other or not line.option.same else "-"}
        axes.plot(line.sizes, [1e3 * value for value in line.seconds], label=_label(line.option, other), **style)
        if line.ends:
            axes.plot(line.sizes[-1:], [1e3 * line.seconds[-1]], "X", color=colour, ms=10, mec="white", zorder=5)
    here = 4.0 * sum(table.rows * table.dim for table in plan.workload.tables)
    tidy(axes)
    # As wide as a telephone, so that its letters can be read there.
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(here, color=QUIET, lw=1, ls=":")
    axes.annotate(
        "planned", (here, 1), (4, -3), xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        color=QUIET, fontsize=9,
    )  # fmt: skip
    _units(axes, [value for line in lines for value in line.seconds])
    axes.set_xlabel("weights in float32; X: larger ones do not fit", fontsize=10, color=QUIET)
    how = "measured here" if any(line.option.trial is not None for line in lines) else "estimated"
    title = f"ms of a step of the tables, {how}\n{_subtitle(plan)}"
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    if lines:
        legend_below(figure, axes)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _units(axes: Any, seconds: Sequence[float]) -> None:
    """Write sizes as 1 GB, and times as 0.1, 1, 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from speedtransfer.errors import format_bytes

    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if seconds and max(seconds) < 100 * min(seconds):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def _subtitle(plan: Findings) -> str:
    work = plan.workload
    where = plan.machine.device or plan.machine.name
    tables = f"{len(work.tables)} tables, " if len(work.tables) > 1 else ""
    return f"{work.trainer.name}, {tables}{work.lookups:,} lookups a step, {where}"


def _label(option: Option, with_form: bool) -> str:
    name = "sparse nn.Embedding" if option.memory == SPARSE else option.memory
    if not option.same:
        name += " (SparseAdam)"
    if with_form:
        form = option.form
        name += f", {form.storage}" + (f", {form.state} state" if form.state != form.storage else "")
    return name
