"""What suite `vocabulary` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_count, format_ratio, format_seconds
from speedtransfer.benchmark.vocabulary import FIND, INSERT
from speedtransfer.benchmark.vocabulary_steps import PLAIN


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group: ids a second beside those of others; or times beside those of a plain table."""
    return [found for group in groups if (found := (_rates if _is_rate(group) else _times)(group))]


def _is_rate(group: GroupResult) -> bool:
    return group.params["kind"] in (FIND, INSERT)


def _noise(group: GroupResult) -> str:
    return " (noisy)" if any(case.noisy for case in group.ran) else ""


def _rate(group: GroupResult, case: CaseResult) -> float:
    """Return ids a second."""
    return float(group.params["ids"]) / case.median_s


def _rates(group: GroupResult) -> str:
    ours = [case for case in group.ran if case.role == "ours"]
    others = sorted((case for case in group.ran if case.role != "ours"), key=lambda case: case.median_s)
    if not ours:
        return ""
    shown = ", ".join(f"{case.name} {format_count(_rate(group, case))} ids a second" for case in ours)
    beside = ", ".join(f"{case.name} {format_count(_rate(group, case))}" for case in others)
    return f"{group.title}: {shown}" + (f"; {beside}" if beside else "") + _noise(group)


def _times(group: GroupResult) -> str:
    plain = next((case for case in group.ran if case.name == PLAIN), None)
    if plain is None or len(group.ran) < 2:
        return ""
    ratios = ", ".join(
        f"{case.name} {format_ratio(case.median_s / plain.median_s)}" for case in group.ran if case is not plain
    )
    return f"{group.title}: of the {format_seconds(plain.median_s)} of the {PLAIN}: {ratios}" + _noise(group)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a bar for each way: ids a second, or the time."""
    figure = make_figure(7.5, 0.5 + sum(0.75 + 0.27 * len(group.ran) for group in groups))
    ratios = [1 + len(group.ran) for group in groups]
    for axes, group in zip(
        figure.subplots(len(groups), 1, height_ratios=ratios, squeeze=False)[:, 0], groups, strict=True
    ):
        for place, case in enumerate(group.ran):
            value = _rate(group, case) / 1e6 if _is_rate(group) else 1e3 * case.median_s
            colour = COLOURS[0] if case.role == "ours" else COLOURS[5] if case.name == PLAIN else COLOURS[6]
            axes.barh(place, value, 0.7, color=colour)
            text = f"{value:.3g}" if _is_rate(group) else format_seconds(case.median_s)
            style = {"va": "center", "fontsize": 8, "color": INK, "textcoords": "offset points"}
            axes.annotate(text, (value, place), (4, 0), **style)
        tidy(axes)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.15)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(group.ran)), [case.name for case in group.ran])
        axes.set_ylim(len(group.ran) - 0.5, -0.5)
        axes.tick_params(labelsize=8)
        unit = "million ids a second, more is better" if _is_rate(group) else "milliseconds, less is better"
        axes.set_title(f"{group.title}\n{unit}", fontsize=8.5, color=INK, loc="left", parse_math=False)
    return figure
