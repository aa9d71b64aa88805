"""Give ids rows of the table: free ones, new ones or those of other ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.device_map import DeviceMap, fill_unseen
from speedtransfer.vocabulary.id_index import first_unknown
from speedtransfer.vocabulary.id_rows import FREE, UNSEEN_ROW
from speedtransfer.vocabulary.ids import FeatureKeys, NotedIds
from speedtransfer.vocabulary.initial import initial_values
from speedtransfer.vocabulary.owned import Owned
from speedtransfer.vocabulary.policies import most_rows

# A table that is full grows by this factor, as far as it may.
_GROWTH = 1.5
# Lookups in training that wait for a step; where there are more their ids are admitted without one.
_MOST_WAITING = 256
# Rows that are looked at after each step for ids whose time is over.
_SWEPT_ROWS = 4096


class Room(Owned):
    """The part of a :class:`~speedtransfer.Vocabulary` that gives ids rows, and takes them back."""

    # --- lookups ------------------------------------------------------------------------------------------------------

    def find(self, ids: np.ndarray, admit: bool = False) -> np.ndarray:
        """Return the row of each id (n,) int64, -1 where it has none; with `admit` after new ones were admitted.

        All count as used now then; else nothing changes. HostMemoryError: an id is to be admitted, but there is no row for it,
        and none may be taken from another; nothing changes.
        """
        live, owner = self._bound()
        with owner.rows.lock:
            if admit:
                live.table.check_writable()
            rows = live.index.find(ids)
            if admit:
                if len(rows) and rows.min() < 0:
                    self._admit(ids, rows)
                live.touch(rows, self.clock, self._eviction.decay)
            elif not live.table.writable:
                # The process that this one was forked from may have given rows to other ids since.
                rows[(rows >= live.reserved) & (live.ids[rows] != ids)] = -1
            self._counts[2:] += [len(rows), int(np.count_nonzero(rows < 0))]
        return rows

    def initial_values(self, ids: np.ndarray, dim: int, dtype: torch.dtype) -> Tensor:
        """Return what rows of ids (n,) int64 begin with, ``(n, dim)`` on the CPU."""
        return initial_values(ids, dim, self.seed, self.initial, dtype)

    @torch.no_grad()
    def weights_of(self, rows: np.ndarray) -> Tensor:
        """Return the weights of `rows` (n,), caught up, ``(n, dim)`` on the CPU."""
        _, owner = self._bound()
        table, dtype = owner.rows.table, owner.rows.dtype
        with torch.inference_mode(False):
            values = torch.empty(len(rows), table.dim, dtype=dtype, device="cpu")
            for part in row_chunks(len(rows), table.dim * dtype.itemsize):
                chunk = torch.from_numpy(rows[part]).to(table.device)
                values[part] = owner.rows.read(chunk)["weight"].to("cpu")
        return values

    def features_of(self, rows: Tensor) -> Tensor:
        """Return the number of the feature of each of `rows` (n,) of this process, on their device; 0: of none."""
        live, _ = self._bound()
        # Padding of rows on a device names none.
        ids = live.ids[np.minimum(rows.cpu().numpy(), len(live.ids) - 1)]
        return FeatureKeys(len(self.features)).split(torch.from_numpy(ids))[0].to(rows.device)

    def _admit(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Give the unknown ones among `ids` (n,) rows, if they are admitted, and write these to `rows` (n,)."""
        unknown, counts, positions, numbers = first_unknown(ids, rows)
        chosen = self._admission.choose(unknown, counts)
        if not chosen.any():
            return
        live, owner = self._bound()
        new = unknown[chosen]
        # First: if these cannot be made nothing has changed.
        weights = to_device(self.initial_values(new, live.table.dim, owner.rows.dtype), live.table.device)
        self._make_room(len(new), rows)
        self._synced = None
        with live.changing():
            given = live.take(len(new))
            self._begin(new, given, weights)
        row_of = np.full(len(unknown), -1, dtype=np.int64)
        row_of[chosen] = given
        rows[positions] = row_of[numbers]

    def _begin(self, ids: np.ndarray, rows: np.ndarray, weights: Tensor) -> None:
        """Let `rows` (n,), which were free, be those of `ids` (n,), distinct and unknown, with `weights`, ``(n, dim)``."""
        live, owner = self._bound()
        # First: the last step of a row is one of its feature. The rows are still free.
        live.ids[rows] = ids
        owner.rows.reset(to_device(torch.from_numpy(rows), live.table.device), weights)
        # Noted before: after an interrupt more may be noted than has changed.
        self._note_change(rows)
        live.assign(ids, rows, self.clock)
        self._counts[0] += len(ids)
        self._admitted_now += len(ids)

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

        With `on_device` ids on a CUDA device are found there, if it has the memory, so that the host does not wait, and the
        row of each is returned too, `UNSEEN_ROW` where it has none. It may raise what `settle` does, of a lookup so long ago
        that no more of them wait for a step.
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

        HostMemoryError: there is no row for an id that is to be admitted, which is not, and none may be taken from another.
        """
        if not self._waiting:
            return
        live, owner = self._bound()
        with owner.rows.lock:
            live.table.check_writable()
            waiting, self._waiting = self._waiting, []
            found = [self.noted_rows(noted) for noted in waiting]
            # Those used in this step stay, of whichever lookup.
            for noted, rows in zip(waiting, found, strict=True):
                live.touch(rows, noted.clock, self._eviction.decay)
            for noted, before in zip(waiting, found, strict=True):
                new = np.flatnonzero(before < 0)
                if not len(new):
                    continue
                rows = before.copy()
                rows[new] = live.index.find(noted.ids[new])
                self._admit(noted.ids, rows)
                live.touch(rows[new], noted.clock, self._eviction.decay)

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, count: int, keep: np.ndarray) -> None:
        """Have `count` free rows, some taken from ids but not `keep` (-1 aside), or raise before anything changes."""
        live, owner = self._bound()
        self._check_not_calling_out()
        live.index.reserve(len(live.index) + max(count, 0))
        if count > live.num_free:
            self._grow(count - live.num_free)
        lack = count - live.num_free
        if lack > 0:
            in_use = owner.rows_in_use()
            victims = np.empty(0, dtype=np.int64)
            if in_use is not None and self.evict is not None:
                victims = self._victims(lack, (in_use, keep[keep >= 0]))
            if len(victims) < lack:
                raise HostMemoryError(self._why_full(count, lack - len(victims), in_use))
            self._take_from_ids(victims)

    def _most(self) -> int | None:
        """Return the number of ids that there may be rows for; None: as the memory allows."""
        live, owner = self._bound()
        ranks, num_rows = owner.owners.processes, live.table.num_rows
        # With all its planes, as they are now.
        most = most_rows(self.max_capacity, ranks, num_rows, live.reserved, live.table.nbytes // max(num_rows, 1))
        return None if most is None else most - live.reserved

    def _grow(self, lack: int) -> None:
        """Give the table `lack` rows more, or more than that, if it may have as many; fewer where it may not."""
        live, owner = self._bound()
        most = self._most()
        wanted = max(self.capacity + lack, int(self.capacity * _GROWTH))
        wanted = wanted if most is None else min(wanted, most)
        if wanted <= self.capacity:
            return
        try:
            owner.grow(live.reserved + wanted)
        except (HostMemoryError, StorageError) as error:
            if self.evict is None:
                raise
            warnings.warn(f"the table cannot grow, so that rows are taken from ids: {error}", stacklevel=2)
            self.max_capacity = self.capacity

    def _why_full(self, count: int, lack: int, in_use: np.ndarray | None) -> str:
        about = f"{self._bound()[1]}: {count} new ids need rows, but all {self.capacity} have ids"
        if self.evict is None:
            why = "evict is None; pass a larger max_capacity, or evict='lru' for rows of ids used long ago"
        elif in_use is None:
            why = "a gradient of all rows (a use of the whole weight) is to come or pending; step and zero_grad first"
        else:
            why = (
                f"evict={self.evict!r} found {lack} rows too few to evict, as rows of batches whose optimizer step has not "
                "run stay; pass a larger max_capacity, or call optimizer.step() and zero_grad() more often"
            )
        return f"{about}, and {why}"

    def _take_from_ids(self, rows: np.ndarray, archive: bool = True) -> None:
        """Let `rows` (n,) have no id any more; with `archive` after `on_evict` got them."""
        live, owner = self._bound()
        if not len(rows):
            return
        live.table.check_writable()
        self._check_not_calling_out()
        ids = live.ids[rows].copy()
        if archive and self.on_evict is not None:
            with torch.no_grad(), torch.inference_mode(False), self._calling_out():
                weights = owner.rows.read(torch.from_numpy(rows).to(live.table.device))["weight"]
                self.on_evict(torch.from_numpy(ids.copy()), weights)
        # Noted before: after an interrupt more may be noted than has changed.
        self._note_change(rows)
        self._log.add(ids, self.clock, self.capacity)
        owner.rows_released(rows)
        with live.changing():
            live.release(rows)
        self._counts[1] += len(rows)

    def _victims(self, count: int, in_use: Sequence[np.ndarray], once: bool = False) -> np.ndarray:
        with self._calling_out():
            return self._bound()[0].victims(count, self._eviction, self.clock, in_use, once)

    @contextmanager
    def _calling_out(self) -> Iterator[None]:
        try:
            self._calls_out = True
            yield
        finally:
            self._calls_out = False

    def _check_not_calling_out(self) -> None:
        if self._calls_out:
            raise InvalidValueError(
                f"{self._bound()[1]}: ids are admitted, evicted or forgotten within on_evict or evict, which are called while "
                "ids are evicted; keep what is to be done, and do it after the lookup or the step"
            )

    # --- steps --------------------------------------------------------------------------------------------------------

    def note_written(self, rows: np.ndarray) -> None:
        """Note that `rows` (n,) were written to without a use: a lookup in evaluation rescales them (`max_norm`)."""
        if (self._bound()[0].last_use[rows] < self.clock).any():
            self.all_rows_changed()

    def all_rows_changed(self) -> None:
        """Note that rows may have changed of which no lookup tells."""
        self._log.begins = self.clock + 1

    def count_step(self, late: np.ndarray | None = None) -> None:
        """Note a step of the optimizer, of the rows `late` (n,) if some may not have been looked up since the last one."""
        live, owner = self._bound()
        with owner.rows.lock:
            if late is not None:
                late = late[(late >= live.reserved) & (late < len(live.last_use))]
                late = late[(live.last_use[late] != FREE) & (live.last_use[late] < self.clock)]
                live.touch(late, self.clock, self._eviction.decay, uses=0.0)
            self.clock += 1
            live.index.go_on()
            self.generation_of_step = self.generation
            owner.rows.placement, self._synced = None, None

    def evict_after_step(self) -> None:
        """Take rows from ids whose time is over, or as many as new ids may need next."""
        live, owner = self._bound()
        with owner.rows.lock:
            lately = max(self._admitted_now, self._admitted_lately // 2)
            self._admitted_now, self._admitted_lately = 0, lately
            if self.evict is None:
                return
            most = self._most()
            # Ids that are deferred need no rows before the next step, which takes them itself.
            full = most is not None and self.capacity >= most and not self.deferred
            lack = lately - live.num_free if full else 0
            if self._eviction.lifetime is not None:
                lack = _SWEPT_ROWS
            in_use = owner.rows_in_use() if lack > 0 else None
            if in_use is not None:
                self._take_from_ids(self._victims(lack, (in_use,), once=True))
