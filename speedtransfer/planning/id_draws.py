"""Draw the ids of steps for a table that was cut to fewer rows: as many distinct rows as of the whole, repeated as often."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from speedtransfer.ranks.zipf import draw_ids, expected_unique

# More are not drawn for one feature and step: the sorting of them would take seconds.
_MAX_DRAWN = 1 << 22
_MIX = 0x9E3779B1  # prime, near 2**32 divided by the golden ratio: spreads numbers that count up


class Draws:
    """Draws the lookups of one feature, step by step.

    Of a feature that is whole, ids are drawn by the Zipf law and spread over the rows. Of one with fewer rows than it stands
    in for, the most frequent ids have half of the rows to themselves, and all others take the other half in turns: distinct
    ids of a step have distinct rows, and a row that is rare is one that has not been touched for long.

    Parameters
    ----------
    rows : int
        Of the feature that is planned.
    kept : int
        Rows that there are for it, at most `rows`.
    lookups : int
        Of a step.
    zipf : float
    share : float
        Of the distinct rows of a step, with all their lookups, above 0 and at most 1.
    unique : float, optional
        Distinct rows of a step where they are not those of the Zipf law: rows take turns then.
    seed : int
    """

    def __init__(
        self, rows: int, kept: int, lookups: int, zipf: float, share: float, unique: float | None, seed: int
    ) -> None:
        self._rows, self._kept, self._share, self._unique, self._zipf = rows, kept, share, unique, zipf
        self._lookups = min(lookups, _MAX_DRAWN)
        self._draw = np.random.default_rng(seed)
        self._next = 0

    def step(self) -> NDArray[np.int64]:
        """Return the rows that the lookups of the next step name, at least one."""
        if self._unique is not None:
            count = max(1, round(self._share * self._lookups))
            distinct = self._in_turn(min(count, max(1, round(self._share * self._unique))), 0, self._kept)
            more = distinct[self._draw.integers(len(distinct), size=count - len(distinct))]
            return self._draw.permutation(np.concatenate([distinct, more]))
        drawn = draw_ids(self._rows, self._zipf, self._lookups, self._draw)
        ids, place = np.unique(drawn, return_inverse=True)
        if self._share < 1:
            wanted = np.zeros(len(ids), dtype=bool)
            wanted[self._draw.permutation(len(ids))[: max(1, round(self._share * len(ids)))]] = True
            place = place[wanted[place]]
        if self._kept == self._rows:
            rows = _spread(ids, self._kept)
        else:
            hot = self._kept // 2
            rows = np.empty_like(ids)
            rare = ids >= hot
            rows[~rare] = _spread(ids[~rare], hot)
            rows[rare] = self._in_turn(int(rare.sum()), hot, self._kept)
        return rows[place]

    def _in_turn(self, count: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the next `count` of the rows from `begin` on, which come again when all have been."""
        numbers = (self._next + np.arange(count)) % (end - begin)
        self._next = (self._next + count) % (end - begin)
        return begin + _spread(numbers, end - begin)


def _spread(numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return other numbers below `size`, different ones for different ones, that are near each other for none."""
    if not len(numbers):
        return numbers
    factor = _MIX % size
    while math.gcd(factor, size) != 1:
        factor += 1
    # The product of two numbers below 2**32 is below 2**64; larger ones have no need to be spread as well.
    return numbers if size >= 1 << 31 else (numbers * factor) % size


def drawn_unique(rows: int, lookups: int, zipf: float) -> float:
    """Return the distinct rows that are expected of a step as it is drawn."""
    return expected_unique(rows, zipf, min(lookups, _MAX_DRAWN))
