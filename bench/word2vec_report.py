"""What bench/word2vec.py has found, in words, tables and a picture; sets that settings were chosen on are reported apart.

The intervals of differences between ours and gensim's are those of a paired bootstrap over the items of a set and over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from word2vec_child import GENSIM, OURS

from speedtransfer.benchmark.report import TextTable, commit_and_date, markdown_table
from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import format_bytes

TUNED, RESERVED = GROUPS = ("tuned", "reserved")
OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD", "adam": "Adam"}
BETTER, NOT_WORSE, WORSE = "better", "not worse beyond the confidence interval", "worse"
RESAMPLES, SEED = 1000, 15
LEAST_ITEMS = 20  # resamples of fewer vary too little to generalize
_MODELS = {"skipgram": "skip-gram", "cbow": "CBOW"}
_RESERVED_PAPER = "#fdf6e3"


class System(NamedTuple):
    """What was trained: corpus, model, package, optimizer (gensim has no choice) and dimension."""

    corpus: str
    model: str
    system: str
    optimizer: str
    dim: int

    @property
    def gensim(self) -> System:
        return self._replace(system=GENSIM, optimizer="")


def system_of(run: dict[str, Any]) -> System:
    return System(*(run[key] for key in System._fields))


def systems(result: dict[str, Any], corpus: str | None = None) -> list[System]:
    """Return all that have a run (on `corpus`): by corpus, dimension and model, gensim first, ours in the order they ran."""
    corpora = [about["name"] for about in result["corpora"]]
    found = dict.fromkeys(system_of(run) for run in result["runs"] if corpus in (None, run["corpus"]))
    models = list(dict.fromkeys(system.model for system in found))
    return sorted(found, key=lambda system: (corpora.index(system.corpus), system.dim, models.index(system.model)))


def runs_of(result: dict[str, Any], system: System) -> list[dict[str, Any]]:
    return sorted((run for run in result["runs"] if system_of(run) == system), key=lambda run: run["seed"])


def speeds(result: dict[str, Any], run: dict[str, Any]) -> tuple[float, float, float]:
    """Return raw words a second of `run`: by the wall clock, in training alone, and of counting the vocabulary, once."""
    corpus = next(about for about in result["corpora"] if about["name"] == run["corpus"])
    words, epochs = corpus["words"], corpus["epochs"]
    wall = run["vocabulary_s"] + run["training_s"]
    return words * epochs / wall, words * epochs / run["training_s"], words / run["vocabulary_s"]


def scores(result: dict[str, Any], system: System, name: str) -> list[float]:
    found = (run["scores"].get(name) for run in runs_of(result, system))
    return [score for score in found if score is not None]


def score_names(result: dict[str, Any], corpus: str) -> list[str]:
    """Return the sets that a corpus is evaluated on, tuned ones first, analogies also by part."""
    names = dict.fromkeys(name for run in result["runs"] if run["corpus"] == corpus for name in run["scores"])
    return [name for one in (TUNED, RESERVED) for name in names if in_group(result, name, one)]


def in_group(result: dict[str, Any], name: str, group: str) -> bool:
    """Tell whether a set, or a part of it, is of `group`."""
    return bool(result["groups"][_whole(name, result["groups"])] == group)


def _whole(name: str, sets: dict[str, Any]) -> str:
    """Return the set that `name` is, or is a part of, as "analogies, semantic"."""
    return name if name in sets else name.rpartition(", ")[0]


def mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half of Student's 95% confidence interval, None for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), None
    from scipy import stats

    return statistics.fmean(values), float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def ratio(result: dict[str, Any], system: System) -> tuple[float, list[float]] | None:
    """Return our words a second over gensim's, of the medians and of each seed; None where gensim has no run beside it."""
    theirs, ours = (
        {run["seed"]: speeds(result, run)[0] for run in runs_of(result, who)} for who in (system.gensim, system)
    )
    if not theirs or not ours:
        return None
    paired = [speed / theirs[seed] for seed, speed in ours.items() if seed in theirs]
    return statistics.median(ours.values()) / statistics.median(theirs.values()), paired


