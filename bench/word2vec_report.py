"""What bench/word2vec.py has found, in words, tables and a picture; sets that settings were chosen on are reported apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiment import blocks_of, commit_and_date
from word2vec_data import RESERVED, TUNED
from word2vec_statistics import (
    BETTER,
    GENSIM,
    NOT_WORSE,
    STUDENT,
    UNSURE,
    WORSE,
    Difference,
    Interval,
    System,
    differences,
    in_group,
    mean,
    ratio,
    runs_of,
    score_names,
    scores,
    speeds,
    systems,
    upgrade,
)

from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import format_bytes

OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD", "adam": "Adam"}
_MODELS = {"skipgram": "skip-gram", "cbow": "CBOW"}
GROUPS = (TUNED, RESERVED)


def label(system: System, with_dim: bool = True) -> str:
    """Return the display name of a system, without its corpus."""
    optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer)
    parts = [_MODELS[system.model], system.name, optimizer, f"dim {system.dim}" if with_dim else ""]
    return ", ".join(filter(None, parts))


def table(result: dict[str, Any], corpus: str) -> str:
    """Return a row of markdown for each system of a corpus: means over the seeds with their intervals."""
    names = score_names(result, corpus)
    head = ["model", "system", "optimizer", "dim", "words/s", "training alone", "vocabulary alone"]
    head += [f"{name} ({group})" for group in GROUPS for name in names if in_group(result, name, group)]
    lines = [[*head, "peak memory"], ["---", "---", "---", *("---:" for _ in head[2:])]]
    for system in systems(result, corpus):
        runs = runs_of(result, system)
        measured = zip(*(speeds(result, run) for run in runs), strict=True)
        cells = [_thousands(mean(values)) for values in measured]
        cells += [_score(mean(found)) if (found := scores(result, system, name)) else "" for name in names]
        peak = format_bytes(max(run["peak_bytes"] for run in runs))
        optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer) or "its own SGD"
        lines.append([_MODELS[system.model], system.name, optimizer, str(system.dim), *cells, peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _thousands(found: Interval) -> str:
    half = "" if found.half is None else f" ± {found.half / 1e3:,.0f}"
    return f"{found.value / 1e3:,.0f}{half} k"


def _score(found: Interval) -> str:
    return f"{found.value:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def verdicts(result: dict[str, Any], corpus: str) -> list[str]:
    """Return for each of our systems its speed beside gensim's and, for either group of sets, the differences to gensim."""
    lines = []
    for system in systems(result, corpus):
        beside = ratio(result, system)
        if system.name == GENSIM or beside is None:
            continue
        paired = f" (seed by seed {min(beside.paired):.2f}x to {max(beside.paired):.2f}x)" if beside.paired else ""
        lines.append(
            f"- {label(system)}: {beside.medians:.2f}x gensim's words/s{paired}{', slower' if beside.medians < 1 else ''}"
        )
        lines += [f"  - {group}: {shown}" for group in GROUPS if (shown := _verdicts_of(result, system, group))]
    return lines


def _verdicts_of(result: dict[str, Any], system: System, group: str) -> str:
    found: dict[str, list[str]] = {BETTER: [], NOT_WORSE: [], WORSE: [], UNSURE: []}
    for name, measured, verdict in differences(result, system):
        if in_group(result, name, group):
            found[verdict].append(f"{name} {_difference(measured)}")
    return "; ".join(f"{_emphasised(verdict)}: {', '.join(sets)}" for verdict, sets in found.items() if sets)


def _difference(found: Difference) -> str:
    interval = "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
    return f"{found.value:+.3f}{interval}"


def _emphasised(verdict: str) -> str:
    return f"**{verdict}**" if verdict == WORSE else verdict


