"""Lookups that find rows without a wait of the host: by a map on the device, or with new ids admitted after the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from speedtransfer.cuda import to_host
from speedtransfer.vocabulary.batches import touch
from speedtransfer.vocabulary.device_map import DeviceMap
from speedtransfer.vocabulary.device_slots import fill_unseen
from speedtransfer.vocabulary.id_rows import UNSEEN_ROW

if TYPE_CHECKING:
    # What the class that has this part brings.
    Base = Any
else:
    Base = object

# Lookups in training that wait for a step; where there are more their ids are admitted without one.
_MOST_WAITING = 256


class NotedIds:
    """The ids of a lookup, which the host has or will have soon, and their rows.

    Parameters
    ----------
    ids : Tensor, optional
        ``(n,)`` int64, on any device; copied. None: only the rows are of interest.
    rows : ndarray, optional
        ``(n,)`` int64, -1 where there is none; by default `Lookups.noted_rows` finds them.
    clock : int
        That of the vocabulary then.
    """

    def __init__(self, ids: Tensor | None, rows: np.ndarray | None = None, clock: int = 0) -> None:
        self._ids, self._there, self.rows, self.clock = ids, None, rows, clock
        if ids is not None:
            self._ids, self._there = to_host(ids) if ids.is_cuda else (ids.clone(), None)

    @property
    def ids(self) -> np.ndarray:
        """On the host, which waits for them if they are on their way."""
        if self._there is not None:
            self._there.synchronize()
            self._there = None
        assert self._ids is not None
        return self._ids.numpy()


class Lookups(Base):
    """The part of a :class:`~speedtransfer.Vocabulary` for lookups by ids on a device, and those that admit ids later."""

    _map: DeviceMap | None

    def _start_waiting(self) -> None:
        # Lookups in training whose new ids the next step admits.
        self._waiting: list[NotedIds] = []

    # --- on a device --------------------------------------------------------------------------------------------------

    def find_on_device(self, ids: Tensor, counted: bool = True) -> Tensor | None:
        """Return the row of each id (n,) on a CUDA device, `UNSEEN_ROW` where it has none; the host does not wait.

        None where the device has no memory to find them with. With `counted` it is a lookup of the statistics.
        """
        live, owner = self._bound()
        with owner.rows.lock:
            there = self._map
            if there is None or there.device != ids.device:
                self._count_unknown()
                there = self._map = DeviceMap(ids.device)
            if not there.follow(live):
                return None
            if counted:
                self._counts[2] += len(ids)
            return there.find(ids, UNSEEN_ROW, counted)

    def fill_unseen(self, values: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Set `values`, ``(n, dim)``, to what ids (n,) on a CUDA device begin with where `rows` (n,) is `UNSEEN_ROW`."""
        fill_unseen(values, ids, rows, UNSEEN_ROW, self.seed, self.initial)

    def _count_unknown(self) -> None:
        """Add what the device has counted; the host waits for it."""
        if self._map is not None:
            self._counts[3] += self._map.take_unknown()

    # --- later --------------------------------------------------------------------------------------------------------

    def find_deferred(self, ids: Tensor, on_device: bool) -> tuple[Tensor | None, NotedIds]:
        """Note ids (n,) int64, of which the next step admits the new ones, and which count as used then.

        The row of each is returned too, `UNSEEN_ROW` where it has none, if they are found on their device.

        Parameters
        ----------
        ids : Tensor
        on_device : bool
            Whether ids on a CUDA device are found there, if it has the memory, so that the host does not wait.

        Raises
        ------
        HostMemoryError
            There is no row for a new id of a lookup so long ago that no more of them wait for a step.
        """
        live, owner = self._bound()
        with owner.rows.lock:
            live.table.check_writable()
            if len(self._waiting) >= _MOST_WAITING:
                self.settle()
            rows = self.find_on_device(ids) if on_device and ids.is_cuda else None
            noted = NotedIds(ids, clock=self.clock)
            if rows is None:
                noted.rows = self.find(noted.ids)
            self._waiting.append(noted)
        return rows, noted

    def noted_rows(self, noted: NotedIds) -> np.ndarray:
        """Return the rows of ids that were looked up, (n,), -1 where there was none; the host may wait for the ids.

        No row may have been taken from an id since; whoever takes one has asked before, or has settled them.
        """
        if noted.rows is None:
            noted.rows = self._bound()[0].index.find(noted.ids)
        return noted.rows

    def settle(self) -> None:
        """Admit the new ids of the lookups that wait for a step, and count the others as used.

        Raises
        ------
        HostMemoryError
            There is no row for an id that is to be admitted, and none may be taken from another. It is not admitted.
        """
        live, owner = self._bound()
        with owner.rows.lock:
            if self._waiting:
                live.table.check_writable()
            waiting, self._waiting = self._waiting, []
            found = [self.noted_rows(noted) for noted in waiting]
            # Those used in this step stay, of whichever lookup.
            for noted, rows in zip(waiting, found, strict=True):
                if self._eviction.by_time:
                    # Whoever has asked for changes since must not miss what comes now.
                    noted.clock = self.clock
                touch(rows, noted.clock, live.last_use, live.counts, self._eviction.decay)
            for noted, before in zip(waiting, found, strict=True):
                new = np.flatnonzero(before < 0)
                if not len(new):
                    continue
                rows = before.copy()
                rows[new] = live.index.find(noted.ids[new])
                self._admit(noted.ids, rows)
                touch(rows[new], noted.clock, live.last_use, live.counts, self._eviction.decay)
