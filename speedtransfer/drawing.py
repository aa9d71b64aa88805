"""Shared parts of the pictures: figures, colours, lines, bars, axes and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speedtransfer.lazy import import_extra

INK, QUIET = "#1f2430", "#6b7280"
_PAPER, _GRID = "#ffffff", "#e3e6ea"
PALE = "#b8bec8"  # for others
# The colour-blind safe palette of Okabe and Ito; the first is ours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a6761d", "#000000")
_MARKS = "osD^vP*Xh"


def require_matplotlib() -> Any:
    """Return a constructor of figures; raises MissingPackageError if matplotlib is not installed."""
    module = import_extra("matplotlib.figure", "plots", '"speedtransfer[plot]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def figure(width: float, height: float) -> Any:
        # Not pyplot, which would choose a backend and keep the figure in global state.
        made = module.Figure(figsize=(width, height), dpi=120, facecolor=_PAPER, layout="constrained")
        FigureCanvasAgg(made)
        return made

    return figure


def line_style(number: int, ours: bool) -> dict[str, Any]:
    """Return the style of a line by its number; ours are thick."""
    style = {"color": COLOURS[number % len(COLOURS)], "marker": _MARKS[number % len(_MARKS)]}
    return style | ({"lw": 2.8, "ms": 6, "zorder": 4} if ours else {"lw": 1.5, "ms": 4.5, "zorder": 3})


def line(axes: Any, x: Sequence[float], y: Sequence[Any], label: str, style: dict[str, Any]) -> None:
    """Draw a line through the points that have a `y`."""
    there = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if there:
        axes.plot(*zip(*there, strict=True), label=label, **style)


def bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colours: Sequence[str],
    height: float = 0.72,
    room: float = 0.25,
    fontsize: float = 8.5,
) -> None:
    """Draw horizontal bars with a text at the end of each; `room` is the share of the axis for it."""
    style = {"va": "center", "fontsize": fontsize, "color": INK, "textcoords": "offset points"}
    for place, (value, text, colour) in enumerate(zip(values, texts, colours, strict=True)):
        axes.barh(place, value, height, color=colour)
        axes.annotate(text, (value, place), (4, 0), **style)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=room)
    axes.set_xlim(left=0)


def tidy(axes: Any) -> None:
    """Reduce axes to a light grid and numbers."""
    axes.grid(visible=True, color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def plain_numbers(axes: Any, which: str = "y") -> None:
    """Label a logarithmic axis with 1, 2, 5, 10 instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    low, high = sorted(axis.get_view_interval())
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5) if high < 1e3 * low else (1,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, axes: Any) -> None:
    """Put the legend of `axes` below the figure, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    # About 13 letters an inch.
    fitting = int(13 * figure.get_figwidth() / (7 + max(map(len, labels), default=0)))
    columns = max(1, min(fitting, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
