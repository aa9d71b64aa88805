"""What the figures of a suite say, in sentences: the shares and ratios that this library is judged by."""

from __future__ import annotations

from collections.abc import Callable

from speedtransfer.benchmark import (
    shown_cache,
    shown_exchange,
    shown_lookup,
    shown_mixed,
    shown_ngram,
    shown_prefetch,
    shown_ranks,
    shown_vocabulary,
)
from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_count, format_rate, format_ratio, format_seconds, format_share
from speedtransfer.errors import format_bytes

SMALL_STEP = "small step"
# Experiments of suite `step` with exact idle rows.
_EXACT = (SMALL_STEP, "many tables", "one table", "whole table", "DeepFM", "idle rows")
_TELLING_BYTES = 1e9  # the buffers of a step vanish beside a table of this size


def headlines(suite: str, groups: list[GroupResult]) -> list[str]:
    """Return the sentences for `groups` of `suite`."""
    say = {
        "transfer": _transfer,
        "speedtorch": _speedtorch,
        "tax": _tax,
        "step": _step,
        "precision": _precision,
        "mixed": shown_mixed.sentences,
        "memory": _memory,
        "prefetch": shown_prefetch.sentences,
        "cache": shown_cache.sentences,
        "lookup": shown_lookup.sentences,
        "vocabulary": shown_vocabulary.sentences,
        "ranks": shown_ranks.sentences,
        "exchange": shown_exchange.sentences,
        "ngram": shown_ngram.sentences,
    }[suite]
    return say([group for group in groups if group.ran])


def _transfer(groups: list[GroupResult]) -> list[str]:
    say: dict[str, Callable[[GroupResult], str]] = {"ways": _rows, "both": _rows, "overhead": _overhead}
    return [say[g.params["kind"]](g) for g in groups if g.params.get("headline") and g.ours and g.params["kind"] in say]


def _rows(group: GroupResult) -> str:
    ours = group.ours
    assert ours is not None
    rivals, unchecked = _rivals(group), group.unchecked
    text = f"{group.title}: {format_rate(ours.gb_per_s)} GB/s"
    if group.roof is not None:
        text += f", {format_share(group.share_of_roof(ours))} of {group.roof.name}"
        if unchecked is not None and unchecked is not ours:
            text += f", {format_share(group.share_of_roof(unchecked))} with check=False"
        engines = [case for case in group.ran if case.role == "ours" and case.name.startswith("engine")]
        if engines:
            best = min(engines, key=lambda case: case.median_s)
            text += f" and {format_share(group.share_of_roof(best))} by {best.name}"
    return text + _speed(ours, rivals) + _noise(ours, unchecked, group.roof, *rivals)


def _noise(*cases: CaseResult | None) -> str:
    """Return " (noisy)" where one of `cases` is."""
    return " (noisy)" if any(case is not None and case.noisy for case in cases) else ""


def _speed(ours: CaseResult, others: list[CaseResult]) -> str:
    """Return "; 2.00x the speed of this, 30.0x of that"."""
    ratios = [f"{format_ratio(case.median_s / ours.median_s)} the speed of {case.name}" for case in others]
    return f"; {', '.join([*ratios[:1], *(r.replace('the speed of', 'of') for r in ratios[1:])])}" if ratios else ""


def _rivals(group: GroupResult) -> list[CaseResult]:
    """Return the fastest way of torch alone, the plainest (t[idx]), and the fastest that uses CuPy or a view made with it."""
    others = sorted((case for case in group.ran if case.role == "other"), key=lambda case: case.median_s)
    views = [case for case in others if case.name.startswith("CuPy") or "UVA" in case.name]
    torch_only = [case for case in others if case not in views]
    plain = [case for case in torch_only if case.name.startswith("t[idx]")]
    return list({case.name: case for case in (*torch_only[:1], *plain[:1], *views[:1])}.values())


def _overhead(group: GroupResult) -> str:
    ours = group.ours
    assert ours is not None
    unchecked = group.unchecked
    text = f"{group.title}: {format_seconds(ours.median_host_s)} of host time a call"
    if unchecked is not None and unchecked is not ours:
        text += f", {format_seconds(unchecked.median_host_s)} with check=False"
    empty = next((case for case in group.ran if case.name == "empty launch"), None)
    busy = [case for case in group.ran if case.role == "ours" and case.device_s]
    if busy and empty and empty.device_s:
        shown = ", ".join(f"{case.name} {format_seconds(case.device_s)}" for case in busy)
        text += f"; on the device {shown}, an empty launch {format_seconds(empty.device_s)}"
    return text + _noise(ours, unchecked, empty)


def _speedtorch(groups: list[GroupResult]) -> list[str]:
    lines = []
    for group in groups:
        if group.ours is None:
            continue
        ours, *others = [case for case in group.ran if case.role == "ours"]
        rivals = [case for case in group.ran if case.role == "other"]
        text = f"{group.title}: {ours.name} {format_seconds(ours.median_s)}"
        text += "".join(f", {case.name} {format_seconds(case.median_s)}" for case in others)
        lines.append(text + _speed(ours, rivals) + _noise(ours, *others, *rivals))
    return lines


