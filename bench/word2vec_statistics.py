"""Means over seeds, their confidence intervals, and the verdicts on ours beside gensim's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from word2vec_data import MODELS, RESERVED, SETS, TUNED

GENSIM, OURS = "gensim", "speedtransfer"
STUDENT = "Student"  # how differences were found; else word2vec_bootstrap.py
BETTER, NOT_WORSE, WORSE, UNSURE = (
    "better",
    "not worse beyond the confidence interval",
    "worse",
    "one seed: no interval",
)


class Interval(NamedTuple):
    """A value and half of its 95% confidence interval, None with too few values."""

    value: float
    half: float | None


class Difference(NamedTuple):
    """How far a system is above gensim on a set, with the ends of the 95% confidence interval; None where there is none."""

    value: float
    low: float | None
    high: float | None


class System(NamedTuple):
    """What was trained: corpus, model, package, optimizer (gensim has no choice) and dimension."""

    corpus: str
    model: str
    name: str
    optimizer: str
    dim: int


def system_of(run: dict[str, Any]) -> System:
    """Return the system of a run, or of anything with its keys."""
    return System(run["corpus"], run["model"], run["system"], run["optimizer"], run["dim"])


def gensim_of(system: System) -> System:
    """Return the gensim that `system` is compared with."""
    return system._replace(name=GENSIM, optimizer="")


def mean(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval."""
    if len(values) < 2:
        return Interval(statistics.fmean(values), None)
    half = _t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half)


def _t(freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t, in four digits as printed tables have it."""
    from scipy import stats

    return round(float(stats.t.ppf(0.975, freedom)), 4)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return how far the mean of `ours` is above that of `theirs`, with Student's interval for two samples.

    Only for results that have no outcome of every item. The variance is pooled: with as many seeds on either side that is the
    narrower one beside Welch's, so that it calls more differences worse, not fewer.
    """
    value, freedom = statistics.fmean(ours) - statistics.fmean(theirs), len(ours) + len(theirs) - 2
    if min(len(ours), len(theirs)) < 2:
        return Difference(value, None, None)
    squares = sum((len(side) - 1) * statistics.variance(side) for side in (ours, theirs))
    half = _t(freedom) * math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    return Difference(value, value - half, value + half)


def judge(found: Difference) -> str:
    """Return the verdict on a difference to gensim."""
    if found.low is None or found.high is None:
        return UNSURE
    return BETTER if found.low > 0 else WORSE if found.high < 0 else NOT_WORSE


def upgrade(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result in today's format.

    Before, results were of one corpus and of skip-gram, and settings were chosen on all the sets that had names of ours. They
    had no differences, nor has what is still being measured: those are then Student's.
    """
    if "corpora" not in result:
        name, settings = result["corpus"]["name"], result["settings"]
        same = {key: settings[key] for key in ("epochs", "min_count", "sample")}
        sets = dict.fromkeys(key.partition(", ")[0] for run in result["runs"] for key in run["scores"])
        result = {
            **result,
            "corpora": [{**result["corpus"], **same, "analogies": True}],
            "groups": {key: TUNED if key in SETS[TUNED] else RESERVED for key in sets},
            "runs": [{"corpus": name, "model": MODELS[0], **run} for run in result["runs"]],
        }
    if "differences" not in result:
        result = {**result, "differences": {"method": STUDENT, "found": list(_student(result))}}
    return result


def _student(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for system in systems(result):
        for name in score_names(result, system.corpus) if system.name != GENSIM else ():
            ours, theirs = (scores(result, who, name) for who in (system, gensim_of(system)))
            if ours and theirs:
                yield {**key_of(system), "set": name, **difference(ours, theirs)._asdict()}


def key_of(system: System) -> dict[str, Any]:
    """Return the keys by which a run names its system, see `system_of`."""
    corpus, model, name, optimizer, dim = system
    return {"corpus": corpus, "model": model, "system": name, "optimizer": optimizer, "dim": dim}


def systems(result: dict[str, Any], corpus: str | None = None) -> list[System]:
    """Return all that have a run (on `corpus`): by corpus, dimension and model, gensim first, ours in the order they ran."""
    corpora = [about["name"] for about in result["corpora"]]
    found = dict.fromkeys(system_of(run) for run in result["runs"] if corpus in (None, run["corpus"]))
    models = {system.model: place for place, system in reversed([*enumerate(found)])}
    return sorted(found, key=lambda system: (corpora.index(system.corpus), system.dim, models[system.model]))


def runs_of(result: dict[str, Any], system: System) -> list[dict[str, Any]]:
    """Return the runs of `system` by seed."""
    return sorted((run for run in result["runs"] if system_of(run) == system), key=lambda run: run["seed"])


def corpus_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the facts about a corpus and its settings."""
    found: dict[str, Any] = next(about for about in result["corpora"] if about["name"] == name)
    return found


def speeds(result: dict[str, Any], run: dict[str, Any]) -> tuple[float, float, float]:
    """Return raw words a second of `run`: by the wall clock, in training alone, and of counting the vocabulary, once."""
    corpus = corpus_of(result, run["corpus"])
    words, epochs = corpus["words"], corpus["epochs"]
    wall = run["vocabulary_s"] + run["training_s"]
    return words * epochs / wall, words * epochs / run["training_s"], words / run["vocabulary_s"]


def scores(result: dict[str, Any], system: System, name: str) -> list[float]:
    """Return what the runs of `system` have reached on a set, by seed."""
    found = (run["scores"].get(name) for run in runs_of(result, system))
    return [score for score in found if score is not None]


def score_names(result: dict[str, Any], corpus: str, group: str | None = None) -> list[str]:
    """Return the sets (of `group`) that a corpus is evaluated on, tuned ones first, analogies also by part."""
    runs = [run for run in result["runs"] if run["corpus"] == corpus]
    names = list(dict.fromkeys(itertools.chain.from_iterable(run["scores"] for run in runs)))
    groups = (TUNED, RESERVED) if group is None else (group,)
    return [name for one in groups for name in names if in_group(result, name, one)]


def in_group(result: dict[str, Any], name: str, group: str) -> bool:
    """Tell whether a set, or a part of it, is of `group`."""
    groups = result["groups"]
    return bool(groups[name if name in groups else name.rpartition(", ")[0]] == group)


class Ratio(NamedTuple):
    """Our words a second over gensim's: of the medians, and of the runs of each seed."""

    medians: float
    paired: tuple[float, ...]


def ratio(result: dict[str, Any], system: System) -> Ratio | None:
    """Return it for `system`, None where gensim has no run beside it."""
    theirs, ours = (
        {run["seed"]: speeds(result, run)[0] for run in runs_of(result, who)} for who in (gensim_of(system), system)
    )
    if not theirs or not ours:
        return None
    paired = tuple(speed / theirs[seed] for seed, speed in ours.items() if seed in theirs)
    return Ratio(statistics.median(ours.values()) / statistics.median(theirs.values()), paired)


def differences(result: dict[str, Any], system: System) -> Iterator[tuple[str, Difference, str]]:
    """Yield the name of each set, how far `system` is above gensim, and the verdict."""
    for found in result["differences"]["found"]:
        if system_of(found) == system:
            measured = Difference(found["value"], found["low"], found["high"])
            yield found["set"], measured, judge(measured)
