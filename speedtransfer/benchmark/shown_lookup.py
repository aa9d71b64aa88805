"""What suite `lookup` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.lookup import OURS
from speedtransfer.benchmark.measure import GroupResult
from speedtransfer.benchmark.units import format_ratio, format_seconds


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each number of ids: host time against that of torch."""
    found = []
    for group in groups:
        ours = next((case for case in group.ran if case.name == OURS), None)
        others = [case for case in group.ran if case.name != OURS]
        if ours is None or not others:
            continue
        text = f"{group.title}: {format_seconds(ours.median_host_s)} of the host a call"
        for case in others:
            ratio = format_ratio(ours.median_host_s / case.median_host_s)
            text += f", {ratio} the {format_seconds(case.median_host_s)} of {case.name}"
        found.append(text + (" (noisy)" if any(case.noisy for case in group.ran) else ""))
    return found


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the host time of a call by the number of ids, a line for each way."""
    figure = make_figure(7, 4)
    axes = figure.subplots()
    for name, colour in zip(dict.fromkeys(case.name for group in groups for case in group.ran), COLOURS, strict=False):
        times = {g.params["tokens"]: case.median_host_s for g in groups for case in g.ran if case.name == name}
        axes.plot(list(times), [1e6 * time for time in times.values()], "o-", color=colour, label=name)
    tidy(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ids of a lookup", color=INK)
    axes.set_ylabel("microseconds of the host, less is better", color=INK)
    axes.legend(fontsize=8, frameon=False)
    return figure