def _tax(groups: list[GroupResult]) -> list[str]:
    from speedtransfer.benchmark.tax import COPIES, HOST, RESIDENT, pays

    lines = []
    groups = [group for group in groups if group.params.get("cuda")]  # else the CPU is the device: nothing can pay
    for experiment in dict.fromkeys(group.params["experiment"] for group in groups):
        part = sorted((g for g in groups if g.params["experiment"] == experiment), key=lambda g: g.params["size"])
        lines += [f"{experiment}: {fast} {pays(part, HOST, fast)[0]}" for fast in (RESIDENT, COPIES)]
    return lines


def exact_and_lazy(group: GroupResult) -> tuple[CaseResult, CaseResult] | None:
    """Return the exact and the lazy step of a group of suite `step`, where it has both."""
    ours = [case for case in group.ran if case.role == "ours"]
    exact, lazy = ([case for case in ours if ("idle=exact" in case.name) == wanted] for wanted in (True, False))
    compared = group.params["experiment"] in _EXACT and exact and lazy
    return (exact[0], lazy[0]) if compared else None


def _idle(group: GroupResult, exact: CaseResult, lazy: CaseResult) -> str:
    ratio = format_ratio(exact.median_s / lazy.median_s)
    others = [case for case in group.ran if case.role == "other"]
    text = f"{group.title}: {format_seconds(exact.median_s)} with idle=exact"
    text += f", {ratio} the {format_seconds(lazy.median_s)} with lazy"
    return text + "".join(f", {format_ratio(exact.median_s / c.median_s)} of {c.name}" for c in others)


def _small(group: GroupResult, exact: CaseResult, lazy: CaseResult) -> str:
    others = [case for case in group.ran if case.role == "other"]
    text = f"{group.title}: {format_seconds(lazy.median_s)}"
    text += "".join(f", {format_ratio(lazy.median_s / case.median_s)} of {case.name}" for case in others)
    return f"{text}; {format_seconds(exact.median_s)} with idle=exact"


def _is_beside_dense(group: GroupResult) -> bool:
    """Tell whether exact steps are compared with dense ones alone."""
    return len(group.ran) == 2 and group.params["experiment"] in _EXACT and exact_and_lazy(group) is None


def _beside_dense(group: GroupResult) -> str:
    exact, dense = group.ran
    share = format_ratio(exact.median_s / dense.median_s)
    return f"{group.title}: {format_seconds(exact.median_s)} with idle=exact, {share} of {dense.name}"


def _step(groups: list[GroupResult]) -> list[str]:
    pairs = [(group, *pair) for group in groups if (pair := exact_and_lazy(group))]
    lines = [
        (_small if group.params["experiment"] == SMALL_STEP else _idle)(group, exact, lazy) + _noise(*group.ran)
        for group, exact, lazy in pairs
    ]
    lines += [_beside_dense(group) + _noise(*group.ran) for group in groups if _is_beside_dense(group)]
    lines += [
        f"{group.title}: the large one takes {format_ratio(large.median_s / small.median_s)} the time of the small one"
        + _noise(large, small)
        for group in groups
        if group.params["experiment"] == "gpu limit" and len(group.ran) == 2
        for large, small in [group.ran]
    ]
    groups = sorted((g for g in groups if g.params["experiment"] == "size"), key=lambda group: group.params["rows"])
    first = {case.name: (group, case) for group in reversed(groups) for case in group.ran}
    last = {case.name: (group, case) for group in groups for case in group.ran}
    for name, (group, case) in last.items():
        small, before = first[name]
        if group is not small:
            growth = format_ratio(case.median_s / before.median_s)
            sizes = f"{format_count(small.params['rows'])} to {format_count(group.params['rows'])} rows"
            lines.append(
                f"{name}: {format_seconds(case.median_s)} a step, {growth} from {sizes}" + _noise(case, before)
            )
    return lines


def _precision(groups: list[GroupResult]) -> list[str]:
    last = max(groups, key=lambda group: group.params["batch"], default=None)
    if last is None or not last.ran:
        return []
    plain, *others = last.ran
    lines = []
    for case in others:
        shares = [
            f"{format_ratio(case.median_s / plain.median_s)} the time",
            f"{format_ratio(case.figures['table_bytes'] / plain.figures['table_bytes'])} the memory of the table",
            f"{format_ratio(case.figures['moved_bytes'] / plain.figures['moved_bytes'])} the bytes moved",
        ]
        losses = f"loss {case.figures['loss']:.4f} against {plain.figures['loss']:.4f}"
        batch = f"{last.params['batch']:,} examples a step"
        lines.append(f"{case.name} to {plain.name}, {batch}: {', '.join(shares)}, {losses}" + _noise(case, plain))
    return lines


def _memory(groups: list[GroupResult]) -> list[str]:
    lines = []
    for group in groups:
        planes = group.params["planes_bytes"]
        for case in group.ran:
            taken = max(case.memory.values(), default=0)
            if case.role == "ours" and taken and planes >= _TELLING_BYTES:
                beyond = f"{format_ratio(taken / planes)} the {format_bytes(planes)} of its planes"
                lines.append(f"{group.title}, {case.name}: {format_bytes(taken)}, {beyond}")
    return lines
