"""Lookups in tables that several processes own: ids go to the owners of their rows, and rows come back.

`ShardLookups.look_up` sends the ids of a batch to their owners, who read the rows and send them back, and remembers the way
that they took: gradients take it later (`optim.sharded`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.dtypes import rows_at
from speedtransfer.ranks import Exchange, Partition, Segment, to_words
from speedtransfer.tables import padded_unique, trimmed, unique_rows

# Lookups that a gradient may still come for, and those of them that keep the rows that the owner has read.
KEPT, _KEPT_ROWS = 256, 4


class Route(NamedTuple):
    """Which rows this process asks others for, and which are asked of it."""

    # Of the ids of the lookup, sorted by owner.
    order: Tensor
    # How many ids this process asks each rank for, and how many each rank asks it for.
    sends: list[int]
    receives: list[int]
    # The rows of the shard that are asked for, by any rank, sorted and unique; where each id received is among them.
    owned: Tensor
    inverse: Tensor


class Asked(NamedTuple):
    """Ids that owners have been asked for, and found rows for."""

    # In the whole table, the row of each distinct id here, sorted by owner.
    rows: np.ndarray
    # How many this process has asked each rank for, and how many each has asked it for.
    sends: list[int]
    receives: list[int]
    # The rows here that it was asked for.
    local: np.ndarray


class Lookup:
    """A lookup in training, to whose rows a gradient may come; all processes have made it.

    `read` are the rows as the owner has read them, by plane, at version `version` of the table.
    """

    def __init__(self, number: int, route: Route, read: dict[str, Tensor] | None, version: int) -> None:
        self.number, self.route, self.read, self.version = number, route, read, version
        # Whether no gradient has come yet, on any process; how many ids of a vocabulary it could not admit here.
        self.is_open, self.missed = True, 0


class ShardLookups:
    """The lookups in the rows that several processes own, of all of them, as one process sees them.

    Parameters
    ----------
    handle : Handle
        Not kept alive.
    exchange : Exchange
    partition : Partition
    """

    def __init__(self, handle: Any, exchange: Exchange, partition: Partition) -> None:
        self._handle, self.exchange, self.partition = weakref.ref(handle), exchange, partition
        # By number; how many there were, and how many before the last step.
        self._lookups: dict[int, Lookup] = {}
        self.count = self._before_step = 0
        # Lookups that a gradient has come for, of any process, since the last step.
        self._answered = set[int]()
        # By number, rows in graphs of this process whose gradient has not come; the lookups that any process waits for
        # gradients of, as they have told when there were so many: a bit for each, the lowest for the last.
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._told_at = self._told = 0
        # Rows that this process has asked for, and the distinct ones asked of it.
        self.asked_rows = self.served_rows = 0

    @property
    def _rows(self) -> Any:
        return self._owner.rows

    @property
    def _owner(self) -> Any:
        handle = self._handle()
        assert handle is not None
        return handle

    def __len__(self) -> int:
        return len(self._lookups)

    def __contains__(self, lookup: Lookup) -> bool:
        return lookup.number in self._lookups

    def __iter__(self) -> Iterator[Lookup]:
        return iter(self._lookups.values())

    def _local(self, places: Tensor) -> Tensor:
        """Return which rows of the table here are at `places`, of this process."""
        return places - self.partition.start(self.exchange.rank)

    def by_owner(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of `ids` (n,) in the order of their owners, this order, and how many each rank has."""
        places, order = self.partition.places(ids).sort()
        return places, order, torch.bincount(self.partition.owners(places), minlength=self.exchange.ranks).cpu()

    def refuse(self, training: bool) -> None:
        """Tell the others that this process cannot look its ids up."""
        none = torch.full((self.exchange.ranks, 1), -1, device="cpu")
        self.exchange.tell_counts("looks up rows", none, 0, self._about(training))

    def _about(self, training: bool) -> str:
        return f"{self._owner.owners.looked_up} ({'in training' if training else 'without gradients'})"

    def look_up(
        self,
        ids: Tensor,
        training: bool,
        renormalize: Callable[[Tensor, Tensor], None] | None = None,
        asked: Asked | None = None,
    ) -> tuple[Tensor, Lookup | None]:
        """Return the rows `ids` (n,), unique, ``(n, dim)``, and in training what a gradient needs.

        `renormalize` shortens rows of a shard, given their numbers and values. `asked` is what the owners know of them, if
        they were asked before.
        """
        route = self._route(ids, training) if asked is None else self._route_of_asked(ids, asked)
        read, parts = self.read(route.owned, renormalize)
        segments = [Segment(rows_at(part, route.inverse), route.receives, route.sends) for part in parts.values()]
        rows = self.arranged(route, dict(zip(parts, self.exchange.move("rows", segments), strict=True)))
        return rows, self.remember(route, read) if training else None

    def _route_of_asked(self, ids: Tensor, asked: Asked) -> Route:
        device = ids.device
        # Where there are ids without a row, several ask for the same.
        order = torch.searchsorted(ids, to_device(torch.from_numpy(asked.rows), device))
        places = to_device(torch.from_numpy(asked.local), device) + self.partition.start(self.exchange.rank)
        return self.routed(order, asked.sends, asked.receives, places)

    def arranged(self, route: Route, received: dict[str, Tensor]) -> Tensor:
        """Return the rows that owners have sent, ``(n, dim)``, in the order of the ids."""
        values = received.pop("values", None)
        if values is None:
            values = self._rows.decode("weight", received)
        rows = torch.empty_like(values)
        rows[route.order] = values
        return rows

    def read(
        self, owned: Tensor, renormalize: Callable[[Tensor, Tensor], None] | None, ahead: Any = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the rows of this shard that were asked for, by plane, and what to send of them: "values", or as stored."""
        rows = self._rows
        if not (rows.plain or rows.lag or renormalize):
            fetched = rows.fetch(owned, ("weight",)) if ahead is None else ahead.stored(rows)
            fetched = {name: part for name, part in fetched.items() if name.partition(".")[0] == "weight"}
            parts = {name.removeprefix("weight"): part for name, part in fetched.items()}
            return rows.finish(dict(fetched), owned), parts
        if renormalize is not None:
            rows.catch_up(owned)
        read = rows.read(owned) if ahead is None else ahead.rows(rows)
        if renormalize is not None:
            renormalize(owned, read["weight"])
        return read, {"values": read["weight"]}

    def remember(self, route: Route, read: dict[str, Tensor] | None) -> Lookup:
        """Return what the gradient of a lookup needs, which all processes make."""
        self.count += 1
        made = Lookup(self.count, route, read, self._rows.table.version)
        self._lookups[made.number] = made
        old = self._lookups.get(made.number - _KEPT_ROWS)
        if old is not None:
            # The step reads them again.
            old.read = None
        self._lookups.pop(made.number - KEPT, None)
        return made

    def _route(self, ids: Tensor, training: bool) -> Route:
        """Agree with the others who asks whom for what, and send the ids."""
        places, order, sends = self.by_owner(ids)
        found = None
        while found is None:
            # Where others have asked for rows of other tables, too, they do as this process does.
            found = self.agree_on_counts(sends.unsqueeze(1), training)
        (counts,) = found
        (got,) = self.exchange.move("ids", [Segment(places.unsqueeze(1), sends.tolist(), counts)])
        return self.routed(order, sends.tolist(), counts, got[:, 0])

    def agree_on_counts(self, sends: Tensor, training: bool, named: int = 0) -> list[list[int]] | None:
        """Return for this table, and those that are asked for together with it, what `Exchange.agree_on_counts` does."""
        return self.exchange.agree_on_counts("looks up rows", sends, named, self._about(training))

    def routed(self, order: Tensor, sends: list[int], receives: list[int], places: Tensor) -> Route:
        """Return the route of ids: of this process in `order`, of all at `places` here."""
        local = self._local(places)
        if local.is_cuda and len(local):
            groups = trimmed(padded_unique(local, self._rows.table.num_rows))
        else:
            groups = unique_rows(local)
        self.asked_rows += len(order)
        self.served_rows += len(groups.ids)
        return Route(order, sends, receives, groups.ids, groups.inverse.view(-1))

    def to_owners(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Send `values`, ``(n, dim)``, of the rows `ids` (n,) to their owners; return what this process gets, by local row."""
        places, order, sends = self.by_owner(ids)
        counts = self.exchange.agree("writes rows", sends.unsqueeze(1), str(self._owner))[:, 0].tolist()
        pair = Segment(places.unsqueeze(1), sends.tolist(), counts), Segment(values[order], sends.tolist(), counts)
        got, rows = self.exchange.move("rows", pair)
        return self._local(got[:, 0]), rows

    # --- gradients --------------------------------------------------------------------------------------------------------

    def announce(self, numbers: Iterable[int]) -> list[int]:
        """Return a bit for each of some lookups, the lowest for the last, as words, of which all processes have as many."""
        bits = sum(1 << (self.count - number) for number in numbers)
        return to_words(bits, self.count + 1 - min(self._lookups, default=self.count))

    def touched(self, announced: Sequence[int]) -> list[tuple[Lookup, list[int]]]:
        """Return the lookups that gradients come for, and which ranks, who have `announced` theirs, have one."""
        found = []
        for number, lookup in self._lookups.items():
            has = [told >> (self.count - number) & 1 for told in announced]
            if any(has):
                found.append((lookup, has))
        return found

    def hold(self, rows: Tensor) -> None:
        """Let the rows of the last lookup, which a graph has as `rows`, stay those of their ids until their gradient comes."""
        self._held[self.count] = weakref.ref(rows)

    def release(self, lookup: Lookup, is_answered: bool = False) -> None:
        """Note that the gradient of a lookup has come: from here, or, if `is_answered`, from any process."""
        if is_answered:
            self._answered.add(lookup.number)
        else:
            self._held.pop(lookup.number, None)

    def waiting(self) -> list[int]:
        """Return which lookups this process waits for gradients of, as `announce`."""
        self._held = {n: rows for n, rows in self._held.items() if rows() is not None and n in self._lookups}
        return self.announce(self._held)

    def note_waiting(self, told: Iterable[int]) -> None:
        """Take note of the lookups that each process waits for gradients of."""
        self._told_at, self._told = self.count, functools.reduce(operator.or_, told)

    def rows_asked(self) -> list[Tensor]:
        """Return the rows here of lookups that a gradient may come for, of any process."""
        return [
            lookup.route.owned
            for number, lookup in self._lookups.items()
            if number > self._told_at or self._told >> (self._told_at - number) & 1
        ]

    def clear(self) -> None:
        """Forget all."""
        self._lookups.clear()

    def before_step(self) -> None:
        """Note that gradients of the lookups so far have come."""
        for lookup in self:
            lookup.is_open = False

    def after_step(self, forget_answered: bool) -> None:
        """Forget the lookups before the last step but one; `forget_answered`: those that gradients have come for, too."""
        gone = self._answered if forget_answered else ()
        self._lookups = {n: each for n, each in self._lookups.items() if n > self._before_step and n not in gone}
        self._before_step = self.count
        self._answered.clear()
