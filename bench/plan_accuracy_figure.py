"""What bench/plan_accuracy.py has found, as a picture and in words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pictures import save_picture

from speedtransfer.benchmark.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.benchmark.units import format_seconds
from speedtransfer.errors import format_bytes


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none."""
    return save_picture(lambda: draw(result), path)


def draw(result: dict[str, Any]) -> bytes:
    """Return the picture as PNG: planned over measured, as wide as a telephone."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    cases, goal = result["cases"], result["goal"]
    figure = require_matplotlib()(5, 1.1 + 0.36 * len(cases))
    axes = figure.subplots()
    ratios = [case["ratio"] for case in cases]
    places = list(range(len(cases)))[::-1]
    axes.axvspan(1 / goal, goal, color=COLOURS[0], alpha=0.1, lw=0)
    axes.axvline(1, color=QUIET, lw=1)
    axes.hlines(places, 1, ratios, color=COLOURS[0], lw=2)
    axes.plot(ratios, places, "o", color=COLOURS[0], ms=7)
    tidy(axes)
    axes.set_xscale("log")
    edge = 1.15 * max(goal, *(max(ratio, 1 / ratio) for ratio in ratios))
    axes.set_xlim(1 / edge, edge)
    ticks = [tick for tick in (0.25, 1 / 3, 0.5, 2 / 3, 1, 1.5, 2, 3, 4) if 1 / edge < tick < edge]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    axes.set_yticks(places, [case["name"] for case in cases], fontsize=9, color=INK)
    axes.set_xlabel(f"planned / measured; shaded: within {goal:g}", fontsize=9, color=QUIET)
    axes.set_title("time of a step", fontsize=10, color=INK, loc="left")
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield how near the plans were, and where."""
    environment, count = result["environment"], len(result["cases"])
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    yield (
        f"{result['within']} of {count} planned times are within a factor of {result['goal']:g} of the measured ones, the "
        f"median within {result['median']:g}. {environment['device']}, torch {environment['versions']['torch']}, "
        f"commit {commit}, {environment['date'][:10]}."
    )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/plan.md; `picture` is its path or nothing."""
    rows = [["", "weights and state", "planned", "measured", "planned / measured"], ["---", *["--:"] * 4]]
    for case in result["cases"]:
        times = [format_seconds(case[what]["step_s"]) for what in ("planned", "measured")]
        rows.append([case["name"], format_bytes(case["measured"]["bytes"]), *times, f"{case['ratio']:.2f}"])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    title = "Planned over measured time of a step of ten configurations"
    return "\n\n".join([*([f"![{title}]({picture})"] if picture else []), table, *sentences(result)])
