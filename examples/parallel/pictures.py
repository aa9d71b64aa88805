"""The results as a picture: losses, how far they are from those of one process, and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel.training import ONE
from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, plain_numbers, require_matplotlib, tidy
from speedtransfer.errors import SpeedtransferError
from speedtransfer.units import format_seconds


def save_picture(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none."""
    try:
        draw(result).savefig(path, format="png")
    except (SpeedtransferError, OSError) as error:
        return f"no {path.name}: {' '.join(str(error).split())}"
    return ""


def draw(result: dict[str, Any]) -> Any:
    """Return the figure."""
    runs = result["runs"]
    figure = require_matplotlib()(7, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    (losses, differences), times = above.subplots(1, 2), below.subplots()
    for number, (kind, run) in enumerate(runs.items()):
        steps = range(1, len(run["losses"]) + 1)
        # Lines of the same numbers lie on each other, the thinner ones above.
        colour, width = QUIET if kind == ONE else COLOURS[number], 1.0 + 1.2 * (len(runs) - number - 1)
        losses.plot(steps, run["losses"], label=kind, color=colour, lw=width)
        if kind != ONE:
            differences.plot(steps, run["differences"], color=colour, lw=width)
        bar = times.barh(number, 1e3 * run["step_s"], 0.7, color=colour)
        times.bar_label(bar, [f" {format_seconds(run['step_s'])}"], fontsize=9, color=INK)
    losses.set_yscale("log")
    differences.set_yscale("symlog", linthresh=1e-8)
    differences.set_ylim(bottom=0)
    titles = {
        losses: "loss of the batch, by step",
        differences: "off the loss of one process",
        times: "a step, milliseconds",
    }
    for axes, title in titles.items():
        tidy(axes)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    plain_numbers(losses)
    times.set_yticks(range(len(runs)), list(runs))
    times.invert_yaxis()
    times.grid(visible=False, axis="y")
    times.margins(x=0.2)
    legend_below(figure, losses)
    return figure
