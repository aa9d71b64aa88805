"""What bench/word2vec.py has found, as a picture, a table and in words."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from word2vec_statistics import (
    BETTER,
    GENSIM,
    NOT_WORSE,
    UNSURE,
    WORSE,
    Interval,
    System,
    differences,
    mean,
    ratio,
    runs_of,
    score_names,
    scores,
    speeds,
    systems,
)

from speedtransfer.benchmark.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import SpeedtransferError, format_bytes

BYTES = 100_000  # at most: a repository keeps every picture for ever
_OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD", "adam": "Adam"}
_WIDTH = 12.5


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none, or what is wrong with it."""
    try:
        from PIL import Image  # matplotlib brings it

        picture = draw(result)
    except (ImportError, SpeedtransferError) as error:
        return f"no picture {path}: {error}"
    with Image.open(io.BytesIO(picture)) as image:  # few colours are enough for bars and dots
        image.convert("RGB").quantize(64).save(path, optimize=True)
    size = path.stat().st_size
    return f"{path} has {size} bytes, more than {BYTES}: think twice before it is committed" if size > BYTES else ""


def draw(result: dict[str, Any]) -> bytes:
    """Return the picture as PNG: a row for each system, words/s on the left and then a panel for each set."""
    rows = systems(result)
    panels = [name for name in score_names(result) if ", " not in name]
    figure = require_matplotlib()(_WIDTH, 1.5 + 0.42 * len(rows))
    speed, *sets = figure.subplots(
        1, 1 + len(panels), sharey=True, width_ratios=(2, *(1 for _ in panels)), squeeze=False
    )[0]
    for place, system in enumerate(rows):
        colour = _colour(system)
        dots = [speeds(result, run)[0] / 1e3 for run in runs_of(result, system)]
        speed.barh(place, mean(dots).value, height=0.62, color=colour, alpha=0.45)
        speed.plot(dots, [place] * len(dots), "o", ms=4, color=colour, mec="white", mew=0.5, zorder=4)
        for axes, name in zip(sets, panels, strict=True):
            _show_score(axes, place, scores(result, system, name), colour)
    for axes, name in zip(sets, panels, strict=True):
        for dim in sorted({system.dim for system in rows}):
            _show_gensim(axes, [*enumerate(rows)], scores(result, System(GENSIM, "", dim), name), dim)
    dims = len({system.dim for system in rows}) > 1
    speed.set_yticks(range(len(rows)), [label(system, dims) for system in rows])
    speed.set_ylim(len(rows) - 0.5, -0.5)
    speed.set_xlim(left=0)
    titles = {speed: "thousand raw words/s, wall clock"} | {
        axes: f"{name}\n({'share right' if f'{name}, semantic' in score_names(result) else 'Spearman'})"
        for axes, name in zip(sets, panels, strict=True)
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=11, color=INK)
        tidy(axes)
        axes.locator_params(axis="x", nbins=6 if axes is speed else 3)
    seeds = result["settings"]["seeds"]
    text = (
        f"Bars and large dots: means of {seeds} seeds, small dots: each seed. Lines: 95% confidence interval of the mean. "
        "Dotted: gensim's mean."
        if seeds > 1
        else "One seed. Dotted: gensim."
    )
    figure.supxlabel(text, fontsize=9, color=QUIET)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _show_score(axes: Any, place: int, values: list[float], colour: str) -> None:
    if not values:
        return
    value, half = mean(values)
    axes.errorbar(value, place, xerr=half, fmt="o", ms=7, color=colour, lw=2, zorder=4)
    axes.plot(values, [place + 0.24] * len(values), "o", ms=3, color=colour, alpha=0.7, zorder=3)


def _show_gensim(axes: Any, rows: list[tuple[int, System]], values: list[float], dim: int) -> None:
    """Draw gensim's mean through the rows of a dimension."""
    places = [place for place, system in rows if system.dim == dim]
    if values:
        ends = (min(places) - 0.5, max(places) + 0.5)
        axes.plot([mean(values).value] * 2, ends, ls=":", lw=1.5, color=QUIET, zorder=2)


def _colour(system: System) -> str:
    if system.name == GENSIM:
        return QUIET
    names = list(_OPTIMIZERS)
    place = names.index(system.optimizer) if system.optimizer in names else len(names)
    return COLOURS[place % len(COLOURS)]


