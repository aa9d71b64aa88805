"""What suite `prefetch` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_count, format_ratio, format_seconds, format_share

_PREFETCH = "prefetch"  # how the names of ways begin that read ahead


def hidden_share(without: CaseResult, ahead: CaseResult, in_memory: CaseResult) -> float | None:
    """Return the share of the waiting that `ahead` hides: 1 takes the time of a table in memory, 0 that without.

    None where there was no waiting: a step in the file takes no longer than one in memory.
    """
    waiting = without.median_s - in_memory.median_s
    return (without.median_s - ahead.median_s) / waiting if waiting > 0 else None


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group."""
    return [_sentence(group) for group in groups if group.ours is not None]


def _sentence(group: GroupResult) -> str:
    without, in_memory, roof = group.ours, _in_memory(group), group.roof
    assert without is not None
    text = f"{group.title}: {format_seconds(without.median_s)} without prefetch"
    if in_memory is not None:
        text += f", {format_seconds(in_memory.median_s)} with the table in memory"
    best = min(_ahead(group), key=lambda case: case.median_s, default=None)
    if best is not None:
        text += f", {format_seconds(best.median_s)} with {best.name}"
        text += f": {format_ratio(without.median_s / best.median_s)} the speed"
        text += f", {format_count(group.params['lookups'] / best.median_s)} rows a second"
        if in_memory is not None:
            shares = [_share(group, case) for case in _ahead(group)]
            text += f"; {_list(shares)} of the waiting is hidden at depth {_list(map(_depth, _ahead(group)))}"
    if roof is not None:
        text += f"; the disk takes {format_seconds(roof.median_s)} for the same pages"
    noisy = any(case.noisy for case in (without, in_memory, best) if case is not None)
    return text + (" (noisy)" if noisy else "")


def _list(texts: Any) -> str:
    return ", ".join(texts)


def _depth(case: CaseResult) -> str:
    return case.name.rpartition(" ")[2]


def _ahead(group: GroupResult) -> list[CaseResult]:
    return [case for case in group.ran if case.role == "ours" and case.name.startswith(_PREFETCH)]


def _in_memory(group: GroupResult) -> CaseResult | None:
    return next((case for case in group.ran if case.role == "other"), None)


def _share(group: GroupResult, case: CaseResult) -> str:
    without, in_memory = group.ours, _in_memory(group)
    assert without is not None
    share = None if in_memory is None else hidden_share(without, case, in_memory)
    # A share below zero is a loss, which `format_share` would print with digits that mean nothing.
    return "none" if share is None or share < 0.005 else format_share(share)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a panel for each group: a bar for each way, with the share of the waiting that it hides."""
    height = max(len(group.ran) for group in groups)
    figure = make_figure(11, 0.8 + (0.7 + 0.32 * height) * len(groups))
    for axes, group in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        cases = group.ran
        ahead = _ahead(group)
        for place, case in enumerate(cases):
            colour = COLOURS[0] if case in ahead else COLOURS[5] if case.role == "ours" else "#b8bec8"
            axes.barh(place, 1e3 * case.median_s, 0.72, color=colour)
            text = format_seconds(case.median_s)
            if case in ahead and group.ours is not None and _in_memory(group) is not None:
                text += f", {_share(group, case)} of the waiting hidden"
            style = {"va": "center", "fontsize": 8.5, "color": INK}
            axes.annotate(text, (1e3 * case.median_s, place), (4, 0), textcoords="offset points", **style)
        tidy(axes)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(cases)), [case.name for case in cases], parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set_xlim(left=0)
        axes.set_title(group.title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.set_xlabel("milliseconds a step, less is better")
    return figure
