"""Which row each known id has, when it was used last, and which rows are free: planes of the table, and an index of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.jit import compiled_module
from speedtransfer.tables import Table
from speedtransfer.vocabulary.id_index import COMPILED, IdIndex
from speedtransfer.vocabulary.policies import Eviction

# The reserved rows at the start of the table: what unseen ids read, and that of padding, if there is one.
UNSEEN_ROW, PADDING_ROW = 0, 1
# Rows looked at for each one that has to go, and the fewest looked at: the worst of 16 are nearly the worst of all.
_WINDOW = 16
_LEAST_WINDOW = 4096
# Last use of a row without an id.
FREE = -1
# By its name in a saved state each plane: its name in the table, its dtype, and what it has of a row without an id.
_PLANES = {
    "ids": ("vocabulary.id", torch.int64, 0),
    "last_use": ("vocabulary.last_use", torch.int64, FREE),
    "counts": ("vocabulary.count", torch.float32, 0),
}
_NO_COUNTS = np.empty(0, dtype=np.float32)


def reserved_rows(padding_idx: int | None) -> int:
    """Return the number of rows at the start of a table that are of no id."""
    return PADDING_ROW if padding_idx is None else PADDING_ROW + 1


class IdRows:
    """The rows of ids in a table, of which the first `reserved` are of no id, but for padding.

    By row, as views of the planes, ``(num_rows,)``: `ids` and `last_use`, int64, which is `FREE` where there is no id; and if
    uses are `counted` their number as it was at the last one, `counts`, float32.
    """

    def __init__(self, table: Table, padding_idx: int | None, counted: bool) -> None:
        self.table, self.padding_idx, self.reserved = table, padding_idx, reserved_rows(padding_idx)
        # Whether something came into a change, so that index and free rows may not be those of the planes.
        self.torn = False
        self._names = ["ids", "last_use", *(["counts"] if counted else [])]
        # The host needs them: those of a table in the memory of a GPU are kept here.
        self._beside: dict[str, Tensor] = {}
        for name in self._names:
            plane, dtype, fill = _PLANES[name]
            if table.stored("weight").is_cuda:
                self._beside[name] = torch.full((table.num_rows, 1), fill, dtype=dtype, device="cpu")
            else:
                table.add_plane(plane, 1, dtype, fill)
        self.index = IdIndex()
        # A `DeviceMap`, which is told of changes of the index.
        self.watcher: Any = None
        # Rows that had ids before, the last of which is used first.
        self._released = array("q")
        # The first row that never had an id.
        self.fresh = self.reserved
        # By row, whether it must stay while rows that may go are looked for, and where that is so since the last search.
        self._stays, self._staying = np.empty(0, dtype=bool), list[np.ndarray]()
        # Where the search for rows that may go begins, counted from the first row of ids.
        self.hand = 0
        self.follow()

    def follow(self) -> None:
        """See the planes as they are now: the table may have got more rows."""
        num_rows = self.table.num_rows
        for name, plane in self._beside.items():
            if len(plane) < num_rows:
                more = plane.new_full((num_rows - len(plane), 1), _PLANES[name][2])
                self._beside[name] = torch.cat([plane, more])
        found = {name: plane.numpy() for name, plane in self.planes().items()}
        self.ids, self.last_use, self.counts = found["ids"], found["last_use"], found.get("counts")
        if len(self._stays) < num_rows:
            self._stays = np.zeros(num_rows, dtype=bool)

    def planes(self) -> dict[str, Tensor]:
        """Return the planes, ``(num_rows,)`` on the host, by the names that a saved state has for them."""
        stored = self._beside or {name: self.table.stored(_PLANES[name][0]) for name in self._names}
        return {name: plane[:, 0] for name, plane in stored.items()}

    @property
    def released(self) -> np.ndarray:
        """Free rows that had ids before, ``(n,)``, the last of which is used first: a copy."""
        return np.array(self._released, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """How many rows have no id."""
        return len(self._released) + len(self.ids) - self.fresh

    @property
    def num_ids(self) -> int:
        """How many rows have one."""
        return len(self.ids) - self.reserved - self.num_free

    def occupied(self) -> np.ndarray:
        """Return the rows with an id, (n,) int64, sorted."""
        return occupied(self.last_use, self.reserved)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Have index and free rows made anew from the planes if something comes into a change of them, or it fails.

        The last use of a row says whether it has an id: it is written at once, after the id and before it is gone.
        """
        try:
            yield
        except BaseException:
            self.torn = True
            self.rebuild()
            raise

    def take(self, count: int) -> np.ndarray:
        """Return `count` free rows, which are no longer free."""
        left = max(len(self._released) - count, 0)
        again = np.array(self._released[left:], dtype=np.int64)[::-1]
        del self._released[left:]
        rows = np.concatenate([again, np.arange(self.fresh, self.fresh + count - len(again))])
        self.fresh += count - len(again)
        return rows

    def assign(self, ids: np.ndarray, rows: np.ndarray, now: int) -> None:
        """Give `rows` (n,), which were taken, to `ids` (n,), distinct and unknown."""
        self.ids[rows] = ids
        if self.counts is not None:
            self.counts[rows] = 0
        self.last_use[rows] = now
        self.index.insert(ids, rows)
        if self.watcher is not None:
            self.watcher.note(ids, rows)

    def touch(self, rows: np.ndarray, now: int, decay: float, uses: float = 1.0) -> None:
        """Note that `rows` (n,), of which negative ones are passed over, were used now.

        Their counts become ``count * decay ** (now - last use)``, then `uses` is added for each time that a row is there.
        """
        counts = _NO_COUNTS if self.counts is None else self.counts
        compiled_module(COMPILED).touch(np.ascontiguousarray(rows), now, self.last_use, counts, float(decay), uses)

    def release(self, rows: np.ndarray) -> None:
        """Let `rows` (n,), distinct, have no id any more."""
        self.index.remove(self.ids[rows])
        if self.watcher is not None:
            self.watcher.note(self.ids[rows], np.full(len(rows), -1))
        self.last_use[rows] = FREE
        self._released.frombytes(np.asarray(rows, dtype=np.int64).tobytes())

    def index_of(self, ids: np.ndarray, rows: np.ndarray) -> IdIndex:
        """Return an index of `ids` (n,) in `rows` (n,), and of padding."""
        index = IdIndex(len(ids))
        index.insert(ids, rows)
        if self.padding_idx is not None:
            index.insert(np.array([self.padding_idx]), np.array([PADDING_ROW]))
        return index

    def rebuild(self, index: IdIndex | None = None, free: tuple[np.ndarray, int] | None = None) -> None:
        """Make the index and the free rows, `released` and `fresh`, anew from the planes, which those that are given fit."""
        if self.watcher is not None:
            self.watcher.note_all()
        rows = self.occupied()
        self.index = self.index_of(self.ids[rows], rows) if index is None else index
        if free is None:
            # Those before the last one with an id, the last of which is used first.
            fresh = int(rows.max(initial=self.reserved - 1)) + 1
            free = np.flatnonzero(self.last_use[self.reserved : fresh] == FREE)[::-1] + self.reserved, fresh
        released, self.fresh = free
        self._released = array("q", released.astype(np.int64).tobytes())
        self.torn = False

    def victims(
        self, count: int, eviction: Eviction, now: int, in_use: Sequence[np.ndarray], once: bool = False
    ) -> np.ndarray:
        """Return up to `count` rows, none of those `in_use`, that should go first, (n,) int64.

        With `once` it looks at one window of rows only, so that there may be fewer.
        """
        for rows in self._staying:
            self._stays[rows] = False
        self._staying = list(in_use)
        for rows in in_use:
            self._stays[rows] = True
        size = len(self.ids) - self.reserved
        window = min(max(_WINDOW * count, _LEAST_WINDOW), size)
        found, seen = [np.empty(0, dtype=np.int64)], 0
        while count > 0 and seen < size:
            length = min(window, size - seen)
            over = max(self.hand + length - size, 0)
            rows = np.concatenate([np.arange(over), np.arange(self.hand, self.hand + length - over)]) + self.reserved
            self.hand, seen = (self.hand + length) % size, seen + length
            rows = rows[(self.last_use[rows] != FREE) & ~self._stays[rows]]
            # A function of the user need not know what to say of none.
            if len(rows):
                counts = None if self.counts is None else self.counts[rows]
                scores = eviction.scores(now, self.ids[rows], self.last_use[rows], counts)
                found.append(rows[_lowest(scores, count)])
                count -= len(found[-1])
            if once:
                break
        return np.concatenate(found)


def occupied(last_use: np.ndarray, reserved: int) -> np.ndarray:
    """Return the rows with an id, (n,) int64, sorted, by the `last_use` of all."""
    return np.flatnonzero(last_use[reserved:] != FREE) + reserved


def _lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return where the `count` lowest of `scores` (n,) are, or fewer, without those of inf; the first of equal ones."""
    places = np.flatnonzero(scores != np.inf)
    if len(places) > count:
        # Those up to the highest that may go, which are few to be sorted.
        highest = np.partition(scores[places], count - 1)[count - 1]
        places = places[~(scores[places] > highest)]
    return places[np.argsort(scores[places], kind="stable")[:count]]
