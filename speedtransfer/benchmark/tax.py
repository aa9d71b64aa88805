"""Suite `tax`: compute against transfer. The device is fast, but is it worth the way there and back?

The classic experiment: a matrix product in NumPy, on the device, and on the device with copies both ways each time; and a
small network trained the same three ways.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from speedtransfer.benchmark.drawing import INK, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.report import TextTable, pivot, show_time
from speedtransfer.benchmark.results import GroupResult, case_names, sorted_by, split_by
from speedtransfer.benchmark.tax_cases import BATCH, COPIES, HOST, RESIDENT, matmul, mlp

NOTE = (
    "Copies go from and to page-locked memory. Without CUDA the CPU is the device as well: what is copied then is memory to "
    "memory, and the lines show what copies and the overhead of torch cost, not what a device gains."
)

_MATMUL_SIZES = (50, 100, 200, 400, 800, 1600, 4000)  # 200 is the classic one
_MLP_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_CPU_LIMIT = {"matmul": 1600, "mlp": 1024}  # beyond, a processor needs seconds and the lines have met
_QUICK_LIMIT = {"matmul": 400, "mlp": 128}


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Return what the suite compares; `quick`: small sizes only. On the CPU copies go from memory to memory."""
    found = []
    for experiment, sizes, what, make in (
        ("matmul", _MATMUL_SIZES, "product of two {0:,} x {0:,} matrices", matmul),
        ("mlp", _MLP_SIZES, f"training step of an MLP, width {{:,}}, batch {BATCH}", mlp),
    ):
        limit = _QUICK_LIMIT[experiment] if quick else math.inf if device.type == "cuda" else _CPU_LIMIT[experiment]
        for size in (s for s in sizes if s <= limit):
            cases = functools.partial(make, size, device, seed)
            params = {"experiment": experiment, "size": size, "cuda": device.type == "cuda"}
            found.append(Group(what.format(size), cases, params))
    return found


def crossing(sizes: Sequence[float], slow: Sequence[float], fast: Sequence[float]) -> float | None:
    """Return the size from which on `fast` takes less time than `slow`; None where it does not at the largest one.

    Both are seconds at each of `sizes`, which ascend. Interpolated where the lines cross as they are drawn, on logarithmic
    axes; the smallest size where `fast` has always been faster.
    """
    gaps = [math.log(b / a) for a, b in zip(slow, fast, strict=True)]  # below zero: `fast` is faster
    if not gaps or gaps[-1] >= 0:
        return None
    last = max((i for i, gap in enumerate(gaps) if gap >= 0), default=-1)
    if last < 0:
        return sizes[0]
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return math.exp(math.log(sizes[last]) * (1 - share) + math.log(sizes[last + 1]) * share)


def pays(groups: Sequence[GroupResult], slow: str, fast: str) -> tuple[str, float | None]:
    """Return from which size on case `fast` beats case `slow`, where the noise lets that be told: "pays from size 185 on".

    The groups are those of one experiment, by size. The number is where the two lines cross, if they do once and both sides
    of it are beyond doubt.
    """
    unclear = "is not clear at this noise", None
    cases = [{case.name: case for case in group.ran} for group in groups]
    both = [
        (g.params["size"], c[slow], c[fast]) for g, c in zip(groups, cases, strict=True) if {slow, fast} <= c.keys()
    ]
    if not both:
        return unclear
    sizes = [size for size, _, _ in both]
    faster = [f.median_s < s.median_s for _, s, f in both]
    # The quartiles of the two do not overlap.
    clear = [s.quartiles_s[1] < f.quartiles_s[0] or f.quartiles_s[1] < s.quartiles_s[0] for _, s, f in both]
    turns = [i for i in range(1, len(both)) if faster[i] != faster[i - 1]]
    if not turns and clear[0] and clear[-1]:
        return ("pays at every size measured" if faster[0] else "does not pay at any size measured"), None
    if len(turns) != 1 or faster[0] or not (clear[turns[0] - 1] and clear[turns[0]]):
        return unclear
    size = crossing(sizes, [s.median_s for _, s, _ in both], [f.median_s for _, _, f in both])
    return f"pays from size {size:,.0f} on", size


# --- what was found ---------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return from which size on the device pays, where there is one."""
    lines = []
    groups = [group for group in groups if group.params.get("cuda")]  # else the CPU is the device: nothing can pay
    for experiment, part in split_by(groups, "experiment").items():
        part = sorted_by(part, "size")
        lines += [f"{experiment}: {fast} {pays(part, HOST, fast)[0]}" for fast in (RESIDENT, COPIES)]
    return lines


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return the times by size, a table for each experiment."""
    return [
        pivot(f"{experiment}, time by size", part, lambda group: f"{group.params['size']:,}", show_time)
        for experiment, part in split_by(groups, "experiment").items()
    ]


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the times by size, a panel for each experiment, and mark where lines cross."""
    titles = {"matmul": "matrix product, n x n", "mlp": "training step of an MLP, width n"}
    parts = {experiment: sorted_by(part, "size") for experiment, part in split_by(groups, "experiment").items()}
    figure = make_figure(5.5 * len(parts), 4.8)
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (experiment, part) in zip(panels, parts.items(), strict=True):
        sizes = [group.params["size"] for group in part]
        times = {name: [group.milliseconds(name) for group in part] for name in case_names(part)}
        for number, (name, values) in enumerate(times.items()):
            line(axes, sizes, values, name, line_style(number, False))
        for fast in (RESIDENT, COPIES) if all(group.params.get("cuda") for group in part) else ():
            size = pays(part, HOST, fast)[1]
            if size is not None:
                there = [(n, ms) for n, ms in zip(sizes, times[fast], strict=True) if ms is not None]
                _mark(axes, size, *zip(*there, strict=True))
        axes.set(xscale="log", yscale="log", xlabel="n", ylabel="milliseconds")
        axes.set_title(titles.get(experiment, experiment), fontsize=11, color=INK)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axes.minorticks_off()
        tidy(axes)
        plain_numbers(axes)
    legend_below(figure, panels[0])
    return figure


def _mark(axes: Any, size: float, sizes: Sequence[float], values: Sequence[Any]) -> None:
    """Mark where two lines cross, on the line of `values`."""
    at = float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))
    axes.plot([size], [at], "o", ms=13, mfc="none", mec=INK, mew=1.4, zorder=5)
    axes.annotate(
        f"crossing at {size:,.0f}", (size, at), (12, -16), textcoords="offset points", fontsize=8.5, color=INK
    )
