"""Count how often ids were seen, in a fixed amount of memory: a count-min sketch, which errs upwards only."""

from __future__ import annotations

import numpy as np

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
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
    """

    def __init__(self, width: int, depth: int = 4, seed: int = 0, limit: int = 2**32 - 1) -> None:
        self.width = check_size(width, "width", 1)
        self.depth = check_size(depth, "depth", 1)
        self.limit = check_size(limit, "limit", 1)
        for name, value in (("width", self.width), ("limit", self.limit)):
            if value >= 2**32:
                raise InvalidValueError(f"{name} is {value} but must be below 2**32; pass a smaller {name}")
        dtype = next(dtype for dtype in _DTYPES if self.limit <= np.iinfo(dtype).max)
        self._counters = np.zeros((self.depth, self.width), dtype)
        lines = np.arange(1, self.depth + 1, dtype=np.uint64) * GOLDEN
        self._seeds = mix64(lines + np.uint64(seed % 2**64))

    @property
    def nbytes(self) -> int:
        """Bytes of the counters."""
        return self._counters.nbytes

    @property
    def state(self) -> np.ndarray:
        """The counters, ``(depth, width)``, not copied: all that a checkpoint has to keep beside the arguments."""
        return self._counters

    def load(self, state: np.ndarray) -> None:
        """Copy the counters of another sketch with the same arguments.

        Parameters
        ----------
        state : (depth, width) array
            What :attr:`state` was.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            It has another dtype or shape; nothing is changed.
        """
        mine = self._counters
        if state.dtype != mine.dtype:
            raise InvalidTypeError(
                f"state has dtype {state.dtype} but these counters, up to {self.limit}, are {mine.dtype}; load it into "
                "Sightings with the limit that it was made with"
            )
        if state.shape != mine.shape:
            raise InvalidValueError(
                f"state has shape {tuple(state.shape)} but these are {self.depth} lines of {self.width}; load it into "
                "Sightings with the depth and width that it was made with"
            )
        mine[:] = state

    def add(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Add `counts` to the numbers of sightings of distinct ids, and return their estimates.

        Parameters
        ----------
        ids : (n,) int64 array
            Distinct: of a repeated one the highest count alone would be added.
        counts : (n,) int64 array
            Not negative.

        Returns
        -------
        (n,) int64 array
        """
        # All ids at once, from the counters as they were: no order among them, and still at least the count of each.
        places = self._places(ids)
        before = self._lowest(places)
        goals = before + np.minimum(counts, self.limit - before)
        goals = goals.astype(self._counters.dtype)
        for line, place in zip(self._counters, places, strict=True):
            np.maximum.at(line, place, goals)
        return self._lowest(places)

    def estimate(self, ids: np.ndarray) -> np.ndarray:
        """Return estimates of the number of sightings, up to `limit`: (n,) int64 for (n,) int64 ids."""
        return self._lowest(self._places(ids))

    def halve(self) -> None:
        """Halve all numbers, rounding down: sightings of long ago count less and less."""
        self._counters >>= 1

    def _places(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return which counter of each line is an id's."""
        words = checked(ids, "ids").view(np.uint64)
        half, width = np.uint64(32), np.uint64(self.width)
        # The upper half of a random word, times the width, over 2**32: even over the width, and no division.
        return [((mix64(words ^ seed) >> half) * width >> half).view(np.int64) for seed in self._seeds]

    def _lowest(self, places: list[np.ndarray]) -> np.ndarray:
        lowest = self._counters[0][places[0]]
        for line, place in zip(self._counters[1:], places[1:], strict=True):
            np.minimum(lowest, line[place], out=lowest)
        return lowest.astype(np.int64)
