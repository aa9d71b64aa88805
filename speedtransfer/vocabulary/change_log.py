"""Which ids and rows have changed since a time of the clock: what a copy of the table has to take over."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.rows import LAST_STEP
from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.id_rows import IdRows
from speedtransfer.vocabulary.initial import Initial

if TYPE_CHECKING:
    # What the class that has this part brings.
    Base = Any
else:
    Base = object

# Ids that were taken off are remembered up to so many for each row of the table.
_LOGGED = 1.0


class ChangeLog(Base):
    """The part of a :class:`~speedtransfer.Vocabulary` that tells what has changed, and follows another one."""

    seed: int
    initial: Initial
    _clock: int
    _synced: tuple[int, int] | None

    def changed_since(self, clock: int) -> Changes:
        """Return the ids and rows that have changed since the `clock` of this vocabulary was that, for `update` of a copy.

        A copy that has applied what came before reads then, for every id, what this table reads now. Where idle rows move too
        (``idle="exact"``, with momentum or decay), or more ids were taken off than are remembered, or a state was loaded
        since, it is complete: all ids and rows. Rows that were written to ``embedding.table`` by hand are not seen.

        Parameters
        ----------
        clock : int
            ``vocabulary.clock`` as it was, or `Changes.clock` of the last time; 0: everything.

        Raises
        ------
        InvalidValueError
            The clock has not been there yet.
        """
        since = check_size(clock, "clock")
        self._check_alone("changed_since()")
        live, owner = self._bound()
        with owner.rows.lock:
            if since > self.clock:
                raise InvalidValueError(
                    f"{owner}: clock is {since} but that of this vocabulary is {self.clock}; pass an earlier one, or 0 for "
                    "everything"
                )
            now = self.clock
            complete = since == 0 or since < self._logged_from or LAST_STEP in live.table.planes
            rows = live.occupied()
            if not complete:
                rows = rows[live.last_use[rows] >= since]
            evicted = np.unique(
                np.concatenate([np.empty(0, dtype=np.int64), *(i for at, i in self._gone if at >= since)])
            )
            evicted = evicted[live.index.find(evicted) < 0]
            ids, reserved = torch.from_numpy(live.ids[rows]), self._weights(np.arange(live.reserved))
            return Changes(
                ids,
                self._weights(rows),
                torch.from_numpy(evicted),
                reserved,
                now,
                complete,
                since,
                self._origin,
                self.seed,
                self.initial,
                self.padding_idx,
                self.features,
            )

    def all_rows_changed(self) -> None:
        """Note that rows may have changed of which no lookup tells."""
        self._logged_from = self.clock + 1

    def _start_log(self) -> None:
        """Remember from now on which ids were taken off; what was before is not known."""
        # What changes from now on is that of no other vocabulary.
        self._origin = int.from_bytes(os.urandom(7), "little")
        # Pairs of the clock and ids, and the number of ids in them.
        self._gone: deque[tuple[int, np.ndarray]] = deque()
        self._num_logged = 0
        self._logged_from = self.clock + 1 if self.clock else 0

    def _log(self, ids: np.ndarray) -> None:
        self._gone.append((self.clock, ids))
        self._num_logged += len(ids)
        while self._num_logged > max(_LOGGED * self.capacity, len(ids)):
            at, dropped = self._gone.popleft()
            self._num_logged -= len(dropped)
            self._logged_from = at + 1

    # --- a copy -------------------------------------------------------------------------------------------------------

    def _check_alone(self, what: str) -> None:
        owner = self._bound()[1]
        if owner.owners.processes > 1:
            raise InvalidValueError(
                f"{owner}: {what} is for a vocabulary of one process, but {owner.owners.processes} processes share this one "
                "out; use ids and rows (export, update, forget)"
            )

    def _follow_clock(self, changes: Changes) -> None:
        if not self._eviction.by_time:
            self._clock = max(self._clock, changes.clock)

    def _follow_changes(self, changes: Changes) -> None:
        """Take what is not by row, and note up to when this is a copy."""
        if changes.seed is not None:
            self.seed = changes.seed
        if changes.initial is not None:
            self.initial = changes.initial
        self._synced = (changes.origin, changes.clock) if changes.origin else None

    def _check_changes(self, live: IdRows, changes: Changes) -> None:
        """Raise unless this vocabulary has what was before the changes, and the padding of theirs."""
        owner = self._bound()[1]
        changes.check()
        if len(changes.reserved) != live.reserved or changes.padding_idx not in (None, self.padding_idx):
            raise InvalidValueError(
                f"{owner}: the changes are of a table with padding_idx={changes.padding_idx} and {len(changes.reserved)} "
                f"reserved rows but this one has padding_idx={self.padding_idx} and {live.reserved}; make both with the same "
                "padding_idx"
            )
        if list(changes.features) != list(self.features):
            raise InvalidValueError(
                f"{owner}: the changes are of ids of the features {list(changes.features)} but this table has "
                f"{list(self.features)}; make both with the same features"
            )
        if changes.complete or not changes.origin:
            return
        origin, clock = self._synced or (0, 0)
        if origin != changes.origin:
            raise InvalidValueError(
                f"{owner}: a dump is missing: the changes are those since clock {changes.since} of a vocabulary that this one "
                "does not copy, or no longer (it was trained, or the other has loaded a state); begin with changed_since(0)"
            )
        if changes.since > clock:
            raise InvalidValueError(
                f"{owner}: a dump is missing: the changes are those since clock {changes.since} but this copy has those up to "
                f"{clock}; apply the ones between first, or begin anew with changed_since(0)"
            )
        if changes.clock < clock:
            raise InvalidValueError(
                f"{owner}: the changes are those up to clock {changes.clock} but this copy has those up to {clock} already; "
                "leave older ones out"
            )