def about_all(result: dict[str, Any]) -> list[str]:
    """Return what was trained, where, how it is compared, and any caveats."""
    settings, environment = result["settings"], result["environment"]
    versions = environment["versions"]
    trained_ones = [system.model for system in systems(result)] or settings["models"]
    models = " and ".join(_MODELS[model] for model in dict.fromkeys(trained_ones))
    seeds = _plural(settings["seeds"], "seed")
    interval = (
        f"means of {seeds} with the 95% confidence interval of the mean (Student's t)"
        if settings["seeds"] > 1
        else "one seed"
    )
    trained = (
        f"{models} with {settings['negative']} negative samples and window {settings['window']}, everything else by default; "
        f"{interval}; {environment['device']}, gensim {versions['gensim']} on {_plural(result['workers'], 'worker')}, torch "
        f"{versions['torch']}, {commit_and_date(result)}."
    )
    measures = (
        "Words/s are those of the text, times the epochs, by the wall clock: counting the vocabulary and training, without "
        "imports (counting alone: the text once). Similarities are Spearman's, analogies the share of right answers among the "
        f"{settings['restrict']:,} most frequent words, all by one evaluator, whose figures are gensim's. "
        "Memory is resident memory with child processes, mapped files and all imports."
    )
    lines = [trained[0].upper() + trained[1:], measures, " ".join(_protocol(result))]
    if not result["same_vocabulary"]:
        lines.append("**The vocabularies were not the same**, so the figures cannot be compared.")
    for failure in result["failures"]:
        lines.append(f"**Failed**: {failure['title']}, seed {failure['seed']}: {failure['error']}")
    return lines


def _protocol(result: dict[str, Any]) -> Iterator[str]:
    tuned, reserved = ([name for name in result["groups"] if in_group(result, name, group)] for group in GROUPS)
    if tuned:
        yield f"Tuned sets, on which settings of the package were chosen: {', '.join(tuned)}."
    yield f"Reserved sets, by which no setting may be chosen (see docs/word2vec.md): {', '.join(reserved) or 'none'}."
    found = result["differences"]
    if found["method"] == STUDENT:
        yield "Differences to gensim have Student's 95% confidence interval over seeds."
        return
    over = {one["seeds"] > 1 for one in found["found"]}
    what = "word pairs or questions" + (" and over seeds" if over == {True} else "")
    only = " only: one seed says nothing about others" if over == {False} else ""
    yield (
        f"Differences to gensim have 95% percentile intervals of a paired bootstrap over {what}{only} "
        f"({found['resamples']:,} resamples); sets with fewer than {found['least_items']} known items are not compared."
    )


def about_corpus(result: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the size and settings of a corpus, and how much of the sets its vocabulary covers."""
    asked: dict[str, int] = {}
    for run in result["runs"]:
        if run["corpus"] == about["name"]:
            asked |= {name: count for name, count in run.get("asked", {}).items() if name in result["groups"]}
    parts = [
        f"**{about['name']}**: {about['words']:,} words, {_plural(about['epochs'], 'epoch')}, sample {about['sample']:g}, "
        f"words that occur {about['min_count']} times or more."
    ]
    if asked:
        parts.append(f"In its vocabulary: {', '.join(f'{count:,} of {name}' for name, count in asked.items())}.")
    if not about["analogies"]:
        parts.append("Analogies say nothing on a corpus of this size and are not asked.")
    return " ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def blocks(result: dict[str, Any]) -> list[str]:
    """Return all of it as blocks of markdown."""
    found = about_all(result)
    for about in result["corpora"]:
        if systems(result, about["name"]):
            lines = verdicts(result, about["name"])
            found += [about_corpus(result, about), table(result, about["name"])]
            found += (
                ["Against gensim, with the 95% confidence interval of the difference:", "\n".join(lines)]
                if lines
                else []
            )
    return found


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/word2vec.md; `picture` is its path or nothing."""
    return blocks_of(picture, "word2vec beside gensim: words/s and quality", *blocks(upgrade(result)))


# --- picture --------------------------------------------------------------------------------------------------------------


_WIDTH = 14.0
_RESERVED_PAPER = "#fdf6e3"
_MEANING = {"tuned": "tuned: settings were chosen on these sets", "reserved": "reserved: no setting is chosen by these"}


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: panels of words/s, of tuned and of reserved sets, with a row for each system of a corpus."""
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
    return figure


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
