"""Count how often ids were seen, in a fixed amount of memory: a count-min sketch, which errs upwards only."""

from __future__ import annotations

import numpy as np

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.vocabulary.mixing import GOLDEN, checked, mix64

_DTYPES = (np.uint8, np.uint16, np.uint32)


class Sightings:
    """Estimate of the number of times that each id was added: never too low, seldom too high.

    Each id has one counter in each of `depth` lines of counters, shared with other ids by chance; the lowest of them is the
    estimate. Only counters below the new estimate rise ("conservative update"). With more than about `width` distinct ids,
    estimates of rare ids begin to be too high.

    Parameters
    ----------
    width : int
        Counters in a line, below 2**32.
    depth : int
        Lines.
    seed : int
        Chooses the counters of an id: any integer of 64 bits.
    limit : int
        Counters rise no further; the least of 8, 16 or 32 bits that holds it is the size of a counter.

    Attributes
    ----------
    state : ndarray
        The counters, ``(depth, width)``: all that a checkpoint has to keep beside the arguments.
    """

    def __init__(self, width: int, depth: int, seed: int, limit: int) -> None:
        self.width, self._limit = check_size(width, "width", 1), limit
        if width >= 2**32:
            raise InvalidValueError(f"width is {width} but must be below 2**32; pass a smaller width")
        dtype = next(dtype for dtype in _DTYPES if limit <= np.iinfo(dtype).max)
        self.state = np.zeros((depth, width), dtype)
        lines = np.arange(1, depth + 1, dtype=np.uint64) * GOLDEN
        self._seeds = mix64(lines + np.uint64(seed % 2**64))

    def add(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Add `counts` (n,), not negative, to the sightings of distinct ids (n,) int64; return their estimates (n,) int64."""
        # All ids at once, from the counters as they were: no order among them, and still at least the count of each.
        places = self._places(ids)
        before = self._lowest(places)
        goals = before + np.minimum(counts, self._limit - before)
        goals = goals.astype(self.state.dtype)
        for line, place in zip(self.state, places, strict=True):
            np.maximum.at(line, place, goals)
        return self._lowest(places)

    def halve(self) -> None:
        """Halve all numbers, rounding down: sightings of long ago count less and less."""
        self.state >>= 1

    def _places(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return which counter of each line is an id's."""
        words = checked(ids, "ids").view(np.uint64)
        half, width = np.uint64(32), np.uint64(self.width)
        # The upper half of a random word, times the width, over 2**32: even over the width, and no division.
        return [((mix64(words ^ seed) >> half) * width >> half).view(np.int64) for seed in self._seeds]

    def _lowest(self, places: list[np.ndarray]) -> np.ndarray:
        counts = [line[place] for line, place in zip(self.state, places, strict=True)]
        return np.minimum.reduce(counts).astype(np.int64)
