"""What was trained, means over seeds with their confidence intervals, and the differences between ours and gensim's.

The intervals of differences are those of a paired bootstrap over the items of a set and over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from word2vec_data import PAIRS, RESERVED, TUNED, EvaluationSet

GENSIM, OURS = "gensim", "speedtransfer"
BETTER, NOT_WORSE, WORSE = "better", "not worse beyond the confidence interval", "worse"
RESAMPLES, SEED = 1000, 15
LEAST_ITEMS = 20  # resamples of fewer vary too little to generalize


class System(NamedTuple):
    """What was trained: corpus, model, package, optimizer (gensim has no choice) and dimension."""

    corpus: str
    model: str
    system: str
    optimizer: str
    dim: int

    @property
    def gensim(self) -> System:
        """Return the gensim that it is compared with."""
        return self._replace(system=GENSIM, optimizer="")


def system_of(run: dict[str, Any]) -> System:
    """Return the system of a run, or of anything with its keys."""
    return System(*(run[key] for key in System._fields))


def systems(result: dict[str, Any], corpus: str | None = None) -> list[System]:
    """Return all that have a run (on `corpus`): by corpus, dimension and model, gensim first, ours in the order they ran."""
    corpora = [about["name"] for about in result["corpora"]]
    found = dict.fromkeys(system_of(run) for run in result["runs"] if corpus in (None, run["corpus"]))
    models = list(dict.fromkeys(system.model for system in found))
    return sorted(found, key=lambda system: (corpora.index(system.corpus), system.dim, models.index(system.model)))


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


def score_names(result: dict[str, Any], corpus: str) -> list[str]:
    """Return the sets that a corpus is evaluated on, tuned ones first, analogies also by part."""
    names = dict.fromkeys(name for run in result["runs"] if run["corpus"] == corpus for name in run["scores"])
    return [name for one in (TUNED, RESERVED) for name in names if in_group(result, name, one)]


def in_group(result: dict[str, Any], name: str, group: str) -> bool:
    """Tell whether a set, or a part of it, is of `group`."""
    groups = result["groups"]
    return bool(groups[name if name in groups else name.rpartition(", ")[0]] == group)


class Interval(NamedTuple):
    """A value and half of its 95% confidence interval, None with too few values."""

    value: float
    half: float | None


def mean(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval."""
    if len(values) < 2:
        return Interval(statistics.fmean(values), None)
    from scipy import stats

    return Interval(statistics.fmean(values), float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)))


class Ratio(NamedTuple):
    """Our words a second over gensim's: of the medians, and of the runs of each seed."""

    medians: float
    paired: tuple[float, ...]


def ratio(result: dict[str, Any], system: System) -> Ratio | None:
    """Return it for `system`, None where gensim has no run beside it."""
    theirs, ours = (
        {run["seed"]: speeds(result, run)[0] for run in runs_of(result, who)} for who in (system.gensim, system)
    )
    if not theirs or not ours:
        return None
    paired = tuple(speed / theirs[seed] for seed, speed in ours.items() if seed in theirs)
    return Ratio(statistics.median(ours.values()) / statistics.median(theirs.values()), paired)


# --- differences --------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """How far a system is above gensim on a set, with the ends of the 95% confidence interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The verdict on it."""
        return BETTER if self.low > 0 else WORSE if self.high < 0 else NOT_WORSE


def differences(result: dict[str, Any], system: System) -> Iterator[tuple[str, Difference]]:
    """Yield the name of each set and how far `system` is above gensim."""
    for found in result["differences"]["found"]:
        if system_of(found) == system:
            yield found["set"], Difference(found["value"], found["low"], found["high"])


def with_differences(result: dict[str, Any], sets: list[EvaluationSet]) -> dict[str, Any]:
    """Return `result` with the differences to gensim in place of the outcome of every item, which takes 50 times the space."""
    gold = {one.name: _gold(one) for one in sets}
    found = [
        {**system._asdict(), "set": name, **measured}
        for system in systems(result)
        if system.system != GENSIM
        for name in score_names(result, system.corpus)
        if (measured := _compare(result, system, name, gold[name if name in gold else name.rpartition(", ")[0]]))
    ]
    runs = [{key: value for key, value in run.items() if key != "items"} for run in result["runs"]]
    about = {"method": "paired bootstrap", "resamples": RESAMPLES, "seed": SEED, "least_items": LEAST_ITEMS}
    return {**result, "runs": runs, "differences": {**about, "found": found}}


def _gold(found: EvaluationSet) -> np.ndarray | None:
    """Return the human scores of the pairs of a set, None for analogies."""
    from speedtransfer.word2vec.evaluation import load_set

    loaded: Any = load_set(found.path)
    return np.array(loaded.scores) if found.kind == PAIRS else None


def _compare(result: dict[str, Any], system: System, name: str, gold: np.ndarray | None) -> dict[str, Any] | None:
    theirs, ours = (
        {run["seed"]: run["items"][name] for run in runs_of(result, who) if name in run.get("items", {})}
        for who in (system.gensim, system)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return bootstrap(*np.array(pairs, dtype=float).swapaxes(0, 1), gold) if pairs else None


def bootstrap(
    ours: np.ndarray, theirs: np.ndarray, gold: np.ndarray | None, resamples: int = RESAMPLES
) -> dict[str, Any] | None:
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
    for _ in range(resamples):
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
