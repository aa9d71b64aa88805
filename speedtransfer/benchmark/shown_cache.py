"""What suite `cache` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.cache import COMPUTED, MEASURED, WITHOUT
from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_ratio, format_seconds, format_share


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each cache."""
    found = []
    for group in groups:
        without = next((case for case in group.ran if case.name == WITHOUT), None)
        for case in group.ran:
            if case is without:
                continue
            text = f"{group.title}, {case.name}: {_hits(case)}, {format_seconds(case.median_s)}"
            if without is not None:
                ratio = format_ratio(without.median_s / case.median_s)
                text += f", {ratio} the speed of {format_seconds(without.median_s)} without"
                text += " (noisy)" if case.noisy or without.noisy else ""
            found.append(text)
    return found


def _hits(case: CaseResult) -> str:
    measured, computed = case.figures[MEASURED], case.figures[COMPUTED]
    return (
        f"{format_share(measured)} of the rows of a batch are hits ({format_share(computed)} computed for the hottest)"
    )


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw for each group the hits of each cache, measured and computed, and the time of a step."""
    height = max(len(group.ran) for group in groups)
    figure = make_figure(11, 0.8 + (0.7 + 0.36 * height) * len(groups))
    for row, group in zip(figure.subplots(len(groups), 2, squeeze=False), groups, strict=True):
        hits, times = row
        for place, case in enumerate(group.ran):
            style = {"va": "center", "fontsize": 8.5, "color": INK, "textcoords": "offset points"}
            if MEASURED in case.figures:
                measured, computed = 100 * case.figures[MEASURED], 100 * case.figures[COMPUTED]
                hits.barh(place, measured, 0.6, color=COLOURS[0], label="measured")
                hits.plot([computed] * 2, [place - 0.4, place + 0.4], color=INK, label="computed for the hottest rows")
                hits.annotate(f"{measured:.1f}%", (max(measured, computed), place), (4, 0), **style)
            times.barh(place, 1e3 * case.median_s, 0.6, color=COLOURS[5] if case.name == WITHOUT else COLOURS[0])
            times.annotate(format_seconds(case.median_s), (1e3 * case.median_s, place), (4, 0), **style)
        for axes in row:
            tidy(axes)
            axes.grid(visible=False, axis="y")
            axes.margins(x=0.2)
            axes.set_xlim(left=0)
            axes.set_yticks(range(len(group.ran)), [case.name for case in group.ran] if axes is hits else [])
            axes.set_ylim(len(group.ran) - 0.5, -0.5)
        handles = dict(zip(*reversed(hits.get_legend_handles_labels()), strict=True))
        hits.legend(handles.values(), handles.keys(), fontsize=8, frameon=False)
        hits.set_title(group.title, fontsize=10, color=INK, loc="left", parse_math=False)
    hits.set_xlabel("% of the distinct rows of a batch, more is better")
    times.set_xlabel("milliseconds a step, less is better")
    return figure
