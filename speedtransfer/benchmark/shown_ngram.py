"""What suite `ngram` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_ratio, format_seconds, format_share

_NO_TABLES = "no tables"


def added_share(case: CaseResult, base: CaseResult) -> float:
    """Return by which share of its time a step is longer with tables than without."""
    return case.median_s / base.median_s - 1


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group."""
    return [_sentence(group) for group in groups if group.ours is not None]


def _base(group: GroupResult) -> CaseResult | None:
    return next((case for case in group.ran if case.name == _NO_TABLES), None)


def _sentence(group: GroupResult) -> str:
    base, ours = _base(group), [case for case in group.ran if case.role == "ours"]
    others = [case for case in group.ran if case.role == "other" and case is not base]
    text = f"{group.title}: "
    if base is None:
        text += ", ".join(f"{case.name} {format_seconds(case.median_s)}" for case in [*ours, *others])
    else:
        text += f"{format_seconds(base.median_s)} without tables; more with "
        text += ", ".join(f"{case.name} {_added(case, base)}" for case in [*ours, *others])
    best = min(ours, key=lambda case: case.median_s)
    ratios = [f"{format_ratio(case.median_s / best.median_s)} of {case.name}" for case in others]
    text += f"; {best.name} is " + ", ".join(ratios).replace(" of ", " the speed of ", 1) if ratios else ""
    return text + (" (noisy)" if any(case.noisy for case in group.ran) else "")


def _added(case: CaseResult, base: CaseResult) -> str:
    share = added_share(case, base)
    # Of a step that is not longer `format_share` would print digits that mean nothing.
    return format_share(share) if share >= 0.001 else "nothing"


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a panel for each group: a bar for each way, with what it adds to a step without tables."""
    height = max(len(group.ran) for group in groups)
    figure = make_figure(11, 0.8 + (0.7 + 0.32 * height) * len(groups))
    for axes, group in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        base = _base(group)
        for place, case in enumerate(group.ran):
            colour = COLOURS[0] if case.role == "ours" else COLOURS[6] if case is base else "#b8bec8"
            axes.barh(place, 1e3 * case.median_s, 0.72, color=colour)
            text = format_seconds(case.median_s)
            if base is not None and case is not base:
                text += f", {_added(case, base)} more"
            style = {"va": "center", "fontsize": 8.5, "color": INK}
            axes.annotate(text, (1e3 * case.median_s, place), (4, 0), textcoords="offset points", **style)
        tidy(axes)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(group.ran)), [case.name for case in group.ran], parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set_title(group.title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.set_xlabel("milliseconds a step, less is better")
    return figure