# --- differences --------------------------------------------------------------------------------------------------------


def differences(result: dict[str, Any], system: System) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield how far `system` is above gensim on each set, and the verdict on it."""
    for found in result["differences"]["found"]:
        if system_of(found) == system:
            yield found, BETTER if found["low"] > 0 else WORSE if found["high"] < 0 else NOT_WORSE


def with_differences(result: dict[str, Any], gold: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """Return `result` with the differences to gensim in place of the outcome of every item, which takes 50 times the space.

    `gold` are people's scores of the pairs of each set, None for analogies.
    """
    found = []
    for system in (system for system in systems(result) if system.system == OURS):
        for name in score_names(result, system.corpus):
            theirs, ours = (
                {run["seed"]: run["items"][name] for run in runs_of(result, who) if name in run.get("items", {})}
                for who in (system.gensim, system)
            )
            if pairs := [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]:
                sides = np.array(pairs, dtype=float).swapaxes(0, 1)
                if measured := bootstrap(*sides, gold[_whole(name, result["groups"])]):
                    found.append({**system._asdict(), "set": name, **measured})
    runs = [{key: value for key, value in run.items() if key != "items"} for run in result["runs"]]
    about = {"method": "paired bootstrap", "resamples": RESAMPLES, "seed": SEED, "least_items": LEAST_ITEMS}
    return {**result, "runs": runs, "differences": {**about, "found": found}}


def bootstrap(ours: np.ndarray, theirs: np.ndarray, gold: np.ndarray | None) -> dict[str, Any] | None:
    """Return how far the mean score of `ours` is above that of `theirs`, with its 95% percentile interval.

    Both are the outcome of each item, ``(seeds, items)``, nan where unknown; only items known to all count, and with fewer
    than `LEAST_ITEMS` the result is None. The score is Spearman's correlation with `gold`, people's scores of the items, or
    without these the mean outcome. Each resample draws seeds and items with replacement, the same for both sides, and scores
    each drawn seed on the drawn items. With one seed the interval is over items only. With a few seeds it is somewhat too
    narrow for other seeds, as any bootstrap of so few.
    """
    known = ~np.isnan([*ours, *theirs]).any(axis=0)
    ours, theirs, gold = ours[:, known], theirs[:, known], None if gold is None else gold[known]
    seeds, items = ours.shape
    if items < LEAST_ITEMS:
        return None
    value = np.mean([_score(one, gold) - _score(two, gold) for one, two in zip(ours, theirs, strict=True)])
    if np.isnan(value):  # correlation with equal numbers
        return None
    random, drawn = np.random.default_rng((SEED, items, seeds)), []
    for _ in range(RESAMPLES):
        some, chosen = random.integers(items, size=items), random.integers(seeds, size=seeds)
        people = None if gold is None else gold[some]
        each = [_score(ours[seed, some], people) - _score(theirs[seed, some], people) for seed in chosen]
        drawn.append(np.mean(each))
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    numbers = {key: round(float(n), 6) for key, n in (("value", value), ("low", low), ("high", high))}
    return {**numbers, "seeds": seeds, "items": items}


def _score(outcomes: np.ndarray, gold: np.ndarray | None) -> float:
    if gold is None:
        return float(outcomes.mean())
    from scipy.stats import rankdata

    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 where all that was drawn is equal
        return float(np.corrcoef(rankdata(outcomes), rankdata(gold))[0, 1])


# --- what is shown ------------------------------------------------------------------------------------------------------


def label(system: System) -> str:
    optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer)
    return ", ".join(filter(None, [_MODELS[system.model], system.system, optimizer, f"dim {system.dim}"]))


def table(result: dict[str, Any], corpus: str) -> str:
    """Return a row of markdown for each system of a corpus: means over the seeds with their intervals."""
    names = score_names(result, corpus)
    groups = [f"{name} ({group})" for group in GROUPS for name in names if in_group(result, name, group)]
    head = ["", "words/s", "training alone", "vocabulary alone", *groups, "peak memory"]
    lines = []
    for system in systems(result, corpus):
        runs = runs_of(result, system)
        measured = zip(*(speeds(result, run) for run in runs), strict=True)
        cells = [_shown(mean(values), 1e-3, 0, " k") for values in measured]
        cells += [_shown(mean(found)) if (found := scores(result, system, name)) else "" for name in names]
        peak = format_bytes(max(run["peak_bytes"] for run in runs))
        lines.append([label(system), *cells, peak])
    return markdown_table(TextTable("system", head, lines))


def _shown(found: tuple[float, float | None], scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
    value, half = found
    return f"{scale * value:,.{digits}f}{'' if half is None else f' ± {scale * half:,.{digits}f}'}{unit}"


def verdicts(result: dict[str, Any], corpus: str) -> list[str]:
    """Return for each of our systems its speed beside gensim's and, for either group of sets, the differences to gensim."""
    lines = []
    for system in systems(result, corpus):
        beside = ratio(result, system)
        if system.system == GENSIM or beside is None:
            continue
        medians, each = beside
        paired = f" (seed by seed {min(each):.2f}x to {max(each):.2f}x)" if each else ""
        lines.append(f"- {label(system)}: {medians:.2f}x gensim's words/s{paired}{', slower' * (medians < 1)}")
        for group in GROUPS:
            found: dict[str, list[str]] = {BETTER: [], NOT_WORSE: [], WORSE: []}
            for one, verdict in differences(result, system):
                if in_group(result, one["set"], group):
                    found[verdict].append(f"{one['set']} {one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]")
            said = [f"{what}: {', '.join(sets)}" for what, sets in found.items() if sets]
            lines += [f"  - {group}: {'; '.join(said)}".replace(f"{WORSE}: ", f"**{WORSE}**: ")] if said else []
    return lines


