"""Which new ids are admitted, and which known ones have to go."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.vocabulary.sightings import Sightings

# Takes ids, last use and number of uses of some rows, (n,) arrays, and returns which may go (bool), or scores of which the
# lowest go first.
EvictFunction = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]

Admit = Literal["always"] | int
Evict = Literal["lru", "lfu"] | int | EvictFunction | None

# Lines of counters of sightings, which rise to this at least, and are halved after so many for each counter of a line.
_DEPTH = 4
_LEAST_LIMIT = 255
_SIGHTINGS_PER_COUNTER = 4


class Admission:
    """Decide which unknown ids are admitted, by `admit` of a :class:`~speedtransfer.Vocabulary`.

    Where sightings are counted, the sketch has `width` counters in a line, or goes on with the `counters`, ``(depth, width)``,
    of one with this seed.
    """

    def __init__(self, admit: Admit, seed: int, width: int, counters: np.ndarray | None = None) -> None:
        self._admit = admit
        self.sightings: Sightings | None = None
        if isinstance(admit, int) and admit > 1:
            limit, depth = max(admit, _LEAST_LIMIT), _DEPTH
            if counters is not None:
                depth, width = counters.shape
            self.sightings = Sightings(width, depth, seed, limit)
            if counters is not None:
                self.sightings.state[:] = np.minimum(counters, limit)
        # Sightings since the counts were halved last.
        self.added = 0

    def choose(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return which of the `ids` (n,) int64, distinct, that were seen `counts` (n,) times more are admitted, (n,) bool."""
        if self.sightings is not None:
            self.added += int(counts.sum())
            if self.added > _SIGHTINGS_PER_COUNTER * self.sightings.width:
                # Those of ids that never come again would fill it.
                self.sightings.halve()
                self.added = 0
            return np.asarray(self.sightings.add(ids, counts) >= self._admit)
        return np.ones(len(ids), dtype=bool)


class Eviction:
    """Rank rows by how little they would be missed: `evict` and `half_life` of a :class:`~speedtransfer.Vocabulary`."""

    def __init__(self, evict: Evict, half_life: float) -> None:
        self.rule = evict
        self.decay = 0.5 ** (1 / half_life)
        # After so many steps without a use a row goes.
        self.lifetime = evict if isinstance(evict, int) else None

    @property
    def counts(self) -> bool:
        """Whether it needs the number of uses."""
        return self.rule == "lfu" or callable(self.rule)

    def scores(self, now: int, ids: np.ndarray, last_use: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        """Return a number for each row, (n,) float64: the lowest go first, and those of inf stay."""
        if self.lifetime is not None:
            return np.where(now - last_use > self.lifetime, last_use.astype(np.float64), np.inf)
        if self.rule == "lru":
            return last_use.astype(np.float64)
        assert counts is not None
        current = counts * self.decay ** (now - last_use).astype(np.float64)
        if self.rule == "lfu":
            return np.asarray(current, dtype=np.float64)
        assert callable(self.rule)
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
        if admit != "always":
            raise InvalidValueError(f"admit is {admit!r}, not one of its values{suggest(admit, ['always'])}")
        return "always"
    if isinstance(admit, bool) or not isinstance(admit, numbers.Integral):
        raise InvalidTypeError(f"admit is {admit!r} but must be 'always' or an int (sightings); pass one of them")
    if not 1 <= int(admit) < 2**32:
        raise InvalidValueError(
            f"admit is {admit!r} but must be from 1 to 2**32 - 1, a number of sightings; pass fewer"
        )
    return int(admit)


def check_evict(evict: Any) -> Evict:
    """Return a valid `evict`; raise for anything else."""
    if evict is None or callable(evict):
        return evict
    if isinstance(evict, str):
        if evict not in ("lru", "lfu"):
            raise InvalidValueError(f"evict is {evict!r}, not one of its values{suggest(evict, ['lru', 'lfu'])}")
        return "lru" if evict == "lru" else "lfu"
    if isinstance(evict, bool) or not isinstance(evict, numbers.Integral):
        raise InvalidTypeError(
            f"evict is {evict!r} but must be None, 'lru', 'lfu', an int (steps) or a callable; pass one of them"
        )
    if evict < 1:
        raise InvalidValueError(f"evict is {evict!r} but a time to live must be positive; pass more steps")
    return int(evict)


def check_half_life(half_life: Any) -> float:
    """Return a valid half-life of counts; raise unless it is a positive number."""
    number = isinstance(half_life, numbers.Real) and not isinstance(half_life, bool)
    if not number or not 0 < half_life < math.inf:
        raise InvalidValueError(
            f"half_life is {half_life!r} but must be a positive number of steps; pass for instance 10_000"
        )
    return float(half_life)


def check_seed(seed: Any) -> int:
    """Return a seed; None: torch's, as it is now."""
    if seed is None:
        return torch.initial_seed()
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise InvalidTypeError(f"seed is {seed!r} but must be an int; pass one")
    return int(seed)
