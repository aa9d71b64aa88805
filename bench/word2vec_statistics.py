"""Means over seeds, how sure they are, and what may be said of ours and gensim's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

GENSIM, OURS = "gensim", "speedtransfer"
MOST_SEEDS = 10
# Student's t, two-sided 95%, for 1, 2, ... degrees of freedom.
# fmt: off
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
     2.1314, 2.1199, 2.1098, 2.1009)  # to 2 * MOST_SEEDS - 2
# fmt: on
BETTER, NOT_WORSE, WORSE, UNSURE = (
    "better",
    "not worse beyond the confidence interval",
    "worse",
    "one seed: no interval",
)


class Interval(NamedTuple):
    """A value and half of its 95% confidence interval, None where there are too few to tell."""

    value: float
    half: float | None


class System(NamedTuple):
    """Who trained, with what, in how many dimensions. gensim has no choice of optimizers."""

    name: str
    optimizer: str
    dim: int


def mean(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval."""
    half = T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Interval(statistics.fmean(values), half)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return how far the mean of `ours` is above that of `theirs`, with Student's interval for two samples.

    The variance is pooled: with as many seeds on either side that is the narrower one beside Welch's, so that it calls more
    differences worse, not fewer.
    """
    value, freedom = statistics.fmean(ours) - statistics.fmean(theirs), len(ours) + len(theirs) - 2
    if min(len(ours), len(theirs)) < 2:
        return Interval(value, None)
    squares = sum((len(side) - 1) * statistics.variance(side) for side in (ours, theirs))
    return Interval(value, T[freedom - 1] * math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs))))


def judge(found: Interval) -> str:
    """Return what a difference to gensim says."""
    value, half = found
    if half is None:
        return UNSURE
    return BETTER if value > half else WORSE if value < -half else NOT_WORSE


def systems(result: dict[str, Any]) -> list[System]:
    """Return all that have a run, gensim first in each dimension, ours as they were asked for."""
    return list(dict.fromkeys(System(run["system"], run["optimizer"], run["dim"]) for run in by_dim(result)))


def by_dim(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs by dimension."""
    return sorted(result["runs"], key=lambda run: run["dim"])


def runs_of(result: dict[str, Any], system: System) -> list[dict[str, Any]]:
    """Return the runs of `system` by seed."""
    runs = [run for run in result["runs"] if (run["system"], run["optimizer"], run["dim"]) == system]
    return sorted(runs, key=lambda run: run["seed"])


def speeds(result: dict[str, Any], run: dict[str, Any]) -> tuple[float, float, float]:
    """Return raw words a second of `run`: by the wall clock, in training alone, and of counting the vocabulary, once."""
    words, epochs = result["corpus"]["words"], result["settings"]["epochs"]
    wall = run["vocabulary_s"] + run["training_s"]
    return words * epochs / wall, words * epochs / run["training_s"], words / run["vocabulary_s"]


def scores(result: dict[str, Any], system: System, name: str) -> list[float]:
    """Return what the runs of `system` have reached on a set, by seed."""
    found = (run["scores"].get(name) for run in runs_of(result, system))
    return [score for score in found if score is not None]


def score_names(result: dict[str, Any]) -> list[str]:
    """Return the sets that were asked, analogies also by part."""
    return list(dict.fromkeys(itertools.chain.from_iterable(run["scores"] for run in result["runs"])))


class Ratio(NamedTuple):
    """How our words a second compare with gensim's: that of the medians, and the runs of each seed beside one another."""

    medians: float
    paired: tuple[float, ...]


def ratio(result: dict[str, Any], system: System) -> Ratio | None:
    """Return it for `system`, None where gensim has no run in its dimension."""
    theirs = {run["seed"]: speeds(result, run)[0] for run in runs_of(result, System(GENSIM, "", system.dim))}
    ours = {run["seed"]: speeds(result, run)[0] for run in runs_of(result, system)}
    if not theirs or not ours:
        return None
    paired = tuple(speed / theirs[seed] for seed, speed in ours.items() if seed in theirs)
    return Ratio(statistics.median(ours.values()) / statistics.median(theirs.values()), paired)


def differences(result: dict[str, Any], system: System) -> Iterator[tuple[str, Interval, str]]:
    """Yield the name of each set, how far `system` is above gensim, and what that says."""
    for name in score_names(result):
        ours, theirs = (scores(result, who, name) for who in (system, System(GENSIM, "", system.dim)))
        if ours and theirs:
            found = difference(ours, theirs)
            yield name, found, judge(found)


def in_short(result: dict[str, Any]) -> str:
    """Return a line about a result: how fast each is beside gensim, and how often it is worse."""
    parts = []
    for system in systems(result):
        beside = ratio(result, system)
        if system.name == GENSIM or beside is None:
            continue
        verdicts = [verdict for _, _, verdict in differences(result, system)]
        parts.append(f"{system.optimizer} ({system.dim}) {beside.medians:.2f}x, worse on {verdicts.count(WORSE)}")
    return "words/s beside gensim " + (", ".join(parts) or "of no run yet")
