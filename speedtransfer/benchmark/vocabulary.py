"""Suite `vocabulary`: ids of 64 bits without a bound. What does it cost to find their rows, and a step beside a plain table?

Known ids mapped to rows, and new ones given rows, beside Python's dict and sorted arrays; lookups and training steps in a
table with a vocabulary beside those in a plain table with the same rows, whose ids are rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speedtransfer.benchmark import vocabulary_ids, vocabulary_steps
from speedtransfer.benchmark.drawing import COLOURS, INK, bars
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult, noise
from speedtransfer.benchmark.units import format_count, format_ratio, format_seconds
from speedtransfer.benchmark.vocabulary_ids import FIND, INSERT
from speedtransfer.benchmark.vocabulary_steps import PLAIN

NOTE = (
    "Ids are mapped on one core, and drawn uniformly of all that are known: the worst for a cache. What they are looked up in "
    "is made before: sorting is no part of the time. Steps with AdamW take ids by Zipf's law, on all cores; the plain table "
    "has the same rows, and its ids are their numbers. Rows after the first step are compared with those of torch.nn."
)


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Return what the suite compares; `rows` are the known ids, of each table."""
    return vocabulary_ids.groups(quick, rows, seed) + vocabulary_steps.groups(device, quick, rows, seed)


# --- what was found ---------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Return a sentence for each group: ids a second beside those of others; or times beside those of a plain table."""
    return [found for group in groups if (found := (_rates if _is_rate(group) else _times)(group))]


def _is_rate(group: GroupResult) -> bool:
    return group.params["kind"] in (FIND, INSERT)


def _rate(group: GroupResult, case: CaseResult) -> float:
    """Return ids a second."""
    return float(group.params["ids"]) / case.median_s


def _rates(group: GroupResult) -> str:
    ours = [case for case in group.ran if case.role == "ours"]
    others = sorted((case for case in group.ran if case.role != "ours"), key=lambda case: case.median_s)
    if not ours:
        return ""
    shown = ", ".join(f"{case.name} {format_count(_rate(group, case))} ids a second" for case in ours)
    beside = ", ".join(f"{case.name} {format_count(_rate(group, case))}" for case in others)
    return f"{group.title}: {shown}" + (f"; {beside}" if beside else "") + noise(*group.ran)


def _times(group: GroupResult) -> str:
    plain = group.by_name.get(PLAIN)
    if plain is None or len(group.ran) < 2:
        return ""
    ratios = ", ".join(
        f"{case.name} {format_ratio(case.median_s / plain.median_s)}" for case in group.ran if case is not plain
    )
    return f"{group.title}: of the {format_seconds(plain.median_s)} of the {PLAIN}: {ratios}" + noise(*group.ran)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a bar for each way: ids a second, or the time."""
    figure = make_figure(7.5, 0.5 + sum(0.75 + 0.27 * len(group.ran) for group in groups))
    ratios = [1 + len(group.ran) for group in groups]
    for axes, group in zip(
        figure.subplots(len(groups), 1, height_ratios=ratios, squeeze=False)[:, 0], groups, strict=True
    ):
        cases, is_rate = group.ran, _is_rate(group)
        values = [_rate(group, case) / 1e6 if is_rate else 1e3 * case.median_s for case in cases]
        texts = [f"{v:.3g}" if is_rate else format_seconds(c.median_s) for v, c in zip(values, cases, strict=True)]
        colours = [COLOURS[0 if c.role == "ours" else 5 if c.name == PLAIN else 6] for c in cases]
        bars(axes, [case.name for case in cases], values, texts, colours, 0.7, 0.15, 8)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.tick_params(labelsize=8)
        unit = "million ids a second, more is better" if is_rate else "milliseconds, less is better"
        axes.set_title(f"{group.title}\n{unit}", fontsize=8.5, color=INK, loc="left", parse_math=False)
    return figure
