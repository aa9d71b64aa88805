"""The ids of a saved state and their rows, which follow changes without a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.vocabulary.id_index import IdIndex
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.initial import KINDS, as_line, check_initial
from speedtransfer.vocabulary.loaded_state import NUMBERS, SavedState, free_rows


class KnownIds:
    """Which row each id has, as in a table that has loaded a state and then follows changes (`Vocabulary.update`).

    Parameters
    ----------
    saved : SavedState

    Attributes
    ----------
    ids, last_use : ndarray
        ``(num_rows,)`` int64, as `IdRows` has them.
    counts : ndarray or None
        ``(num_rows,)`` float32.
    """

    def __init__(self, saved: SavedState) -> None:
        self.ids, self.last_use = saved.ids.copy(), saved.last_use.copy()
        self.counts = None if saved.counts is None else saved.counts.copy()
        self.numbers, self.initial, self.features = dict(saved.numbers), saved.initial, saved.features
        self.reserved = self.numbers["reserved"]
        rows = self.used()
        if self.numbers["by_time"]:
            # Those of earlier versions had no clock.
            self.numbers["by_time"] = self.numbers["clock"] = self.last_use[rows] = 0
        self._index = IdIndex.of(self.ids[rows], rows)
        fresh = int(rows[-1]) + 1 if len(rows) else self.reserved
        free = np.flatnonzero(self.last_use[self.reserved : fresh] == FREE)[::-1] + self.reserved
        self._released: np.ndarray
        self._released, self.numbers["fresh"] = free_rows(saved) or (free, fresh)

    @property
    def padding(self) -> int | None:
        """The id of padding."""
        return self.numbers["padding"] if self.reserved == 2 else None

    def used(self) -> np.ndarray:
        """Return the rows with an id, (n,) int64, sorted."""
        return np.flatnonzero(self.last_use[self.reserved :] != FREE) + self.reserved

    def follow(self, ids: np.ndarray, gone: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
        """Let ids `gone` (m,) be unknown and return the rows of `ids` (n,), which were used now; new ones get free rows.

        `facts` are the clock, and the seed and initial values of ids without a row, if these are others.
        """
        now = self.numbers["clock"] = max(self.numbers["clock"], facts["clock"])
        rows = self._index.find(gone)
        rows = rows[rows >= 0]
        self._index.remove(self.ids[rows])
        self.last_use[rows] = FREE
        self._released = np.concatenate([self._released, rows])
        found = self._index.find(ids)
        new = np.flatnonzero(found < 0)
        found[new] = self._take(len(new))
        self.ids[found[new]] = ids[new]
        if self.counts is not None:
            self.counts[found[new]] = 0
        self._index.insert(ids[new], found[new])
        self.last_use[found] = now
        if facts["seed"] is not None:
            self.numbers["seed"] = facts["seed"]
        if facts["initial"] is not None:
            self.initial = check_initial(facts["initial"])
        return found

    def note_uses(self, rows: np.ndarray, last_use: Tensor | None, counts: Tensor | None) -> None:
        """Note when, and how often, `rows` (n,) were used last, ``(n, 1)``, where that is known."""
        if last_use is not None:
            self.last_use[rows] = last_use[:, 0].numpy()
        if counts is not None and self.counts is not None:
            self.counts[rows] = counts[:, 0].numpy()

    def go_on_with(self, numbers: Tensor) -> None:
        """Take the numbers of another state, but for those of its rows."""
        found = dict(zip(NUMBERS, numbers.tolist(), strict=True))
        self.numbers |= {name: n for name, n in found.items() if name not in ("hand", "fresh", "reserved", "padding")}

    def _take(self, count: int) -> np.ndarray:
        """Return free rows, of which there are then as many: in the order of `IdRows.take`."""
        again = min(count, len(self._released))
        split = len(self._released) - again
        fresh = self.numbers["fresh"]
        rows = np.concatenate([self._released[split:][::-1], np.arange(fresh, fresh + count - again)])
        self._released, self.numbers["fresh"] = self._released[:split], fresh + count - again
        more = self.numbers["fresh"] - len(self.ids)
        if more > 0:
            self.ids = np.concatenate([self.ids, np.zeros(more, np.int64)])
            self.last_use = np.concatenate([self.last_use, np.full(more, FREE)])
            if self.counts is not None:
                self.counts = np.concatenate([self.counts, np.zeros(more, np.float32)])
        return rows

    def state(self) -> dict[str, Tensor]:
        """Return what has changed of the state, by name."""
        bits = [self.numbers[name] & (2**64 - 1) for name in NUMBERS]
        kind, *values = as_line(self.initial)
        found = {
            "ids": torch.from_numpy(self.ids),
            "last_use": torch.from_numpy(self.last_use),
            "released": torch.from_numpy(self._released.copy()),
            "numbers": torch.from_numpy(np.array(bits, dtype=np.uint64).view(np.int64)),
            "initial": torch.tensor([KINDS.index(kind), *values], dtype=torch.float64, device="cpu"),
        }
        return found if self.counts is None else found | {"counts": torch.from_numpy(self.counts)}