def about_all(result: dict[str, Any]) -> list[str]:
    """Return what was trained, where, how it is compared, and any caveats."""
    settings, environment, found = result["settings"], result["environment"], result["differences"]
    seeds, several = settings["seeds"], settings["seeds"] > 1
    models = dict.fromkeys([system.model for system in systems(result)] or settings["models"])
    interval = (
        f"means of {seeds} seeds with the 95% confidence interval of the mean (Student's t)" if several else "one seed"
    )
    trained = (
        f"{' and '.join(_MODELS[model] for model in models)} with {settings['negative']} negative samples and window "
        f"{settings['window']}, everything else by default; {interval}; {environment['device']}, gensim "
        f"{environment['versions']['gensim']} on {result['workers']} worker{'s' * (result['workers'] != 1)}, torch "
        f"{environment['versions']['torch']}, {commit_and_date(result)}."
    )
    measures = (
        "Words/s are those of the text, times the epochs, by the wall clock: counting the vocabulary and training, without "
        "imports (counting alone: the text once). Similarities are Spearman's, analogies the share of right answers among the "
        f"{settings['restrict']:,} most frequent words, all by one evaluator, whose figures are gensim's. "
        "Memory is the peak of the process, with mapped files and all imports."
    )
    tuned, reserved = (
        ", ".join(name for name in result["groups"] if in_group(result, name, group)) or "none" for group in GROUPS
    )
    protocol = (
        f"Tuned sets, on which settings of the package were chosen: {tuned}. Reserved sets, by which no "
        f"setting may be chosen: {reserved}. Differences to gensim have 95% percentile intervals of a paired bootstrap over "
        f"word pairs or questions{' and over seeds' if several else ' only: one seed says nothing about others'} "
        f"({found['resamples']:,} resamples); sets with fewer than {found['least_items']} known items are not compared."
    )
    lines = [trained[0].upper() + trained[1:], measures, protocol]
    if not result["same_vocabulary"]:
        lines.append("**The vocabularies were not the same**, so the figures cannot be compared.")
    failures = (f"**Failed**: {one['title']}, seed {one['seed']}: {one['error']}" for one in result["failures"])
    return [*lines, *failures]


