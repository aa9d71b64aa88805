"""The differences between gensim and ours with their intervals: a paired bootstrap over the items of a set and over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
from word2vec_child import unpack
from word2vec_data import PAIRS, EvaluationSet
from word2vec_statistics import GENSIM, System, gensim_of, key_of, runs_of, score_names, systems

RESAMPLES, SEED = 1000, 15
LEAST_ITEMS = 20  # resamples of fewer vary too little to generalize
METHOD = "paired bootstrap"


def with_differences(result: dict[str, Any], sets: list[EvaluationSet]) -> dict[str, Any]:
    """Return `result` with the differences to gensim in place of the outcome of every item, which takes 50 times the space."""
    gold = {one.name: _gold(one) for one in sets}
    found = [
        {**key_of(system), "set": name, **measured}
        for system in systems(result)
        if system.name != GENSIM
        for name in score_names(result, system.corpus)
        if (measured := _compare(result, system, name, gold[name if name in gold else name.rpartition(", ")[0]]))
    ]
    runs = [{key: value for key, value in run.items() if key != "items"} for run in result["runs"]]
    about = {"method": METHOD, "resamples": RESAMPLES, "seed": SEED, "least_items": LEAST_ITEMS}
    return {**result, "runs": runs, "differences": {**about, "found": found}}


def _gold(found: EvaluationSet) -> np.ndarray | None:
    """Return the human scores of the pairs of a set, None for analogies."""
    from speedtransfer.word2vec.evaluation import load_set

    loaded: Any = load_set(found.path)
    return np.array(loaded.scores) if found.kind == PAIRS else None


def _compare(result: dict[str, Any], system: System, name: str, gold: np.ndarray | None) -> dict[str, Any] | None:
    theirs, ours = (
        {run["seed"]: unpack(run["items"][name]) for run in runs_of(result, who) if name in run.get("items", {})}
        for who in (gensim_of(system), system)
    )
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    return bootstrap(np.stack([ours[seed] for seed in seeds]), np.stack([theirs[seed] for seed in seeds]), gold)


def bootstrap(
    ours: np.ndarray, theirs: np.ndarray, gold: np.ndarray | None, resamples: int = RESAMPLES
) -> dict[str, Any] | None:
    """Return how far the mean score of `ours` is above that of `theirs`, with its 95% percentile interval.

    Each resample draws seeds and items with replacement, the same for both sides, and scores each drawn seed on the drawn
    items. With one seed the interval is over items only. With a few seeds it is somewhat too narrow for other seeds, as any
    bootstrap of so few.

    Parameters
    ----------
    ours, theirs : numpy.ndarray
        Outcome of each item, of shape (seeds, items); nan where unknown. Only items known to all count.
    gold : numpy.ndarray, optional
        People's scores of the items, with which outcomes are correlated (Spearman); without, scores are mean outcomes.
    resamples : int

    Returns
    -------
    dict or None
        ``value``, ``low``, ``high``, ``seeds`` and ``items``; None with fewer than `LEAST_ITEMS`.
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
    return {
        **{key: round(float(number), 6) for key, number in (("value", value), ("low", low), ("high", high))},
        "seeds": seeds,
        "items": items,
    }


def _score(outcomes: np.ndarray, gold: np.ndarray | None) -> float:
    if gold is None:
        return float(outcomes.mean())
    from scipy.stats import rankdata

    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 where all that was drawn is equal
        return float(np.corrcoef(rankdata(outcomes), rankdata(gold))[0, 1])
