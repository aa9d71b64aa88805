"""Expected numbers of distinct rows where ids follow a Zipf law: the rows that a step asks for, and of which owners.

The id of frequency rank k (from 1) is drawn with a probability in proportion to ``k ** -exponent``; lookups are independent.
An exponent of 0 is uniform. The ids of real data may be distributed otherwise: ``emb.table.stats()`` counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.ranks.partition import Partition

# Frequency ranks that are summed one by one, and the blocks into which all others are put.
_EXACT, _BLOCKS = 1 << 20, 4096


@functools.lru_cache(maxsize=1024, typed=True)
def expected_unique(num_rows: int, exponent: float, lookups: int) -> float:
    """Return the expected number of distinct rows among `lookups` in a table of `num_rows`.

    Beyond the first million frequency ranks the sum is over blocks of them, each taken to have its mean probability.
    """
    counts, hits = _hits(num_rows, exponent, lookups)
    return float((counts * hits).sum())


def expected_distinct_share(features: Sequence[tuple[int, int]], exponent: float, ranks: int) -> float:
    """Return the distinct rows that all `ranks` processes look up over the sum of those of each, of a table of `features`.

    These are numbers of rows and of lookups of each process, all from the same distribution: 1 if no row is shared,
    ``1 / ranks`` if all are.
    """
    each = sum(expected_unique(num_rows, exponent, lookups) for num_rows, lookups in features)
    together = sum(expected_unique(num_rows, exponent, ranks * lookups) for num_rows, lookups in features)
    return together / (ranks * each) if each else 1.0


def expected_cached(num_rows: int, exponent: float, lookups: int, cached: Sequence[int]) -> list[float]:
    """Return the expected number of distinct rows among `lookups` that are among the most frequent rows, for each of `cached`.

    That is the sum of ``1 - (1 - p) ** lookups`` over so many rows, where p is the probability of each: a cache that keeps
    them for good serves so many rows of a step.
    """
    counts, hits = _hits(num_rows, exponent, lookups)
    ends, sums = counts.cumsum(), (counts * hits).cumsum()
    wanted = np.minimum([check_size(number, "cached") for number in cached], num_rows)
    last = np.searchsorted(ends, wanted)  # the block that the last of them is in
    return (sums[last] - (ends[last] - wanted) * hits[last]).tolist()


def draw_ids(num_rows: int, exponent: float, lookups: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Return `lookups` ids, ``(lookups,)``, drawn by a Zipf law: id 0 is the most frequent, then 1, ...

    Beyond the first million all ids of a block have its mean probability, as in :func:`expected_unique`.
    """
    check_size(lookups, "lookups")
    if exponent == 0:
        return draw.integers(check_size(num_rows, "num_rows", 1), size=lookups)
    counts, chances = _chances(num_rows, exponent)
    ends = np.cumsum(counts * chances)
    block = np.searchsorted(ends, draw.random(lookups) * ends[-1], side="right").clip(max=len(counts) - 1)
    starts = np.cumsum(counts) - counts
    within = draw.random(lookups) * counts[block]
    return (starts[block] + within).astype(np.int64).clip(max=num_rows - 1)


def expected_imbalance(partition: Partition, exponent: float, lookups: int) -> float:
    """Return the rows asked of the busiest owner over the mean, both expected, where id 0 is the most frequent, then 1, ...

    The first million ids count where they are, all others as if spread evenly. The busiest owner of a single step has a little
    more: the largest of numbers that vary.
    """
    counts, hits = _hits(partition.num_rows, exponent, lookups)
    exact = min(partition.num_rows, _EXACT)
    owners = partition.owners(partition.places(torch.arange(exact, device="cpu")))
    asked = torch.bincount(owners, torch.from_numpy(hits[:exact]), minlength=partition.ranks)
    sizes = torch.tensor([partition.size(rank) for rank in range(partition.ranks)], dtype=torch.float64, device="cpu")
    asked += float((counts * hits)[exact:].sum()) * sizes / partition.num_rows
    return float(asked.max() / asked.mean()) if lookups else 1.0


def _hits(num_rows: int, exponent: float, lookups: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sizes of blocks of ids, by frequency, and for each the probability that an id of it is among the lookups."""
    counts, chances = _chances(num_rows, exponent)
    if not check_size(lookups, "lookups"):
        return counts, np.zeros_like(chances)
    with np.errstate(divide="ignore"):
        # 1 - (1 - p) ** lookups, also where p is tiny.
        return counts, -np.expm1(lookups * np.log1p(-chances))


@functools.lru_cache(maxsize=4)
def _chances(num_rows: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sizes of blocks of ids, by frequency, and for each the probability that a lookup is of one certain id of it."""
    check_size(num_rows, "num_rows", 1)
    if not 0 <= exponent < float("inf"):
        raise InvalidValueError(
            f"exponent is {exponent} but must be at least 0 and finite; 1.05 is that of many data sets"
        )
    exact = min(num_rows, _EXACT)
    edges = np.arange(1, exact + 2, dtype=np.float64)
    if num_rows > exact:
        wider = np.unique(np.geomspace(exact + 1, num_rows + 1, _BLOCKS + 1).round())
        edges = np.concatenate([edges, wider[1:]])
    counts = np.diff(edges)
    weights = np.arange(1, exact + 1, dtype=np.float64) ** -exponent
    if len(counts) > exact:
        # The mean over a block is an integral, taken from half a number before its first to half a number after its last.
        ends = edges[exact:] - 0.5
        power = 1 - exponent
        total = np.diff(np.log(ends) if abs(power) < 1e-9 else ends**power / power)
        weights = np.concatenate([weights, total / counts[exact:]])
    return counts, weights / (counts * weights).sum()
