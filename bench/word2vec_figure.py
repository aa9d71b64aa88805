"""What bench/word2vec.py has found, as a picture and as a block of docs/word2vec.md."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pictures import save_picture
from word2vec_sets import RESERVED
from word2vec_statistics import (
    GENSIM,
    System,
    in_group,
    mean,
    runs_of,
    score_names,
    scores,
    speeds,
    systems,
    upgrade,
)
from word2vec_text import GROUPS, OPTIMIZERS, blocks, label

from speedtransfer.benchmark.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy

BYTES = 100_000  # at most: a repository keeps every picture for ever
_WIDTH = 14.0
_RESERVED_PAPER = "#fdf6e3"
_MEANING = {"tuned": "tuned: settings were chosen on these sets", "reserved": "reserved: no setting is chosen by these"}


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/word2vec.md; `picture` is its path or nothing."""
    image = f"![word2vec beside gensim: words/s and quality]({picture})" if picture else ""
    return "\n\n".join(filter(None, [image, *blocks(upgrade(result))]))


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none, or what is wrong with it."""
    if problem := save_picture(lambda: draw(result), path):
        return problem
    size = path.stat().st_size
    return f"{path} has {size} bytes, more than {BYTES}: think twice before it is committed" if size > BYTES else ""


def draw(result: dict[str, Any]) -> bytes:
    """Return the picture as PNG: panels of words/s, of tuned and of reserved sets, with a row for each system of a corpus."""
    result = upgrade(result)
    rows = {about["name"]: systems(result, about["name"]) for about in result["corpora"]}
    rows = {corpus: found for corpus, found in rows.items() if found}
    groups = {group: [name for name in _panels(result, rows) if in_group(result, name, group)] for group in GROUPS}
    heights = [1.2 + 0.36 * len(found) for found in rows.values()]
    figure = require_matplotlib()(_WIDTH, 0.7 + sum(heights))
    shown = {group: names for group, names in groups.items() if names}
    widths = (3.4, *(max(len(names), 1.2) for names in shown.values()))
    parts = figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)
    dims = len({system.dim for found in rows.values() for system in found}) > 1
    speed = parts[0][0].subplots(len(rows), 1, squeeze=False, height_ratios=heights)
    for (axes,), (corpus, found) in zip(speed, rows.items(), strict=True):
        _draw_speed(axes, result, corpus, found, dims)
    parts[0][0].suptitle("speed", fontsize=11, color=QUIET)
    for part, (group, names) in zip(parts[0][1:], shown.items(), strict=True):
        part.suptitle(_MEANING[group] if len(names) > 1 else group, fontsize=11, color=QUIET)
        grid = part.subplots(len(rows), len(names), squeeze=False, height_ratios=heights)
        for line, (corpus, found) in zip(grid, rows.items(), strict=True):
            for axes, name in zip(line, names, strict=True):
                _draw_set(axes, result, corpus, found, name)
                if group == RESERVED:
                    axes.set_facecolor(_RESERVED_PAPER)
    figure.supxlabel(_legend(result["settings"]["seeds"]), fontsize=9, color=QUIET)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _panels(result: dict[str, Any], corpora: Any) -> list[str]:
    """Return the sets, analogies not by part."""
    names = dict.fromkeys(name for corpus in corpora for name in score_names(result, corpus))
    return [name for name in names if name in result["groups"]]


def _legend(seeds: int) -> str:
    if seeds == 1:
        return "One seed. Dotted: gensim."
    return (
        f"Bars and large dots: means of {seeds} seeds, small dots: each seed. Lines: 95% confidence interval of the mean. "
        "Dotted: gensim's mean."
    )


def _draw_speed(axes: Any, result: dict[str, Any], corpus: str, rows: list[System], dims: bool) -> None:
    for place, system in enumerate(rows):
        colour = _colour(system)
        dots = [speeds(result, run)[0] / 1e3 for run in runs_of(result, system)]
        axes.barh(place, mean(dots).value, height=0.62, color=colour, alpha=0.45)
        axes.plot(dots, [place] * len(dots), "o", ms=4, color=colour, mec="white", mew=0.5, zorder=4)
    _finish(axes, f"{corpus}\nthousand raw words/s, wall clock", len(rows), 6)
    axes.set_yticks(range(len(rows)), [label(system, dims) for system in rows])
    axes.set_xlim(left=0)


def _draw_set(axes: Any, result: dict[str, Any], corpus: str, rows: list[System], name: str) -> None:
    names = score_names(result, corpus)
    _finish(axes, f"{name}\n({'share right' if f'{name}, semantic' in names else 'Spearman'})", len(rows), 3)
    axes.tick_params(axis="x", labelsize=7.5)  # three numbers of five letters stand below a narrow panel
    axes.set_yticks(range(len(rows)), [])
    if name not in names:
        axes.set_title(f"{name}\n(not asked)", fontsize=10, color=QUIET)
        axes.set_axis_off()
        return
    for place, system in enumerate(rows):
        _show_score(axes, place, scores(result, system, name), _colour(system))
        if system.name == GENSIM:
            same = [row for row, other in enumerate(rows) if (other.model, other.dim) == (system.model, system.dim)]
            _show_gensim(axes, same, scores(result, system, name))


def _finish(axes: Any, title: str, rows: int, ticks: int) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_ylim(rows - 0.5, -0.5)
    tidy(axes)
    axes.locator_params(axis="x", nbins=ticks)


def _show_score(axes: Any, place: int, values: list[float], colour: str) -> None:
    if not values:
        return
    value, half = mean(values)
    axes.errorbar(value, place, xerr=half, fmt="o", ms=6, color=colour, lw=2, zorder=4)
    axes.plot(values, [place + 0.24] * len(values), "o", ms=3, color=colour, alpha=0.7, zorder=3)


def _show_gensim(axes: Any, places: list[int], values: list[float]) -> None:
    """Draw gensim's mean through the rows that are compared with it."""
    if values:
        ends = (min(places) - 0.5, max(places) + 0.5)
        axes.plot([mean(values).value] * 2, ends, ls=":", lw=1.5, color=QUIET, zorder=2)


def _colour(system: System) -> str:
    if system.name == GENSIM:
        return QUIET
    names = list(OPTIMIZERS)
    place = names.index(system.optimizer) if system.optimizer in names else len(names)
    return COLOURS[place % len(COLOURS)]
