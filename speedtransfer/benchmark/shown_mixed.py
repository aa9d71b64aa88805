"""What suite `mixed` has found, in sentences and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from speedtransfer.benchmark.drawing import INK, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.mixed import ACCURACY, WOULD_TAKE
from speedtransfer.benchmark.mixed_training import AMP_BF16, AMP_FP16, BF16, FORMS, FP32
from speedtransfer.benchmark.units import format_ratio, format_seconds

SAME = 0.05  # of FP32's time: a form that differs by no more is called neither faster nor slower
_AUTOCAST = {"bfloat16": (BF16, AMP_BF16), "float16": (AMP_FP16,)}

Pair = tuple[GroupResult, CaseResult, CaseResult]  # a form and FP32 at a batch size


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return what arithmetic in 16 bits saves or costs here, and a sentence for each form beside FP32."""
    groups = sorted(groups, key=_batch)
    pairs = {form.name: found for form in FORMS if form is not FP32 and (found := _pairs(groups, form.name))}
    verdicts = [_verdict(dtype, [f.name for f in forms], pairs) for dtype, forms in _AUTOCAST.items()]
    return [*filter(None, verdicts), *(_sentence(name, found) for name, found in pairs.items())]


def _batch(group: GroupResult) -> int:
    return int(group.params["batch"])


def _pairs(groups: Sequence[GroupResult], name: str) -> list[Pair]:
    by_name = [(group, {case.name: case for case in group.ran}) for group in groups]
    return [(g, cases[name], cases[FP32.name]) for g, cases in by_name if name in cases and FP32.name in cases]


def _verdict(dtype: str, names: Sequence[str], pairs: dict[str, list[Pair]]) -> str:
    """Return whether to compute in `dtype` saves time, and what the device says that it has for it."""
    found = [pair for name in names for pair in pairs.get(name, [])]
    if not found:
        return ""
    ratios = [case.median_s / plain.median_s for _, case, plain in found]
    faster, slower = sum(ratio < 1 - SAME for ratio in ratios), sum(ratio > 1 + SAME for ratio in ratios)
    if len(ratios) in (faster, slower):
        says = f"{'saves' if faster else 'costs'} time here at every batch size"
    else:
        says = f"is faster here in {faster} and slower in {slower} of {len(ratios)} measurements"
    text = f"computing in {dtype} {says}: {_span(ratios)} the time of {FP32.name}"
    return text + _hardware(found[0][0].params["hardware"].get(dtype), dtype) + _noise(found)


def _hardware(names: Sequence[str] | None, dtype: str) -> str:
    if names is None:
        return ""
    return f"; the device lists {', '.join(names)}" if names else f"; the device lists no instructions for {dtype}"


def _sentence(name: str, pairs: list[Pair]) -> str:
    text = f"{name}: {_by_batch('the time of a step in FP32', [(g, c.median_s / p.median_s) for g, c, p in pairs])}"
    ratios = [(g, _memory(c) / _memory(p)) for g, c, p in pairs if _memory(c) and _memory(p)]
    if ratios:
        text += f"; {_by_batch('the memory', ratios)}"
    text += _accuracy(pairs)
    late = [(group, case.figures[WOULD_TAKE]) for group, case, _ in pairs if WOULD_TAKE in case.figures]
    if late:
        shown = ", ".join(f"{_batch(group):,} ({format_seconds(seconds)})" for group, seconds in late)
        text += f"; not trained through, for the time it would take, at batch {shown}"
    return text + _noise(pairs)


def _by_batch(what: str, ratios: Sequence[tuple[GroupResult, float]]) -> str:
    first, last = ratios[0], ratios[-1]
    text = f"{format_ratio(first[1])} {what} at batch {_batch(first[0]):,}"
    return text if first is last else f"{text}, {format_ratio(last[1])} at {_batch(last[0]):,}"


def _accuracy(pairs: list[Pair]) -> str:
    both = [
        (group, 100 * case.figures[ACCURACY], 100 * plain.figures[ACCURACY])
        for group, case, plain in pairs
        if ACCURACY in case.figures and ACCURACY in plain.figures
    ]
    if not both:
        return ""
    group, ours, plain = max(both, key=lambda found: abs(found[1] - found[2]))
    return f"; accuracy farthest from FP32's at batch {_batch(group):,}: {ours:.1f}% against {plain:.1f}%"


def _span(ratios: Sequence[float]) -> str:
    low, high = format_ratio(min(ratios)), format_ratio(max(ratios))
    return low if low == high else f"{low} to {high}"


def _noise(pairs: Sequence[Pair]) -> str:
    return " (noisy)" if any(case.noisy or plain.noisy for _, case, plain in pairs) else ""


def _memory(case: CaseResult) -> int:
    """Return the bytes that are compared: those of the device where there is one."""
    return case.memory.get("device_bytes", case.memory.get("host_bytes", 0))


# --- the picture --------------------------------------------------------------------------------------------------------


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw time, time beside FP32's, memory and accuracy by batch size, one below the other: a phone is narrow."""
    groups = sorted(groups, key=_batch)
    figure = make_figure(4.8, 10.5)
    times, ratios, memory, accuracy = figure.subplots(4, 1, height_ratios=(4, 3, 4, 4))
    places = range(len(groups))
    ran = [{case.name: case for case in group.ran} for group in groups]
    names = [form.name for form in FORMS if any(form.name in cases for cases in ran)]
    for number, name in enumerate(names):
        style = line_style(number, name == FP32.name)
        cases = [found.get(name) for found in ran]
        plain = [found.get(FP32.name) for found in ran]
        line(times, places, [case and 1e3 * case.median_s for case in cases], name, style)
        pairs = zip(cases, plain, strict=True)
        line(ratios, places, [c and p and c.median_s / p.median_s for c, p in pairs], name, style)
        line(memory, places, [(case and _memory(case) / 1e6) or None for case in cases], name, style)
        # Points beside each other: forms that are right equally often would hide each other.
        beside = [place + 0.13 * (number - (len(names) - 1) / 2) for place in places]
        shares = [100 * c.figures[ACCURACY] if c and ACCURACY in c.figures else None for c in cases]
        line(accuracy, beside, shares, name, {**style, "lw": 0, "ms": 7})
    on_device = any("device_bytes" in case.memory for found in ran for case in found.values())
    panels = {
        times: "milliseconds a step (log scale), less is better",
        ratios: "time of a step, FP32 = 1 (log scale), less is better",
        memory: f"peak MB of the {'device' if on_device else 'process'}, less is better",
        accuracy: "% of words held out predicted, more is better",
    }
    for axes, title in panels.items():
        tidy(axes)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xticks(places, [f"{_batch(group):,}" for group in groups])
        axes.set_xlim(-0.5, len(groups) - 0.5)
    for axes in (times, ratios):
        axes.set_yscale("log")
        if axes is ratios:  # from half to twice at least: small differences are to look small
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.45), max(high, 2.2))
        plain_numbers(axes)
    memory.set_ylim(bottom=0)
    accuracy.set_xlabel("windows of a batch", color=INK)
    legend_below(figure, times)
    return figure
