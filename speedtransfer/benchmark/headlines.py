"""What the figures of a suite say, in sentences: the shares and ratios that this library is judged by."""

from __future__ import annotations

from collections.abc import Callable

from speedtransfer.benchmark.measure import CaseResult, GroupResult
from speedtransfer.benchmark.units import format_count, format_rate, format_ratio, format_seconds, format_share
from speedtransfer.errors import format_bytes

_TELLING_BYTES = 1e9  # the buffers of a step vanish beside a table of this size


def headlines(suite: str, groups: list[GroupResult]) -> list[str]:
    """Return the sentences for `groups` of `suite`."""
    say = {"transfer": _transfer, "speedtorch": _speedtorch, "tax": _tax, "step": _step, "memory": _memory}[suite]
    return say([group for group in groups if group.ran])


def _transfer(groups: list[GroupResult]) -> list[str]:
    say: dict[str, Callable[[GroupResult], str]] = {"ways": _rows, "both": _rows, "overhead": _overhead}
    return [say[g.params["kind"]](g) for g in groups if g.params.get("headline") and g.ours and g.params["kind"] in say]


def _rows(group: GroupResult) -> str:
    ours = group.ours
    assert ours is not None
    text = f"{group.title}: {format_rate(ours.gb_per_s)} GB/s"
    if group.roof is not None:
        text += f", {format_share(group.share_of_roof(ours))} of {group.roof.name}"
        engines = [case for case in group.ran if case.role == "ours" and case.name.startswith("engine")]
        if engines:
            best = min(engines, key=lambda case: case.median_s)
            text += f" and {format_share(group.share_of_roof(best))} by {best.name}"
    return text + _speed(ours, _rivals(group))


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
    text = f"{group.title}: {format_seconds(ours.median_host_s)} of host time a call"
    empty = next((case for case in group.ran if case.name == "empty launch"), None)
    busy = [case for case in group.ran if case.role == "ours" and case.device_s]
    if busy and empty and empty.device_s:
        shown = ", ".join(f"{case.name} {format_seconds(case.device_s)}" for case in busy)
        text += f"; on the device {shown}, an empty launch {format_seconds(empty.device_s)}"
    return text


def _speedtorch(groups: list[GroupResult]) -> list[str]:
    lines = []
    for group in groups:
        if group.ours is None:
            continue
        place = group.ours.name.rpartition("(")[2]
        rivals = [case for case in group.ran if case.role == "other" and case.name.endswith(place)]
        lines.append(
            f"{group.title}: {group.ours.name} {format_seconds(group.ours.median_s)}{_speed(group.ours, rivals)}"
        )
    return lines


def _tax(groups: list[GroupResult]) -> list[str]:
    from speedtransfer.benchmark.tax import COPIES, HOST, RESIDENT, crossing

    lines = []
    for experiment in dict.fromkeys(group.params["experiment"] for group in groups):
        part = sorted((g for g in groups if g.params["experiment"] == experiment), key=lambda g: g.params["size"])
        times = [{case.name: case.median_s for case in group.ran} for group in part]
        for fast in (RESIDENT, COPIES):
            both = [
                (g.params["size"], t[HOST], t[fast])
                for g, t in zip(part, times, strict=True)
                if {HOST, fast} <= t.keys()
            ]
            size = crossing(*map(list, zip(*both, strict=True))) if both else None
            when = f"pays from size {size:,.0f} on" if size is not None else "does not pay at any size measured"
            lines.append(f"{experiment}: {fast} {when}")
    return lines


def _step(groups: list[GroupResult]) -> list[str]:
    lines = [
        f"{group.title}: the large one takes {format_ratio(large.median_s / small.median_s)} the time of the small one"
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
            lines.append(f"{name}: {format_seconds(case.median_s)} a step, {growth} from {sizes}")
    return lines


def _memory(groups: list[GroupResult]) -> list[str]:
    lines = []
    for group in groups:
        planes = group.params["planes_bytes"]
        for case in group.ran:
            taken = max(case.memory.values(), default=0)
            if case.role == "ours" and taken and planes >= _TELLING_BYTES:
                beyond = f"{100 * (taken / planes - 1):+.1f}% against the {format_bytes(planes)} of its planes"
                lines.append(f"{group.title}, {case.name}: {format_bytes(taken)}, {beyond}")
    return lines
