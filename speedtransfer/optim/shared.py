"""One table for all processes of a host: every process reads it, each row is updated by exactly one.

A lookup sends nothing. At the end of backward gradients go to the processes that update their rows, which add them in the
order of the ranks, as in shards; and after a step each waits for all others, so that nobody reads rows being written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.merge import Part, added, keep, unpadded
from speedtransfer.optim.sharded import Sharded
from speedtransfer.optim.shards import Asked, Lookup, ShardLookups
from speedtransfer.ranks import Exchange, Segment
from speedtransfer.rows import OwnRows, Rows


class SharedLookups(ShardLookups):
    """Lookups in rows that are all here: nothing is sent. Gradients alone take routes."""

    def _local(self, places: Tensor) -> Tensor:
        return self.partition.ids(places)

    def refuse(self, training: bool) -> None:
        """Do nothing: the others need not know of a lookup here."""

    def look_up(
        self,
        ids: Tensor,
        training: bool,
        renormalize: Callable[[Tensor, Tensor], None] | None = None,
        asked: Asked | None = None,
    ) -> tuple[Tensor, Lookup | None]:
        """Return the rows `ids` (n,), ``(n, dim)``."""
        if renormalize is not None:
            raise InvalidValueError(
                f"{self._owner} has memory='shared' and max_norm, with which every lookup writes rows that others may be "
                "reading; leave max_norm out, or share the rows out: process_group with another memory"
            )
        return self._rows.read(ids)["weight"], None


class SharedOwners(Sharded):
    """The processes of a host that share one table, each of which updates some rows, as the handle of one sees them."""

    is_shared = True
    lookups_kind = SharedLookups

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Parts of the gradient of this process since the last exchange; whether there was an exchange since the last step.
        self._parts: list[Part] = []
        self._has_met = False

    def share_rows(self) -> None:  # noqa: D102
        rows, partition, exchange = self.handle.rows, self.partition, self.exchange
        # Not methods of this object: the rows would hold what holds them.
        numbers, places = (functools.partial(way, exchange.rank) for way in (partition.ids_of, partition.places_of))
        rows.own = OwnRows(partition.size(exchange.rank), numbers, places, functools.partial(_meet, rows, exchange))

    def is_open(self, at_step: bool = False) -> bool:
        """Tell whether there is an exchange: at the end of each backward, and at a step that none went before."""
        return self.handle.requires_grad and not (at_step and self._has_met and not self._parts)

    def hold(self, part: Part, whole: bool, lookup: Any) -> None:  # noqa: D102
        ids, grad, known = unpadded(part)
        keep(self._parts, (ids, grad.detach().clone(), known), self.handle.table.num_rows, False)

    def has_left(self) -> bool:  # noqa: D102
        return bool(self._parts)

    def forget(self) -> None:  # noqa: D102
        super().forget()
        self._parts = []

    def announce(self) -> list[int]:  # noqa: D102
        self._has_met = True
        return [int(bool(self._parts))]

    def ask(self, numbers: Sequence[int]) -> Tensor | None:  # noqa: D102
        self.lookups.clear()
        if not any(numbers):
            return None
        num_rows = self.handle.table.num_rows
        ids, grad, _ = added(num_rows, self._parts, False) if self._parts else self.no_gradient()
        self._asked, self._order, self._sends = self.lookups.by_owner(ids)
        self._left = {self.lookups.count + 1: grad}
        return self._sends

    def send_ids(self, counts: list[int]) -> Segment:  # noqa: D102
        self._receives = counts
        return Segment(self._asked.unsqueeze(1), self._sends.tolist(), counts)

    def receive_ids(self, ids: Tensor) -> None:  # noqa: D102
        route = self.lookups.routed(self._order, self._sends.tolist(), self._receives, ids[:, 0])
        self.lookups.remember(route, None)

    def send(self, numbers: Sequence[int]) -> list[Segment]:  # noqa: D102
        # Those without a gradient send no rows, and all know.
        return super().send([1] * len(numbers)) if len(self.lookups) else []

    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:  # noqa: D102
        # Before the deposit, whose hooks may step.
        self._parts = []
        if len(self.lookups):
            super().receive([1] * len(numbers), received)
        self.lookups.clear()

    def before_step(self) -> None:
        """Wait until all have read what they want of the rows before this step."""
        super().before_step()
        _meet(self.handle.rows, self.exchange)

    def after_step(self) -> None:
        """Wait until all have written their rows."""
        self._has_met = False
        _meet(self.handle.rows, self.exchange)

    def own_row(self, row: int | None) -> int | None:  # noqa: D102
        return row

    def own_rows(self, start: int, stop: int) -> Tensor:
        """Return some of the rows that this process updates."""
        return self.partition.ids_of(self.exchange.rank, start, stop)

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        at, _ = super().owned(ids)
        return at, ids[at]

    def draw(self, *args: Any) -> None:  # noqa: D102
        _meet(self.handle.rows, self.exchange)
        super().draw(*args)
        _meet(self.handle.rows, self.exchange)

    def change(self, function: Callable[[Tensor], object], start: int = 0, stop: int | None = None) -> None:  # noqa: D102
        _meet(self.handle.rows, self.exchange)
        super().change(function, start, stop)
        _meet(self.handle.rows, self.exchange)

    def load(self, values: Tensor, start: int = 0) -> None:  # noqa: D102
        _meet(self.handle.rows, self.exchange)
        super().load(values, start)
        _meet(self.handle.rows, self.exchange)


def _meet(rows: Rows, exchange: Exchange) -> None:
    """Wait until all processes have written what they had to."""
    rows.table.wait()
    exchange.agree("makes a step", [0])
