"""Which new ids are admitted, by a sketch of how often they were seen, how many a table holds, and which have to go."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_choice, check_size
from speedtransfer.units import parse_bytes
from speedtransfer.vocabulary.mixing import GOLDEN, mix64

# Takes ids, last use and number of uses of some rows, (n,) arrays, and returns which may go (bool), or scores of which the
# lowest go first.
EvictFunction = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]

Admit = Literal["always"] | int
Evict = Literal["lru", "lfu"] | int | EvictFunction | None
MaxCapacity = int | str | float | None

# Lines of counters of sightings, which rise to this at least, and are halved after so many for each counter of a line.
DEPTH = 4
_LEAST_LIMIT = 255
_SIGHTINGS_PER_COUNTER = 4
_COUNTERS = (np.uint8, np.uint16, np.uint32)


class Admission:
    """Decide which unknown ids are admitted, by `admit` of a :class:`~speedtransfer.Vocabulary`.

    Sightings are counted in a count-min sketch: estimates of how often each id was added, never too low, seldom too high. Each
    id has one counter in each of `depth` lines of `width`, shared with other ids by chance; the lowest of them counts. Only
    counters below the new estimate rise ("conservative update"), up to a limit. It goes on with the `counters`,
    ``(depth, width)``, of one with this seed, if they are given.

    Attributes
    ----------
    counters : ndarray, optional
        All that a checkpoint has to keep, with `added`; None where nothing is counted.
    added : int
        Sightings since the counts were halved last.
    """

    def __init__(self, admit: Admit, seed: int, width: int, counters: np.ndarray | None = None) -> None:
        self._admit, self.added = admit, 0
        self.counters: np.ndarray | None = None
        if isinstance(admit, int) and admit > 1:
            self._limit = max(admit, _LEAST_LIMIT)
            dtype = next(dtype for dtype in _COUNTERS if self._limit <= np.iinfo(dtype).max)
            self.counters = np.zeros((DEPTH, width), dtype)
            if counters is not None:
                # Those of another `admit` may be wider or narrower.
                self.counters = counters.clip(max=min(self._limit, np.iinfo(counters.dtype).max)).astype(dtype)
            lines = np.arange(1, len(self.counters) + 1, dtype=np.uint64) * GOLDEN
            self._seeds = mix64(lines + np.uint64(seed % 2**64))

    def choose(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return which of the `ids` (n,) int64, distinct, that were seen `counts` (n,) times more are admitted, (n,) bool."""
        if self.counters is None:
            return np.ones(len(ids), dtype=bool)
        self.added += int(counts.sum())
        if self.added > _SIGHTINGS_PER_COUNTER * self.counters.shape[1]:
            # Those of ids that never come again would fill it: sightings of long ago count less and less.
            self.counters >>= 1
            self.added = 0
        return np.asarray(self.add(ids, counts) >= self._admit)

    def add(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Add `counts` (n,), not negative, to the sightings of distinct ids (n,) int64; return their estimates (n,) int64."""
        assert self.counters is not None
        # All ids at once, from the counters as they were: no order among them, and still at least the count of each.
        words = np.ascontiguousarray(ids).view(np.uint64)
        half, width = np.uint64(32), np.uint64(self.counters.shape[1])
        # The upper half of a random word, times the width, over 2**32: even over the width, and no division.
        places = [((mix64(words ^ seed) >> half) * width >> half).view(np.int64) for seed in self._seeds]
        before = _lowest(self.counters, places)
        goals = (before + np.minimum(counts, self._limit - before)).astype(self.counters.dtype)
        for line, place in zip(self.counters, places, strict=True):
            np.maximum.at(line, place, goals)
        return _lowest(self.counters, places)


def _lowest(counters: np.ndarray, places: list[np.ndarray]) -> np.ndarray:
    """Return the lowest of the counters at `places`, (n,) int64 in each line."""
    return np.minimum.reduce([line[place] for line, place in zip(counters, places, strict=True)]).astype(np.int64)


class Eviction:
    """Rank rows by how little they would be missed: `evict` and `half_life` of a :class:`~speedtransfer.Vocabulary`."""

    def __init__(self, evict: Evict, half_life: float) -> None:
        self.rule = evict
        self.decay = 0.5 ** (1 / half_life)
        # After so many steps without a use a row goes.
        self.lifetime = evict if isinstance(evict, int) else None
        # Whether it needs the number of uses.
        self.counts = evict == "lfu" or callable(evict)

    def scores(self, now: int, ids: np.ndarray, last_use: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        """Return a number for each row, (n,) float64: the lowest go first, and those of inf stay."""
        if self.lifetime is not None:
            return np.where(now - last_use > self.lifetime, last_use.astype(np.float64), np.inf)
        if counts is None:
            return last_use.astype(np.float64)
        current = counts * self.decay ** (now - last_use).astype(np.float64)
        if not callable(self.rule):
            return np.asarray(current, dtype=np.float64)
        chosen = np.asarray(self.rule(ids.copy(), last_use.copy(), current.astype(np.float32)))
        if chosen.shape != ids.shape or chosen.dtype.kind not in "biuf":
            raise InvalidValueError(
                f"evict returned {chosen.dtype} values of shape {chosen.shape} for {len(ids)} ids; return a bool or a number "
                "for each"
            )
        return np.where(chosen, 0.0, np.inf) if chosen.dtype == bool else chosen.astype(np.float64)


def check_admit(admit: Any) -> Admit:
    """Return a valid `admit`; raise for anything else."""
    if isinstance(admit, str):
        return check_choice(admit, "admit", ["always"])
    sightings = _whole(admit, "admit", "'always' or an int (sightings)")
    if sightings >= 2**32:
        raise InvalidValueError(f"admit is {sightings} but must be below 2**32; pass fewer sightings")
    return sightings


def check_evict(evict: Any) -> Evict:
    """Return a valid `evict`; raise for anything else."""
    if evict is None or callable(evict):
        return evict
    if isinstance(evict, str):
        return check_choice(evict, "evict", ["lru", "lfu"])
    return _whole(evict, "evict", "None, 'lru', 'lfu', an int (steps) or a callable")


def _whole(value: Any, name: str, what: str) -> int:
    """Return a number from 1 on; InvalidTypeError says `what` it may be."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidTypeError(f"{name} is {value!r} but must be {what}; pass one of them")
    return check_size(value, name, 1)


def check_seed(seed: Any) -> int:
    """Return a seed; None: torch's, as it is now."""
    if seed is None:
        return torch.initial_seed()
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise InvalidTypeError(f"seed is {seed!r} but must be an int; pass one")
    return int(seed)


# --- how many ids -------------------------------------------------------------------------------------------------------


def check_max_capacity(limit: Any) -> MaxCapacity:
    """Return a valid limit of the number of ids; raise for anything else."""
    if limit is None or (isinstance(limit, float) and limit == math.inf):
        return limit
    if isinstance(limit, str):
        bytes_of(limit)
        return limit
    return _whole(limit, "max_capacity", "a number of ids, bytes such as '48 GB', or math.inf")


def bytes_of(text: str) -> int:
    """Return the bytes that a limit such as "48 GB" or "16GiB" names."""
    try:
        num_bytes = int(parse_bytes(text))
    except InvalidValueError as error:
        raise InvalidValueError(f"max_capacity is {error}") from None
    if not num_bytes or not text.strip().upper().endswith("B"):
        raise InvalidValueError(f"max_capacity is {text!r} but must be a size such as '48 GB' or '16 GiB'; pass one")
    return num_bytes


def share_of(capacity: int, ranks: int) -> int:
    """Return the number of ids that each of `ranks` processes has rows for, where there are to be rows for `capacity`.

    A hash spreads ids over processes: four standard deviations more than an even share, so that nearly always all fit.
    """
    even = -(-capacity // ranks)
    return min(capacity, even + math.ceil(4 * math.sqrt(even)))


def most_rows(limit: MaxCapacity, ranks: int, num_rows: int, reserved: int, row_bytes: int) -> int | None:
    """Return the number of rows that a table of `num_rows`, `reserved` ones among them, may have; None: no limit.

    It is that of one of `ranks` processes, and `limit` that of all.
    """
    if limit is None:
        return num_rows
    if limit == math.inf:
        return None
    num_bytes = bytes_of(limit) if isinstance(limit, str) else None
    rows = share_of(int(limit), ranks) + reserved if num_bytes is None else num_bytes // ranks // max(row_bytes, 1)
    return max(rows, num_rows)
