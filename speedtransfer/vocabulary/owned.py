"""Bind a vocabulary to the table that it gives the rows of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor
from typing_extensions import Self

from speedtransfer.errors import InvalidValueError
from speedtransfer.rows import Rows
from speedtransfer.vocabulary.changes import ChangeLog
from speedtransfer.vocabulary.device_map import DeviceMap
from speedtransfer.vocabulary.id_rows import IdRows
from speedtransfer.vocabulary.ids import NotedIds, as_ids
from speedtransfer.vocabulary.initial import Initial
from speedtransfer.vocabulary.policies import Admission, Admit, Evict, Eviction

_LEAST_COUNTERS = 4096


class IdOwners:
    """Which processes know the rows of which ids: here this one those of all."""

    # How many share the ids out, and the number of this one.
    processes, rank = 1, 0

    def to_whole(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in the whole table, of all processes, of `rows` (n,) of this one, -1 for -1."""
        return rows

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Tell of each id (n,) whether it is one of this process."""
        return np.ones(len(ids), dtype=bool)

    def together(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, or raise what it raises; of several processes all raise if one does."""
        return call()

    def to_owners(self, ids: np.ndarray, values: Tensor | None = None) -> tuple[np.ndarray, Any]:
        """Return the ids (n,) that this process owns, of those that all have given, and their values ``(n, dim)``."""
        return ids, values

    def to_all(self, ids: np.ndarray, values: Tensor) -> Tensor:
        """Return the values of ids (n,), the same in all processes, of which each gives those that it `owns`.

        Both are ``(n, width)``. Collective.
        """
        return values

    def joined(self, ids: np.ndarray, values: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the ids (n,) of all processes, sorted, of which each gives its own, and their values ``(n, width)``.

        Collective.
        """
        return ids, values

    def from_first(self, values: Tensor) -> Tensor:
        """Return the values that the first process has, in all. Collective."""
        return values

    def sum(self, number: int) -> int:
        """Return the sum of the numbers of all processes."""
        return number

    def gather(self) -> None:
        """Let rank 0 know what all processes know of ids, for state dicts until `release`. Collective."""

    def release(self) -> None:
        """Forget what `gather` has gathered."""

    def tell_sizes(self) -> None:
        """Tell the other processes how many rows this one has by now. Collective."""

    def saved(self) -> dict[str, Tensor]:
        """Return what a state dict has of the ids."""
        return {}


class Owner(Protocol):
    """What has the table that a vocabulary gives rows of: grows it, and says which rows are in use."""

    rows: Rows
    owners: IdOwners

    def grow(self, num_rows: int) -> None:
        """Give the table more rows."""

    def rows_in_use(self) -> np.ndarray | None:
        """Return the rows of which a gradient may come or is pending, some perhaps twice; None: of all."""

    def rows_released(self, rows: np.ndarray) -> None:
        """Note that rows, of which no gradient is to come, have no id any more."""

    def rows_changed(self, rows: np.ndarray) -> None:
        """Forget a pending gradient of one of `rows`, which have other ids now, or none."""


class Owned:
    """What a :class:`~speedtransfer.Vocabulary` is beside its settings: that of a table's handle, which a copy has not."""

    # The settings, which copies and pickles have too.
    capacity_asked: int | None
    max_capacity: int | str | float | None
    admit: Admit
    evict: Evict
    unseen: Literal["initial", "zeros", "row"]
    on_evict: Callable[[Tensor, Tensor], object] | None
    initial: Initial
    seed: int
    half_life: float
    deferred: bool

    @property
    def capacity(self) -> int:
        """Ids that there are rows for now."""
        live, _ = self._bound()
        return len(live.ids) - live.reserved

    @property
    def reserved(self) -> int:
        """Rows at the start of the table that are of no id."""
        return self._bound()[0].reserved

    def reset_stats(self) -> None:
        """Count from zero."""
        if self._map is not None:
            self._map.take_unknown()
        # Admitted, evicted, looked up, unseen.
        self._counts = np.zeros(4, dtype=np.int64)

    @property
    def padding_idx(self) -> int | None:
        """The id of padding."""
        return None if self._live is None else self._live.padding_idx

    def copy(self) -> Self:
        """Return a vocabulary with these settings for another module."""
        made = object.__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made

    def __getstate__(self) -> dict[str, Any]:
        # Without what it has of a module, which pickles and copies the state with the rows.
        return {name: getattr(self, name) for name in Owned.__annotations__ if name[0] != "_"}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)
        self._eviction = Eviction(self.evict, self.half_life)
        # Of the module that uses it: weak, as the handle holds this object.
        self._owner: weakref.ref[Any] | None = None
        self._live: IdRows | None = None
        # Optimizer steps so far.
        self.clock = 0
        # Of whose ids its own are keys (`FeatureKeys`), by number from 1 on; none: they are ids of the module.
        self.features: tuple[str, ...] = ()
        self._map: DeviceMap | None = None
        # Whether a function of the user runs that is told, or asked, of ids to be evicted.
        self._calls_out = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Without rows: the copy of the module gives it those.
        return memo.setdefault(id(self), self.copy())

    def bind(self, owner: Any, padding_idx: int | None) -> None:
        """Give ids the rows of `owner`, a handle whose table has rows beyond the reserved ones; `padding_idx` is an id."""
        self.check_unbound()
        table, padding = owner.rows.table, None if padding_idx is None else int(as_ids([padding_idx]))
        # The module says, if it has any.
        self.features = ()
        self._live = IdRows(table, padding, self._eviction.counts)
        self._live.rebuild()
        self._owner = weakref.ref(owner)
        self._admission = Admission(self.admit, self.seed, max(self.capacity, _LEAST_COUNTERS))
        self.clock = 0
        # Grows whenever ids get rows or lose them; what it was at the last step; by row, what it was when that row changed.
        self.generation = self.generation_of_step = 0
        self._changed_at = np.zeros(table.num_rows, dtype=np.int64)
        # Ids that got a row since the last step, and in recent ones.
        self._admitted_now = self._admitted_lately = 0
        # Which states of which vocabulary this one has, if it only follows another; see `Changes.origin`.
        self._synced: tuple[int, int] | None = None
        self._log = ChangeLog(0)
        # Lookups in training whose new ids the next step admits.
        self._waiting: list[NotedIds] = []
        self.reset_stats()

    def check_unbound(self) -> None:
        """Raise unless a module can use it."""
        if self._owner is not None and self._owner() is not None:
            raise InvalidValueError(
                "this vocabulary belongs to another module, and maps ids to the rows of its table; pass vocabulary.copy()"
            )

    def _bound(self) -> tuple[IdRows, Owner]:
        owner = None if self._owner is None else self._owner()
        if self._live is None or owner is None:
            raise InvalidValueError(
                "this vocabulary has no rows yet, or those of a module that is gone; pass it to a module: "
                "st.Embedding(..., vocabulary=vocabulary)"
            )
        if self._live.torn or len(self._live.ids) < self._live.table.num_rows:
            # Something came into a change of the ids, or of the table.
            with owner.rows.lock:
                self._mend(self._live)
        return self._live, owner

    def _mend(self, live: IdRows) -> None:
        live.follow()
        more = len(live.ids) - len(self._changed_at)
        self._changed_at = np.concatenate([self._changed_at, np.zeros(max(more, 0), dtype=np.int64)])
        if live.torn:
            live.rebuild()

    def follow(self) -> None:
        """See the table as it is now: it has got more rows, or the handle has another one."""
        live, owner = self._bound()
        if live.table is not owner.rows.table:
            moved = IdRows(owner.rows.table, live.padding_idx, self._eviction.counts)
            for name, plane in moved.planes().items():
                plane[: len(live.ids)].copy_(live.planes()[name])
            moved.rebuild()
            self._live = live = moved
        self._mend(live)

    # --- changes of rows ----------------------------------------------------------------------------------------------

    def _note_change(self, rows: np.ndarray) -> None:
        self.generation += 1
        self._changed_at[rows] = self.generation

    def have_changed(self, rows: np.ndarray, generation: int) -> bool:
        """Tell whether one of `rows` (n,) has become that of another id, or of none, since `generation`."""
        return generation != self.generation and bool((self._changed_at[rows] > generation).any())

    def changed_rows(self, generation: int) -> np.ndarray:
        """Return the rows, (n,), that ids got or lost since `generation`."""
        return np.flatnonzero(self._changed_at > generation)
