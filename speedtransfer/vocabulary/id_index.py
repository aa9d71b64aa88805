"""Map 64-bit ids to row numbers: a hash table compiled by numba; number unknown ids. Knows of no table."""

from __future__ import annotations

import os

import numpy as np

from speedtransfer.buffers import anonymous
from speedtransfer.errors import HostMemoryError, InvalidValueError, format_bytes
from speedtransfer.jit import compiled_module, run_on_threads

COMPILED = "speedtransfer.vocabulary.numba_index"
_SMALLEST = 64  # slots
_SLOT_BYTES = 16
_MAPPED_BYTES = 1 << 21  # from here on a table fills huge pages
# Of a smaller table, how many slots are moved at least each time, a few milliseconds, and how many for each id that comes.
_MOVED_SLOTS = 1 << 15
_MOVED_SLOTS_PER_ID = 8


class IdIndex:
    """Map from distinct ids (any int64) to row numbers (int64, not negative).

    At most half of the slots are taken. Where an id stands depends on a random number of each index, so nobody can choose ids
    that slow it down; what the calls return does not. Any number of threads may call :meth:`find` while nothing is changed.

    A table that doubles does not move its ids at once, which takes seconds for many millions of them, but some in each call of
    `insert` and `go_on`. Until then both tables are there. From the beginning it has `room` for so many ids.
    """

    def __init__(self, room: int = 0) -> None:
        self._compiled = compiled_module(COMPILED)
        self._count = 0
        self._slots, *self._hash = _table_for(0)
        # A smaller table that is moved to the slots, and how many of its slots that is done for.
        self._old, self._moved = _NO_TABLE, np.zeros(1, np.int64)
        self.reserve(room)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds."""
        return self._slots.nbytes + self._old.nbytes

    def reserve(self, room: int) -> None:
        """Make room for `room` ids in all. HostMemoryError: the system refuses that much memory; the index is as before."""
        if 2 * room <= len(self._slots):
            return
        self._move(len(self._old))
        slots, none = _free_slots(room), np.zeros(1, np.int64)
        # In one line, within which nothing is called: an interrupt comes before it or after it.
        self._slots, self._old, self._moved = slots, self._slots if self._count else _NO_TABLE, none

    def go_on(self) -> None:
        """Move some ids, if there are any to be moved."""
        self._move(_MOVED_SLOTS)

    def _move(self, count: int) -> None:
        """Move the ids of `count` slots of the smaller table, and let go of it at its end."""
        if self._old is not _NO_TABLE:
            self._compiled.move(self._old, self._slots, self._moved, *self._hash, count)
            if self._moved[0] == len(self._old):
                self._old = _NO_TABLE

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id (n,) int64, -1 where it has none."""
        ids = np.ascontiguousarray(ids)
        rows = np.empty(len(ids), np.int64)
        part = self._compiled.find, (self._slots, self._old, self._moved, *self._hash, ids, rows)
        # A look-up waits for one cache line.
        run_on_threads([part], len(ids), 64 * len(ids), ())
        return rows

    def insert(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Add ids (n,) int64 that the index does not have, with their rows (n,) int64.

        If one is repeated or has a row already it raises, and those before it are there.
        """
        ids, rows = np.ascontiguousarray(ids), np.ascontiguousarray(rows)
        self.reserve(self._count + len(ids))
        self._move(max(_MOVED_SLOTS, _MOVED_SLOTS_PER_ID * len(ids)))
        self._count += (done := self._change("insert", ids, rows))
        if done < len(ids):
            raise InvalidValueError(f"ids[{done}] is {ids[done]}, which has a row already; remove it first")

    def remove(self, ids: np.ndarray) -> None:
        """Remove ids (n,) int64. If one is repeated or has no row it raises, and those before it are gone."""
        ids = np.ascontiguousarray(ids)
        self._count -= (done := self._change("remove", ids))
        if done < len(ids):
            raise InvalidValueError(
                f"ids[{done}] is {ids[done]}, which has no row or stands there twice; remove each id once"
            )

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids and their rows, in no order: two (len,) int64 arrays."""
        parts = self._slots, self._old[self._moved[0] :]
        taken = np.concatenate([part[part[:, 1] < 0] for part in parts])
        return taken[:, 0].copy(), ~taken[:, 1]

    def _change(self, name: str, *given: np.ndarray) -> int:
        """Insert or remove ids up to the first that is there already, or is not there; return how many."""
        return getattr(self._compiled, name)(self._slots, self._old, self._moved, *self._hash, *given)


# What is moved where nothing is.
_NO_TABLE = np.zeros((0, 2), np.int64)


def _table_for(num_ids: int) -> tuple[np.ndarray, np.uint64, np.uint64]:
    """Return an empty hash table of `numba_index` with room for so many ids, and its seed and multiplier."""
    seed, multiplier = np.frombuffer(os.urandom(16), np.uint64)
    return _free_slots(num_ids), seed, multiplier | np.uint64(1)


def first_unknown(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the ids that have no row: among ids (n,) int64 those whose `rows` (n,) are -1.

    Returned are the distinct ones in order of first appearance and how often each occurs, (u,) int64; where one of them stands
    in `ids`, ascending, and its number, (p,) int64.
    """
    positions = np.flatnonzero(rows == -1)
    unknown, counts, numbers = (np.empty(len(positions), np.int64) for _ in range(3))
    table = _table_for(len(positions))
    found = compiled_module(COMPILED).number(*table, ids[positions], unknown, counts, numbers)
    return unknown[:found].copy(), counts[:found].copy(), positions, numbers


def _free_slots(num_ids: int) -> np.ndarray:
    """Return as many as the least power of two of which `num_ids` is no more than half."""
    size = 1 << max(2 * num_ids - 1, _SMALLEST - 1).bit_length()
    num_bytes = size * _SLOT_BYTES
    if num_bytes < _MAPPED_BYTES:
        return np.zeros((size, 2), np.int64)
    try:
        return np.frombuffer(anonymous(num_bytes), np.int64).reshape(size, 2)
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"an index of {size // 2} ids takes {format_bytes(num_bytes)}, which the system refused ({error}); let the "
            "vocabulary hold fewer ids (max_capacity) or use a machine with more memory"
        ) from error
