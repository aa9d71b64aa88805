"""The differences between gensim and ours with their intervals: a paired bootstrap over the items of a set and over seeds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from word2vec_child import unpack
from word2vec_data import PAIRS, EvaluationSet
from word2vec_statistics import GENSIM, System, gensim_of, key_of, runs_of, score_names, systems

RESAMPLES, SEED = 1000, 15
LEAST_ITEMS = 20  # resamples of fewer vary too little to generalize
METHOD = "paired bootstrap"
_AT_ONCE = 1 << 21  # counts, which bounds memory


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
    once = np.ones((items, 1))
    value = (_scores(ours, gold, once) - _scores(theirs, gold, once)).mean()
    if np.isnan(value):  # correlation with equal numbers
        return None
    drawn = []
    for item_counts, seed_counts in draws(items, seeds, resamples):
        item_counts = item_counts.astype(np.float64)
        each = _scores(ours, gold, item_counts) - _scores(theirs, gold, item_counts)
        drawn.append((np.where(seed_counts > 0, each, 0) * seed_counts).sum(axis=0) / seeds)
    low, high = np.nanpercentile(np.concatenate(drawn), [2.5, 97.5])
    return {
        **{key: round(float(number), 6) for key, number in (("value", value), ("low", low), ("high", high))},
        "seeds": seeds,
        "items": items,
    }


def draws(items: int, seeds: int, resamples: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield how often each item and each seed is drawn, of shapes (items, resamples) and (seeds, resamples), some at once.

    They depend on nothing but the three numbers, so that all systems are compared on the same draws.
    """
    some = max(1, _AT_ONCE // items)
    for first in range(0, resamples, some):
        number = min(some, resamples - first)
        yield _draw(items, number, first), _draw(seeds, number, first)


@functools.lru_cache(64)
def _draw(size: int, number: int, first: int) -> np.ndarray:
    """Return how often each of `size` is drawn in `number` resamples from `first` on; kept, as every system needs them."""
    random = np.random.default_rng((SEED, size, first))
    drawn = random.integers(size, size=(number, size)) + size * np.arange(number)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=number * size).reshape(number, size)
    return np.ascontiguousarray(counts.T.astype(np.uint16))


def _scores(outcomes: np.ndarray, gold: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """Return the score of each seed in each resample, of shape (seeds, resamples)."""
    if gold is None:
        return outcomes @ counts / len(counts)
    with np.errstate(invalid="ignore"):  # 0 / 0 where all that was drawn is equal
        expected = _centred_ranks(gold, counts)
        spread = (counts * expected**2).sum(axis=0)
        weighted = counts * expected
        scores = []
        for numbers in outcomes:
            ranks = _centred_ranks(numbers, counts)
            scores.append((weighted * ranks).sum(axis=0) / np.sqrt(spread * (counts * ranks**2).sum(axis=0)))
    return np.array(scores)


def _centred_ranks(numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the ranks that `numbers` have where each occurs `counts` times, less their mean; ties share the mean rank.

    The numbers are sorted once for all resamples, in each of which a rank is a running sum of counts.

    Parameters
    ----------
    numbers : numpy.ndarray
        Of shape (items,).
    counts : numpy.ndarray
        Of shape (items, resamples).

    Returns
    -------
    numpy.ndarray
        Of shape (items, resamples), float64.
    """
    _, first, place = np.unique(np.sort(numbers), return_index=True, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    tied = np.add.reduceat(counts[order], first, axis=0)
    ranks = np.cumsum(tied, axis=0) - (tied - 1) / 2
    back = np.empty_like(place)
    back[order] = place
    return np.asarray(ranks[back] - (len(numbers) + 1) / 2)
