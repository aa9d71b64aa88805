"""What bench/word2vec.py has found, in words, tables and a picture; sets that settings were chosen on are reported apart."""

from __future__ import annotations

from typing import Any

import word2vec_statistics as statistics
from experiment import blocks_of, markdown_table
from word2vec_data import RESERVED, TUNED
from word2vec_statistics import Interval, System, in_group, runs_of, scores, speeds, systems

from speedtransfer.benchmark.report import commit_and_date
from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import format_bytes

OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD", "adam": "Adam"}
_MODELS = {"skipgram": "skip-gram", "cbow": "CBOW"}
GROUPS = (TUNED, RESERVED)


def label(system: System) -> str:
    """Return the display name of a system, without its corpus."""
    optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer)
    return ", ".join(filter(None, [_MODELS[system.model], system.system, optimizer, f"dim {system.dim}"]))


def table(result: dict[str, Any], corpus: str) -> str:
    """Return a row of markdown for each system of a corpus: means over the seeds with their intervals."""
    names = statistics.score_names(result, corpus)
    head = ["system", "words/s", "training alone", "vocabulary alone"]
    head += [f"{name} ({group})" for group in GROUPS for name in names if in_group(result, name, group)]
    lines = [[*head, "peak memory"]]
    for system in systems(result, corpus):
        runs = runs_of(result, system)
        measured = zip(*(speeds(result, run) for run in runs), strict=True)
        cells = [_shown(statistics.mean(values), 1e-3, 0, " k") for values in measured]
        cells += [_shown(statistics.mean(found)) if (found := scores(result, system, name)) else "" for name in names]
        peak = format_bytes(max(run["peak_bytes"] for run in runs))
        lines.append([label(system), *cells, peak])
    return markdown_table(lines)


