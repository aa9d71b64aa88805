"""Suite `mixed`: the classic experiment on mixed precision: time, memory and accuracy of a language model by batch size.

The same network with the same first weights and batches, in float32, in bfloat16, under torch.autocast, and with a table
that stores its rows in bfloat16 and computes in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.mixed_cases import ACCURACY, WOULD_TAKE, cases_of
from speedtransfer.benchmark.mixed_training import AMP_BF16, AMP_FP16, BF16, FORMS, FP32, Sizes
from speedtransfer.benchmark.report import TextTable, accuracy, pivots, show_held, show_time
from speedtransfer.benchmark.results import CaseResult, GroupResult, noise, sorted_by
from speedtransfer.drawing import INK, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.system import cpu_features
from speedtransfer.units import format_ratio, format_seconds

NOTE = (
    "AdamW; the learning rate grows with the root of the batch size. All forms begin with the same weights and see the same "
    "batches. FP32: float32 without TF32, as torch has it by default; BF16, all of it: model.to(torch.bfloat16), parameters "
    "and optimizer state too; AMP: float32 parameters under torch.autocast; rows in BF16: the table stores rows and their "
    "state in bfloat16, and the model computes in float32. The accuracy is the share of words held out that are the most "
    "probable one, after all epochs. Memory is the peak beyond what there was before the model, on the CPU of a process of "
    "its own."
)
_CPU = Sizes(context=4, classes=2000, dim=64, hidden=256, layers=1, windows=61_440, epochs=2, held_out=20_000, lr=1e-3)
# Wide layers need a small learning rate.
_CUDA = Sizes(
    context=8, classes=2000, dim=256, hidden=4096, layers=2, windows=102_400, epochs=2, held_out=20_000, lr=2.5e-4
)
_QUICK = Sizes(context=2, classes=500, dim=16, hidden=32, layers=1, windows=8_192, epochs=1, held_out=2_000, lr=1e-3)
_BATCHES, _QUICK_BATCHES = (128, 256, 512, 1024, 2048), (128, 512)
# CPU features for 16-bit arithmetic; f16c only converts.
_FEATURES = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp"),
}


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each batch size; CUDA has a larger network."""
    sizes = _QUICK if quick else _CUDA if device.type == "cuda" else _CPU
    hidden = " and ".join([str(sizes.hidden)] * sizes.layers)
    return [
        Group(
            f"next word of {sizes.context}, MLP of {hidden}, {batch:,} windows a step, accuracy after {sizes.epochs} "
            f"epoch{'s' * (sizes.epochs > 1)} of {sizes.windows:,}",
            functools.partial(cases_of, device, sizes, batch, seed),
            {"batch": batch, **sizes._asdict(), "hardware": hardware(device)},
            effort={} if quick else {"turns": 4, "samples": 7, "budget_s": 4.0},
        )
        for batch in (_QUICK_BATCHES if quick else _BATCHES)
    ]


def hardware(device: torch.device) -> dict[str, list[str]]:
    """Return the features of the device for 16-bit arithmetic, by dtype; empty if they are unknown."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        # Tensor cores support float16 since 7.0 and bfloat16 since 8.0.
        least = {torch.bfloat16: 8, torch.float16: 7}
        found = {dtype: [f"sm_{major}{minor}"] if major >= at else [] for dtype, at in least.items()}
    else:
        features = cpu_features()
        if not features:
            return {}
        found = {dtype: [name for name in names if name in features] for dtype, names in _FEATURES.items()}
    return {str(dtype).removeprefix("torch."): names for dtype, names in found.items()}


# --- report -------------------------------------------------------------------------------------------------------------


SAME = 0.05  # relative difference from FP32's time up to which a form is neither faster nor slower
_AUTOCAST = {"bfloat16": (BF16, AMP_BF16), "float16": (AMP_FP16,)}

Pair = tuple[GroupResult, CaseResult, CaseResult]  # a form and FP32 at a batch size


def sentences(groups: list[GroupResult]) -> list[str]:
    """Say whether 16-bit arithmetic saves time here, and compare each form with FP32."""
    groups = sorted_by(groups, "batch")
    pairs = {form.name: found for form in FORMS if form is not FP32 and (found := _pairs(groups, form.name))}
    verdicts = [_verdict(dtype, [f.name for f in forms], pairs) for dtype, forms in _AUTOCAST.items()]
    return [*filter(None, verdicts), *(_sentence(name, found) for name, found in pairs.items())]


def _batch(group: GroupResult) -> int:
    return int(group.params["batch"])


def _pairs(groups: Sequence[GroupResult], name: str) -> list[Pair]:
    found = [(group, group.by_name.get(name), group.by_name.get(FP32.name)) for group in groups]
    return [(group, case, plain) for group, case, plain in found if case and plain]


def _verdict(dtype: str, names: Sequence[str], pairs: dict[str, list[Pair]]) -> str:
    """Say whether computing in `dtype` saves time, and which features the device has for it."""
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
    return noise(*(case for _, *both in pairs for case in both))


def _memory(case: CaseResult) -> int:
    """Return the bytes to compare, of the device if there is one."""
    return case.memory.get("device_bytes", case.memory.get("host_bytes", 0))


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw time, time relative to FP32, memory and accuracy by batch size, one below the other for narrow screens."""
    groups = sorted_by(groups, "batch")
    figure = make_figure(4.8, 10.5)
    times, ratios, memory, accuracy = figure.subplots(4, 1, height_ratios=(4, 3, 4, 4))
    places = range(len(groups))
    ran = [group.by_name for group in groups]
    names = [form.name for form in FORMS if any(form.name in cases for cases in ran)]
    for number, name in enumerate(names):
        style = line_style(number, name == FP32.name)
        cases = [found.get(name) for found in ran]
        plain = [found.get(FP32.name) for found in ran]
        line(times, places, [case and 1e3 * case.median_s for case in cases], name, style)
        pairs = zip(cases, plain, strict=True)
        line(ratios, places, [c and p and c.median_s / p.median_s for c, p in pairs], name, style)
        line(memory, places, [(case and _memory(case) / 1e6) or None for case in cases], name, style)
        # Points side by side, as forms of the same accuracy would hide each other.
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
        if axes is ratios:
            # From half to twice at least, so that small differences look small.
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.45), max(high, 2.2))
        plain_numbers(axes)
    memory.set_ylim(bottom=0)
    accuracy.set_xlabel("windows of a batch", color=INK)
    legend_below(figure, times)
    return figure


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return time, memory and accuracy, by batch size."""
    columns = {"a step": show_time, "memory": show_held, "accuracy": lambda group, case: accuracy(case)}
    return pivots("examples of a batch", groups, "batch", columns)
