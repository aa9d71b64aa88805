"""What suite `ranks` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import INK, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_ratio, format_seconds
from speedtransfer.errors import format_bytes


def sent_bytes(case: CaseResult) -> float | None:
    """Return the bytes that a process sends in a step, counted or computed."""
    return case.figures.get("sent_bytes", case.figures.get("computed_sent_bytes"))


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each method in several processes."""
    found = []
    for group in groups:
        one = group.ours
        for case in group.ran:
            if group.params["ranks"] == 1 or case is one:
                continue
            text = f"{group.params['ranks']} processes, {case.name}: {format_seconds(case.median_s)} a step"
            if one is not None:
                ratio = format_ratio(case.median_s / one.median_s)
                text += f", {ratio} the {format_seconds(one.median_s)} of one process"
            count = sent_bytes(case)
            if count is not None:
                text += f"; a process sends {format_bytes(count)}"
                text += " (computed)" if "computed_sent_bytes" in case.figures else ""
            found.append(text + (" (noisy)" if case.noisy or (one is not None and one.noisy) else ""))
    return found


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the time of a step, and the bytes that a process sends, by the number of processes."""
    groups = sorted(groups, key=lambda group: group.params["ranks"])
    ranks = [group.params["ranks"] for group in groups]
    figure = make_figure(11, 5.2)
    time, sent = figure.subplots(1, 2)
    names = list(dict.fromkeys(case.name for group in groups for case in group.ran))
    for number, name in enumerate(names):
        cases = [next((case for case in group.ran if case.name == name), None) for group in groups]
        style = line_style(number, any(case is not None and case.role == "ours" for case in cases))
        line(time, ranks, [case and 1e3 * case.median_s for case in cases], name, style)
        # A process alone sends nothing, for which a logarithmic axis has no place.
        line(sent, ranks, [((case and sent_bytes(case)) or 0) / 1e6 or None for case in cases], name, style)
    time.set(yscale="log", ylabel="milliseconds a step")
    sent.set(yscale="log", ylabel="MB that a process sends in a step")
    time.set_title("The same batch in all processes together", fontsize=11, color=INK)
    sent.set_title("For the table; of torch.nn computed", fontsize=11, color=INK)
    for axes in (time, sent):
        axes.set_xlabel("processes")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        tidy(axes)
    plain_numbers(time)
    if sent.lines:
        plain_numbers(sent)
    legend_below(figure, time)
    return figure