def _shown(found: Interval, scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
    half = "" if found.half is None else f" ± {scale * found.half:,.{digits}f}"
    return f"{scale * found.value:,.{digits}f}{half}{unit}"


def verdicts(result: dict[str, Any], corpus: str) -> list[str]:
    """Return for each of our systems its speed beside gensim's and, for either group of sets, the differences to gensim."""
    lines = []
    for system in systems(result, corpus):
        beside = statistics.ratio(result, system)
        if system.system == statistics.GENSIM or beside is None:
            continue
        paired = f" (seed by seed {min(beside.paired):.2f}x to {max(beside.paired):.2f}x)" if beside.paired else ""
        slower = ", slower" if beside.medians < 1 else ""
        lines.append(f"- {label(system)}: {beside.medians:.2f}x gensim's words/s{paired}{slower}")
        for group in GROUPS:
            found: dict[str, list[str]] = {statistics.BETTER: [], statistics.NOT_WORSE: [], statistics.WORSE: []}
            for name, one in statistics.differences(result, system):
                if in_group(result, name, group):
                    found[one.verdict].append(f"{name} {one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]")
            said = [
                f"{'**worse**' if what == statistics.WORSE else what}: {', '.join(sets)}"
                for what, sets in found.items()
                if sets
            ]
            lines += [f"  - {group}: {'; '.join(said)}"] if said else []
    return lines


def about_all(result: dict[str, Any]) -> list[str]:
    """Return what was trained, where, how it is compared, and any caveats."""
    settings, environment, found = result["settings"], result["environment"], result["differences"]
    versions, seeds = environment["versions"], settings["seeds"]
    models = dict.fromkeys([system.model for system in systems(result)] or settings["models"])
    interval = (
        f"means of {seeds} seeds with the 95% confidence interval of the mean (Student's t)"
        if seeds > 1
        else "one seed"
    )
    trained = (
        f"{' and '.join(_MODELS[model] for model in models)} with {settings['negative']} negative samples and window "
        f"{settings['window']}, everything else by default; {interval}; {environment['device']}, gensim {versions['gensim']} "
        f"on {_plural(result['workers'], 'worker')}, torch {versions['torch']}, {commit_and_date(result)}."
    )
    measures = (
        "Words/s are those of the text, times the epochs, by the wall clock: counting the vocabulary and training, without "
        "imports (counting alone: the text once). Similarities are Spearman's, analogies the share of right answers among the "
        f"{settings['restrict']:,} most frequent words, all by one evaluator, whose figures are gensim's. "
        "Memory is the peak of the process, with mapped files and all imports."
    )
    tuned, reserved = ([name for name in result["groups"] if in_group(result, name, group)] for group in GROUPS)
    over = {one["seeds"] > 1 for one in found["found"]}
    what = "word pairs or questions" + (" and over seeds" if over == {True} else "")
    only = " only: one seed says nothing about others" if over == {False} else ""
    protocol = (
        f"Tuned sets, on which settings of the package were chosen: {', '.join(tuned) or 'none'}. Reserved sets, by which no "
        f"setting may be chosen: {', '.join(reserved) or 'none'}. Differences to gensim have 95% "
        f"percentile intervals of a paired bootstrap over {what}{only} ({found['resamples']:,} resamples); sets with fewer "
        f"than {found['least_items']} known items are not compared."
    )
    lines = [trained[0].upper() + trained[1:], measures, protocol]
    if not result["same_vocabulary"]:
        lines.append("**The vocabularies were not the same**, so the figures cannot be compared.")
    failures = (f"**Failed**: {one['title']}, seed {one['seed']}: {one['error']}" for one in result["failures"])
    return [*lines, *failures]


def about_corpus(result: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the size and settings of a corpus, and how much of the sets its vocabulary covers."""
    asked: dict[str, int] = {}
    for run in result["runs"]:
        if run["corpus"] == about["name"]:
            asked |= {name: count for name, count in run.get("asked", {}).items() if name in result["groups"]}
    covered = (
        f" In its vocabulary: {', '.join(f'{count:,} of {name}' for name, count in asked.items())}." if asked else ""
    )
    small = "" if about["analogies"] else " Analogies say nothing on a corpus of this size and are not asked."
    return (
        f"**{about['name']}**: {about['words']:,} words, {_plural(about['epochs'], 'epoch')}, sample {about['sample']:g}, "
        f"words that occur {about['min_count']} times or more.{covered}{small}"
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/results.md; `picture` is its path or nothing."""
    blocks = about_all(result)
    for about in result["corpora"]:
        if systems(result, about["name"]):
            blocks += [about_corpus(result, about), table(result, about["name"])]
            if lines := verdicts(result, about["name"]):
                intro = "Against gensim, with the 95% confidence interval of the difference:"
                blocks += [intro, "\n".join(lines)]
    return blocks_of(picture, "word2vec beside gensim: words/s and quality", *blocks)


_RESERVED_PAPER = "#fdf6e3"


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: panels of words/s and of each set, with a row for each system of a corpus; reserved ones on paper.

    Bars and large dots are means, small dots the seeds, lines the 95% confidence interval, and dotted lines gensim's mean.
    """
    rows = {about["name"]: found for about in result["corpora"] if (found := systems(result, about["name"]))}
    names = [
        name
        for name in dict.fromkeys(n for corpus in rows for n in statistics.score_names(result, corpus))
        if name in result["groups"]
    ]
    heights = [1.2 + 0.36 * len(found) for found in rows.values()]
    figure = require_matplotlib()(14, 0.7 + sum(heights))
    shape = {"squeeze": False, "height_ratios": heights, "width_ratios": [2.4, *[1] * len(names)]}
    grid = figure.subplots(len(rows), 1 + len(names), **shape)
    for line, (corpus, found) in zip(grid, rows.items(), strict=True):
        _panel(
            line[0],
            f"{corpus}\nthousand raw words/s",
            found,
            lambda system: [speeds(result, run)[0] / 1e3 for run in runs_of(result, system)],
            bars=True,
        )
        line[0].set_yticks(range(len(found)), [label(system) for system in found])
        for axes, name in zip(line[1:], names, strict=True):
            _panel(axes, name, found, lambda system, name=name: scores(result, system, name))  # type: ignore[misc]
            axes.set_yticks(range(len(found)), [])
            if in_group(result, name, RESERVED):
                axes.set_facecolor(_RESERVED_PAPER)
    figure.supxlabel("Dotted: gensim. On paper: no setting was chosen by these sets.", fontsize=9, color=QUIET)
    return figure


def _panel(axes: Any, title: str, rows: list[System], values: Any, bars: bool = False) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.locator_params(axis="x", nbins=6 if bars else 3)
    for place, system in enumerate(rows):
        found = values(system)
        if not found:
            continue
        colour = (
            QUIET
            if system.system == statistics.GENSIM
            else COLOURS[[*OPTIMIZERS, system.optimizer].index(system.optimizer)]
        )
        value, half = statistics.mean(found)
        if bars:
            axes.barh(place, value, height=0.62, color=colour, alpha=0.45)
        else:
            axes.errorbar(value, place, xerr=half, fmt="o", ms=6, color=colour, lw=2, zorder=4)
        axes.plot(found, [place + 0.24] * len(found), "o", ms=3, color=colour, alpha=0.7, zorder=3)
        same = [row for row, other in enumerate(rows) if other.gensim == system]
        if same:  # through the rows that are compared with it
            axes.plot([value] * 2, (min(same) - 0.5, max(same) + 0.5), ls=":", lw=1.5, color=QUIET, zorder=2)