def about_corpus(result: dict[str, Any], about: dict[str, Any]) -> str:
    asked: dict[str, int] = {}
    for run in result["runs"]:
        if run["corpus"] == about["name"]:
            asked |= {name: count for name, count in run.get("asked", {}).items() if name in result["groups"]}
    counts = ", ".join(f"{count:,} of {name}" for name, count in asked.items())
    covered = f" In its vocabulary: {counts}." if asked else ""
    small = "" if about["analogies"] else " Analogies say nothing on a corpus of this size and are not asked."
    epochs = f"{about['epochs']} epoch{'s' * (about['epochs'] != 1)}"
    return (
        f"**{about['name']}**: {about['words']:,} words, {epochs}, sample {about['sample']:g}, "
        f"words that occur {about['min_count']} times or more.{covered}{small}"
    )


def markdown(result: dict[str, Any]) -> str:
    blocks = about_all(result)
    for about in result["corpora"]:
        if systems(result, about["name"]):
            blocks += [about_corpus(result, about), table(result, about["name"])]
            if lines := verdicts(result, about["name"]):
                intro = "Against gensim, with the 95% confidence interval of the difference:"
                blocks += [intro, "\n".join(lines)]
    return "\n\n".join(blocks)


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: panels of words/s and of each set, with a row for each system of a corpus; reserved ones on paper.

    Bars and large dots are means, small dots the seeds, lines the 95% confidence interval, and dotted lines gensim's mean.
    """
    rows = {about["name"]: found for about in result["corpora"] if (found := systems(result, about["name"]))}
    names = list(result["groups"])
    heights = [1.2 + 0.36 * len(found) for found in rows.values()]
    figure = require_matplotlib()(14, 0.7 + sum(heights))
    shape = {"squeeze": False, "height_ratios": heights, "width_ratios": [2.4, *[1] * len(names)]}
    grid = figure.subplots(len(rows), 1 + len(names), **shape)
    for line, (corpus, found) in zip(grid, rows.items(), strict=True):
        each = {system: [speeds(result, run)[0] / 1e3 for run in runs_of(result, system)] for system in found}
        _panel(line[0], f"{corpus}\nthousand raw words/s", each, bars=True)
        line[0].set_yticks(range(len(found)), [label(system) for system in found])
        for axes, name in zip(line[1:], names, strict=True):
            _panel(axes, name, {system: scores(result, system, name) for system in found})
            axes.set_yticks(range(len(found)), [])
            if in_group(result, name, RESERVED):
                axes.set_facecolor(_RESERVED_PAPER)
    figure.supxlabel("Dotted: gensim. On paper: no setting was chosen by these sets.", fontsize=9, color=QUIET)
    return figure


def _panel(axes: Any, title: str, rows: dict[System, list[float]], bars: bool = False) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.locator_params(axis="x", nbins=6 if bars else 3)
    for place, (system, found) in enumerate(rows.items()):
        if not found:
            continue
        colour = QUIET if system.system == GENSIM else COLOURS[[*OPTIMIZERS, system.optimizer].index(system.optimizer)]
        value, half = mean(found)
        if bars:
            axes.barh(place, value, height=0.62, color=colour, alpha=0.45)
        else:
            axes.errorbar(value, place, xerr=half, fmt="o", ms=6, color=colour, lw=2, zorder=4)
        axes.plot(found, [place + 0.24] * len(found), "o", ms=3, color=colour, alpha=0.7, zorder=3)
        same = [row for row, other in enumerate(rows) if other.gensim == system]
        if same:  # through the rows that are compared with it
            axes.plot([value] * 2, (min(same) - 0.5, max(same) + 0.5), ls=":", lw=1.5, color=QUIET, zorder=2)