def label(system: System, with_dim: bool = True) -> str:
    """Return the name of a system for people."""
    parts = [system.name, _OPTIMIZERS.get(system.optimizer, system.optimizer), f"dim {system.dim}" if with_dim else ""]
    return ", ".join(filter(None, parts))


def table(result: dict[str, Any]) -> str:
    """Return a row of markdown for each system: means over the seeds with their intervals."""
    names = score_names(result)
    head = ["system", "optimizer", "dim", "words/s", "training alone", "vocabulary alone", *names, "peak memory"]
    lines = [head, ["---", "---", *("---:" for _ in head[2:])]]
    for system in systems(result):
        runs = runs_of(result, system)
        measured = zip(*(speeds(result, run) for run in runs), strict=True)
        cells = [_thousands(mean(values)) for values in measured]
        cells += [_score(mean(found)) if (found := scores(result, system, name)) else "" for name in names]
        peak = format_bytes(max(run["peak_bytes"] for run in runs))
        optimizer = _OPTIMIZERS.get(system.optimizer, system.optimizer) or "its own SGD"
        lines.append([system.name, optimizer, str(system.dim), *cells, peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _thousands(found: Interval) -> str:
    half = "" if found.half is None else f" ± {found.half / 1e3:,.0f}"
    return f"{found.value / 1e3:,.0f}{half} k"


def _score(found: Interval) -> str:
    return f"{found.value:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return a line for each of our systems: its speed beside gensim's, and on every set how far it is from gensim."""
    lines = []
    for system in systems(result):
        beside = ratio(result, system)
        if system.name == GENSIM or beside is None:
            continue
        paired = f" (seed by seed {min(beside.paired):.2f}x to {max(beside.paired):.2f}x)" if beside.paired else ""
        speed = f"{beside.medians:.2f}x gensim's words/s{paired}{', slower' if beside.medians < 1 else ''}"
        found: dict[str, list[str]] = {BETTER: [], NOT_WORSE: [], WORSE: [], UNSURE: []}
        for name, (value, half), verdict in differences(result, system):
            found[verdict].append(f"{name} {value:+.3f}" + ("" if half is None else f" ± {half:.3f}"))
        groups = [f"{_emphasised(verdict)}: {', '.join(sets)}" for verdict, sets in found.items() if sets]
        lines.append("; ".join([f"{label(system)}: {speed}", *groups]))
    return lines


def _emphasised(verdict: str) -> str:
    return f"**{verdict}**" if verdict == WORSE else verdict


def sentences(result: dict[str, Any]) -> list[str]:
    """Return what was trained, where, and what is not as one would have it."""
    settings, corpus, environment = result["settings"], result["corpus"], result["environment"]
    versions = environment["versions"]
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    seeds = _plural(settings["seeds"], "seed")
    interval = f"means of {seeds} with the 95% confidence interval of the mean" if settings["seeds"] > 1 else "one seed"
    trained = (
        f"{corpus['name']}, {corpus['words']:,} words, {_plural(settings['epochs'], 'epoch')}, skip-gram with "
        f"{settings['negative']} negatives, window {settings['window']}, sample {settings['sample']:g}, words that occur "
        f"{settings['min_count']} times or more; everything else by default; {interval}; {environment['device']}, gensim "
        f"{versions['gensim']} on {_plural(result['workers'], 'worker')}, torch {versions['torch']}, commit {commit}, "
        f"{environment['date'][:10]}."
    )
    told = (
        "Words/s are those of the text, times the epochs, by the wall clock: counting the vocabulary and training, without "
        "imports (counting alone: the text once). Similarities are Spearman's, analogies the share of right answers among the "
        f"{settings['restrict']:,} most frequent words, all by one evaluator, whose figures are gensim's. "
        "Memory is resident memory with child processes, mapped files and all imports."
    )
    lines = [trained, told]
    if not result["same_vocabulary"]:
        lines.append("**The vocabularies were not the same**, so the figures cannot be compared.")
    for failure in result["failures"]:
        lines.append(f"**Failed**: {failure['title']}, seed {failure['seed']}: {failure['error']}")
    return lines


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of README.md; `picture` is its path or nothing."""
    image = f"![word2vec beside gensim: words/s and quality]({picture})" if picture else ""
    lines = "\n".join(f"- {line}" for line in verdicts(result))
    about = "Against gensim, with the 95% confidence interval of the difference of the means:"
    return "\n\n".join(filter(None, [image, *sentences(result), table(result), about if lines else "", lines]))
