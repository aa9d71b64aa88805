"""Compile with numba the hash table of `IdIndex`, and the passes over the rows and ids of a batch.

The table is open addressing with linear probing: an array ``(size, 2)`` of int64, `size` a power of two, each row an id and
the complement of its row number, so that a look-up costs one cache line. The complement is zero where no id stands: fresh
memory from the system is an empty table, and no id is reserved to mean "empty".

Ids are hashed, and their cache lines asked for, `AHEAD` ids before they are looked at: as many cache misses are under way at
once.

`old` is a smaller table with the same seed, which is moved: the ids of its first ``moved[0]`` slots also stand in `slots`. A
new id comes to `slots` only if it would stand among these in `old`, so that the pages of `slots` are written, and read, in
order. Where an id of `old` is removed `GONE` says so, and nothing there changes its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from speedtransfer.engines.host_copies import prefetch
from speedtransfer.jit import compile_function
from speedtransfer.vocabulary import mixing

AHEAD = 64  # a power of two
# In the place of the complement of a row, which is negative.
GONE = 1
_ONE = np.uint64(1)

mix64 = register_jitable(inline="always")(mixing.mix64)


@njit(inline="always")
def _home(slots: Any, seed: Any, multiplier: Any, id: Any) -> Any:
    """Return where the search for an id begins; the multiplier is odd, so this is a permutation cut short."""
    return mix64((np.uint64(id) ^ seed) * multiplier) & np.uint64(slots.shape[0] - 1)


@njit(inline="always")
def _coming(slots: Any, seed: Any, multiplier: Any, ids: Any, j: int, stop: int, homes: Any) -> None:
    """Hash the id `j`, if there is one, and ask for its slot."""
    if j < stop:
        home = _home(slots, seed, multiplier, ids[j])
        homes[j & (AHEAD - 1)] = home
        prefetch(np.int64(slots.ctypes.data) + np.int64(home) * 16)


@njit(inline="always")
def _first_homes(slots: Any, seed: Any, multiplier: Any, ids: Any, start: int, stop: int) -> Any:
    """Return where the searches for the first `AHEAD` ids begin, a ring that `_coming` goes on to fill."""
    homes = np.empty(AHEAD, np.uint64)
    for j in range(start, min(start + AHEAD, stop)):
        _coming(slots, seed, multiplier, ids, j, stop, homes)
    return homes


@njit(inline="always")
def _search(slots: Any, slot: Any, id: Any) -> Any:
    """Return the slot of an id, or the free one where the search for it ends."""
    mask = np.uint64(slots.shape[0] - 1)
    while slots[slot, 1] != 0 and slots[slot, 0] != id:
        slot = (slot + _ONE) & mask
    return slot


@compile_function
def find(
    slots: Any, old: Any, moved: Any, seed: Any, multiplier: Any, ids: Any, rows: Any, start: int, stop: int
) -> None:
    """Set ``rows[start:stop]`` to the rows of the ids, -1 where there is none."""
    first = old if len(old) else slots
    homes = _first_homes(first, seed, multiplier, ids, start, stop)
    for j in range(start, stop):
        home = homes[j & (AHEAD - 1)]
        _coming(first, seed, multiplier, ids, j + AHEAD, stop, homes)
        slot = _search(first, home, ids[j])
        row = ~first[slot, 1]
        if row < 0 and len(old) and _may_have_moved(old, moved, slot):
            row = ~slots[_search(slots, _home(slots, seed, multiplier, ids[j]), ids[j]), 1]
        rows[j] = row


@njit(inline="always")
def _may_have_moved(old: Any, moved: Any, slot: Any) -> Any:
    """Tell whether an id may stand in the larger table, the search for which ends at a slot of `old`."""
    return slot < moved[0] or old[slot, 1] == GONE


@compile_function
def insert(slots: Any, old: Any, moved: Any, seed: Any, multiplier: Any, ids: Any, rows: Any) -> int:
    """Insert ids; return how many, which is less than all if one was there already: there it stopped."""
    homes = _first_homes(slots, seed, multiplier, ids, 0, len(ids))
    for j in range(len(ids)):
        home = homes[j & (AHEAD - 1)]
        _coming(slots, seed, multiplier, ids, j + AHEAD, len(ids), homes)
        if len(old):
            before = _search(old, _home(old, seed, multiplier, ids[j]), ids[j])
            if old[before, 1] < 0:
                return j
            if not _may_have_moved(old, moved, before):
                old[before, 0] = ids[j]
                old[before, 1] = ~rows[j]
                continue
        slot = _search(slots, home, ids[j])
        if slots[slot, 1] != 0:
            return j
        slots[slot, 0] = ids[j]
        slots[slot, 1] = ~rows[j]
    return len(ids)


@compile_function
def remove(slots: Any, old: Any, moved: Any, seed: Any, multiplier: Any, ids: Any) -> int:
    """Remove ids; return how many, which is less than all if one was not there: there it stopped."""
    mask = np.uint64(slots.shape[0] - 1)
    homes = _first_homes(slots, seed, multiplier, ids, 0, len(ids))
    for j in range(len(ids)):
        home = homes[j & (AHEAD - 1)]
        _coming(slots, seed, multiplier, ids, j + AHEAD, len(ids), homes)
        if len(old):
            before = _search(old, _home(old, seed, multiplier, ids[j]), ids[j])
            if not _may_have_moved(old, moved, before):
                if old[before, 1] == 0:
                    return j
                old[before, 1] = GONE
                continue
            if old[before, 1] < 0:
                old[before, 1] = GONE
        hole = _search(slots, home, ids[j])
        if slots[hole, 1] == 0:
            return j
        # Later ids of the run move back into the hole if their search passes it, so that no mark has to stay there.
        slot = (hole + _ONE) & mask
        while slots[slot, 1] != 0:
            home = _home(slots, seed, multiplier, slots[slot, 0])
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                slots[hole, 0] = slots[slot, 0]
                slots[hole, 1] = slots[slot, 1]
                hole = slot
            slot = (slot + _ONE) & mask
        slots[hole, 1] = 0
    return len(ids)


@compile_function
def move(old: Any, slots: Any, moved: Any, seed: Any, multiplier: Any, count: int) -> None:
    """Insert the ids of the next `count` slots of `old`; both tables are passed through in order."""
    stop = min(moved[0] + count, len(old))
    for j in range(moved[0], stop):
        if old[j, 1] < 0:
            slot = _search(slots, _home(slots, seed, multiplier, old[j, 0]), old[j, 0])
            slots[slot, 0] = old[j, 0]
            slots[slot, 1] = old[j, 1]
    moved[0] = stop


@compile_function
def number(slots: Any, seed: Any, multiplier: Any, ids: Any, distinct: Any, counts: Any, numbers: Any) -> int:
    """Number ids in order of first appearance, and count them; return how many distinct ones there are.

    `slots` is an empty table with room for all; the arrays are as long as `ids`, and of two the end is not written.
    """
    known = 0
    homes = _first_homes(slots, seed, multiplier, ids, 0, len(ids))
    for j in range(len(ids)):
        slot = _search(slots, homes[j & (AHEAD - 1)], ids[j])
        _coming(slots, seed, multiplier, ids, j + AHEAD, len(ids), homes)
        if slots[slot, 1] == 0:
            slots[slot, 0] = ids[j]
            slots[slot, 1] = ~known
            distinct[known] = ids[j]
            counts[known] = 0
            known += 1
        numbers[j] = ~slots[slot, 1]
        counts[numbers[j]] += 1
    return known


@compile_function
def touch(rows: Any, now: int, last_use: Any, counts: Any, decay: float, uses: float) -> None:
    """Set the last use of all rows that are not negative; if uses are counted, let them decay and add `uses`.

    The powers do not depend on a C library.
    """
    for j in range(len(rows)):
        row = rows[j]
        if row < 0:
            continue
        gap = now - last_use[row]
        last_use[row] = now
        if len(counts):
            if gap > 0:
                kept, base = 1.0, decay
                while gap:
                    if gap & 1:
                        kept *= base
                    base *= base
                    gap >>= 1
                counts[row] = np.float32(counts[row] * kept)
            counts[row] += np.float32(uses)
