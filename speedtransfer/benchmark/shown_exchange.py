"""What suite `exchange` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtransfer.benchmark.drawing import COLOURS, INK, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_count, format_ratio, format_seconds
from speedtransfer.errors import format_bytes

_BAR = 0.8  # of the room for the bars of a method
_SHORT = {
    "fp16_compress_hook": "float16",
    "quantization_pertensor_hook, 8 bits": "8 bits",
    "powerSGD_hook, rank 2": "PowerSGD, rank 2",
    "st.one_bit_hook": "1 bit (st)",
    "PeriodicModelAverager, 8 steps": "local SGD, 8 steps",
    "st.BlockMomentumAverager, 8 steps": "block momentum (st)",
    "comm_dtype=None": "float32 (st)",
    "comm_dtype=torch.bfloat16": "bfloat16 (st)",
    "comm_dtype=torch.int8": "int8 (st)",
}


def sent_in_all(case: CaseResult) -> float:
    """Return the bytes that a process sends in all steps of a case."""
    return case.figures["sent_bytes"] * case.figures["steps"]


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group: what a process sends to come to the loss, and in how many steps, by each method."""
    return [_sentence(group) for group in groups]


def _sentence(group: GroupResult) -> str:
    base, *others = group.ran
    text = f"{group.title}: {base.name} {format_bytes(sent_in_all(base))} sent by a process in {base.figures['steps']:,.0f} "
    text += f"steps and {format_seconds(base.median_s)}"
    for case in others:
        ratios = sent_in_all(case) / sent_in_all(base), case.median_s / base.median_s
        text += f"; {case.name} {format_ratio(ratios[0])} the bytes, {case.figures['steps']:,.0f} steps, "
        text += f"{format_ratio(ratios[1])} the time"
    noisy = any(case.noisy for case in group.ran)
    return text + "".join(f"; {case.name} {case.error}" for case in group.cases if case.error) + " (noisy)" * noisy


_MEASURES: tuple[tuple[str, Callable[[CaseResult], float], Callable[[float], str]], ...] = (
    ("sent by a process", sent_in_all, format_bytes),
    ("steps", lambda case: case.figures["steps"], format_count),
    ("time", lambda case: case.median_s, format_seconds),
)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the bytes, steps and seconds of each method until the loss is reached, a bar for each number of processes."""
    parts: dict[str, list[GroupResult]] = {}
    for group in groups:
        parts.setdefault(group.params["kind"], []).append(group)
    names = {kind: list(dict.fromkeys(c.name for g in part for c in g.ran)) for kind, part in parts.items()}
    heights = [0.8 + sum(0.21 * len(parts[kind]) + 0.06 for _ in names[kind]) for kind in parts]
    figure = make_figure(7, 0.5 + sum(heights))
    panels = figure.subplots(len(parts), len(_MEASURES), squeeze=False, height_ratios=heights)
    for row, (kind, part) in zip(panels, parts.items(), strict=True):
        for axes, (title, value, show) in zip(row, _MEASURES, strict=True):
            _bars(axes, part, names[kind], value, show)
            axes.set_title(title, fontsize=10, color=INK, loc="left")
            if axes is not row[0]:
                axes.set_yticklabels([])
        row[0].set_title(f"{kind}:\nsent by a process", fontsize=10, color=INK, loc="left")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    return figure


def _bars(
    axes: Any,
    groups: list[GroupResult],
    names: list[str],
    value: Callable[[CaseResult], float],
    show: Callable[[float], str],
) -> None:
    height = _BAR / len(groups)
    for number, group in enumerate(groups):
        cases = {case.name: case for case in group.ran}
        there = [(place, value(cases[name])) for place, name in enumerate(names) if name in cases]
        places = [place + (number - (len(groups) - 1) / 2) * height for place, _ in there]
        label = f"{group.params['ranks']} processes"
        bars = axes.barh(places, [v for _, v in there], height * 0.92, color=COLOURS[number], label=label)
        axes.bar_label(bars, [f" {show(v)}" for _, v in there], fontsize=8.5, color=INK)
    tidy(axes)
    axes.grid(visible=False)
    axes.set_yticks(range(len(names)), [_SHORT.get(name, name) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks([])
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=10)
