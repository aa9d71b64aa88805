"""Tables that several processes own: ids go to the owners of their rows, rows come back, gradients go to the owners.

The way of a row: `look_up` sends the ids of a batch to their owners, who read the rows and send them back; backward leaves the
gradient here (`take`), and when it has ended each goes to its owner, who adds those of all processes in the order of the ranks
and deposits the sum as that of one process: optimizers, idle rows and codecs know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.dtypes import rows_at
from speedtransfer.encoding import Codec, Keys, codec_for, decode_rows, encode_rows, write_key
from speedtransfer.errors import InvalidTypeError, ProcessGroupError
from speedtransfer.optim.merge import merged
from speedtransfer.optim.reducers import Reducer
from speedtransfer.ranks import Exchange, Partition, Segment
from speedtransfer.tables import padded_unique, trimmed, unique_rows

# Lookups that a gradient may still come for, and those of them that keep the rows that the owner has read.
_KEPT, _KEPT_ROWS = 48, 4


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


class Lookup:
    """A lookup in training, to whose rows a gradient may come; all processes have made it.

    `read` are the rows as the owner has read them, by plane, at
    version `version` of the table.
    """

    def __init__(self, number: int, route: Route, read: dict[str, Tensor] | None, version: int) -> None:
        self.number, self.route, self.read, self.version = number, route, read, version
        # Whether no gradient has come yet, on any process.
        self.is_open = True


class Shards(Reducer):
    """The shards of other processes, as the handle of one sees them."""

    def __init__(
        self, handle: Any, exchange: Exchange, partition: Partition, comm_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(handle, exchange)
        self.partition, self.comm_dtype = partition, comm_dtype
        # By number; how many there were, and how many before the last step.
        self._lookups: dict[int, Lookup] = {}
        self._count = self._before_step = 0
        self._left: dict[int, Tensor] = {}
        # Steps and other changes, which all processes make.
        self.changes = 0
        # Rows that this process has asked for, and the distinct ones asked of it.
        self.asked_rows = self.served_rows = 0

    def _local(self, places: Tensor) -> Tensor:
        """Return which rows of the table here are at `places`, of this process."""
        return places - self.partition.start(self.exchange.rank)

    def by_owner(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of `ids` (n,) in the order of their owners, this order, and how many each rank has."""
        places, order = self.partition.places(ids).sort()
        return places, order, torch.bincount(places // self.partition.per_rank, minlength=self.exchange.ranks).cpu()

    # --- lookups --------------------------------------------------------------------------------------------------------

    def refuse(self, error: Exception, training: bool) -> None:
        """Tell the others that this process cannot look its ids up, and raise `error`."""
        self.exchange.agree("looks up rows", [-1], self._about(training))
        raise error

    def _about(self, training: bool) -> str:
        return f"{self.so_far} (lookup {self._count}, {'in training' if training else 'without gradients'})"

    def look_up(
        self,
        ids: Tensor,
        training: bool,
        renormalize: Callable[[Tensor, Tensor], None] | None = None,
        asked: Any = None,
    ) -> tuple[Tensor, Lookup | None]:
        """Return the rows `ids` (n,), unique, ``(n, dim)``, and in training what a gradient needs.

        `renormalize` shortens rows of a shard, given their numbers and values. `asked` is what the owners know of them, if
        they were asked before.
        """
        return self.read_by(self._route(ids, training), training, renormalize)

    def read_by(
        self, route: Route, training: bool, renormalize: Callable[[Tensor, Tensor], None] | None
    ) -> tuple[Tensor, Lookup | None]:
        """Return the rows of a route, as `look_up`."""
        read, parts = self.read(route.owned, renormalize)
        segments = [Segment(rows_at(part, route.inverse), route.receives, route.sends) for part in parts.values()]
        rows = self.arranged(route, dict(zip(parts, self.exchange.move("rows", segments), strict=True)))
        return rows, self.remember(route, read) if training else None

    def arranged(self, route: Route, received: dict[str, Tensor]) -> Tensor:
        """Return the rows that owners have sent, ``(n, dim)``, in the order of the ids."""
        values = received.pop("values", None)
        if values is None:
            values = self.handle.rows.decode("weight", received)
        rows = torch.empty_like(values)
        rows[route.order] = values
        return rows

    def read(
        self, owned: Tensor, renormalize: Callable[[Tensor, Tensor], None] | None, ahead: Any = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the rows of this shard that were asked for, by plane, and what to send of them: "values", or as stored."""
        rows = self.handle.rows
        if not (rows.plain or rows.lag or renormalize):
            fetched = rows.fetch(owned, ("weight",)) if ahead is None else ahead.stored(rows)
            fetched = {name: part for name, part in fetched.items() if name.partition(".")[0] == "weight"}
            return rows.finish(dict(fetched), owned), {
                name.removeprefix("weight"): part for name, part in fetched.items()
            }
        if renormalize is not None:
            rows.catch_up(owned)
        read = rows.read(owned) if ahead is None else ahead.rows(rows)
        if renormalize is not None:
            renormalize(owned, read["weight"])
        return read, {"values": read["weight"]}

    def remember(self, route: Route, read: dict[str, Tensor] | None) -> Lookup:
        """Return what the gradient of a lookup needs, which all processes make."""
        self._count += 1
        made = Lookup(self._count, route, read, self.handle.table.version)
        self._lookups[made.number] = made
        old = self._lookups.get(made.number - _KEPT_ROWS)
        if old is not None:
            # The step reads them again.
            old.read = None
        self._lookups.pop(made.number - _KEPT, None)
        return made

    def _route(self, ids: Tensor, training: bool) -> Route:
        """Agree with the others who asks whom for what, and send the ids."""
        places, order, sends = self.by_owner(ids)
        told = check_counts(self.exchange.agree("looks up rows", sends.unsqueeze(1), self._about(training)))
        counts = told[:, 0].tolist()
        (got,) = self.exchange.move("ids", [Segment(places.unsqueeze(1), sends.tolist(), counts)])
        return self.routed(order, sends.tolist(), counts, got[:, 0])

    def routed(self, order: Tensor, sends: list[int], receives: list[int], places: Tensor) -> Route:
        """Return the route of ids: of this process in `order`, of all at `places` here."""
        local = self._local(places)
        if local.is_cuda and len(local):
            groups = trimmed(padded_unique(local, self.handle.table.num_rows))
        else:
            groups = unique_rows(local)
        self.asked_rows += len(order)
        self.served_rows += len(groups.ids)
        return Route(order, sends, receives, groups.ids, groups.inverse.view(-1))

    def to_owners(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Send `values`, ``(n, dim)``, of the rows `ids` (n,) to their owners; return what this process gets, by local row."""
        places, order, sends = self.by_owner(ids)
        counts = self.exchange.agree("writes rows", sends.unsqueeze(1), str(self.handle))[:, 0].tolist()
        pair = Segment(places.unsqueeze(1), sends.tolist(), counts), Segment(values[order], sends.tolist(), counts)
        got, rows = self.exchange.move("rows", pair)
        return self._local(got[:, 0]), rows

    # --- gradients ------------------------------------------------------------------------------------------------------

    def is_open(self, at_step: bool = False) -> bool:  # noqa: D102
        return any(lookup.is_open for lookup in self._lookups.values())

    def take(self, ids: Tensor, grad: Tensor, whole: bool, lookup: Any) -> None:  # noqa: D102
        if lookup is None:
            raise InvalidTypeError(
                f"{self.handle} is owned by {self.exchange.ranks} processes and a gradient was given for rows that were not "
                "looked up; look them up in all processes (emb(ids), emb.activate(ids))"
            )
        if lookup.number not in self._lookups:
            raise ProcessGroupError(
                f"a gradient came to rows of {self.handle} that were looked up more than {_KEPT} lookups or one step ago, "
                "which the processes that own them have forgotten; look up again before each step"
            )
        lookup.is_open = True
        grad = grad.detach()
        before = self._left.get(lookup.number)
        self._left[lookup.number] = grad if before is None else before + grad

    def has_left(self) -> bool:  # noqa: D102
        return bool(self._left)

    def forget(self) -> None:  # noqa: D102
        self._left.clear()

    def announce(self) -> int:  # noqa: D102
        # A bit for each lookup, the lowest for the last.
        return sum(1 << (self._count - number) for number in self._left)

    def _touched(self, numbers: Sequence[int]) -> list[tuple[Lookup, list[int]]]:
        """Return the lookups that gradients have come for, and which ranks have one."""
        found = []
        for number, lookup in self._lookups.items():
            has = [told >> (self._count - number) & 1 for told in numbers]
            if any(has):
                found.append((lookup, has))
        return found

    def send(self, numbers: Sequence[int]) -> list[Segment]:  # noqa: D102
        segments: list[Segment] = []
        for lookup, has in self._touched(numbers):
            route, grad = lookup.route, self._left.get(lookup.number)
            sends = route.sends if grad is not None else [0] * self.exchange.ranks
            receives = [count * some for count, some in zip(route.receives, has, strict=True)]
            if grad is None:
                grad = torch.empty(
                    0, self.handle.table.dim, dtype=self.handle.rows.dtype, device=self.handle.table.device
                )
                order = torch.empty(0, dtype=torch.int64, device=grad.device)
            else:
                order = route.order.to(grad.device)
            # The mean over processes, as of DistributedDataParallel.
            values = grad[order].mul_(1 / self.exchange.ranks)
            segments.extend(Segment(part, sends, receives) for part in self._encoded(values, lookup.number).values())
        return segments

    def _codec(self) -> Codec | None:
        """Return what gradients are encoded by, or None."""
        return (
            None
            if self.comm_dtype is None
            else codec_for(self.handle.table.dim, self.handle.rows.dtype, self.comm_dtype)
        )

    def _encoded(self, values: Tensor, number: int) -> dict[str, Tensor]:
        """Encode gradients as `comm_dtype`, rounded stochastically: their mean over steps is that of the gradients."""
        codec = self._codec()
        if codec is None:
            return {"": values}
        key = write_key(self.handle.rows.seed, number, f"gradient from rank {self.exchange.rank}")
        return encode_rows(codec, values, Keys(key, torch.arange(len(values), device=values.device)))

    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:  # noqa: D102
        parts, handle, codec = iter(received), self.handle, self._codec()
        names = [""] if codec is None else list(codec.parts)
        touched = self._touched(numbers)
        self._left.clear()
        found: list[Any] = []
        for lookup, has in touched:
            got = {name: next(parts) for name in names}
            grads = got[""] if codec is None else decode_rows(codec, got)
            kept, total = _summed(lookup.route, has, grads)
            read, owned = lookup.read, lookup.route.owned
            lookup.is_open = False
            if len(kept) < len(owned):
                owned = owned[kept]
                read = None if read is None else {name: values[kept] for name, values in read.items()}
            rest = {} if read is None else {name: values for name, values in read.items() if name != "weight"}
            rows = None if read is None else read["weight"]
            found.append((owned, total, rows, -1 if read is None else lookup.version, rest))
            # The step updates these rows where they are.
            lookup.read = None
        if len(found) > 1 and handle.has_hooks():
            # They see all of the gradient, once.
            pair = found[0][:2]
            for each in found[1:]:
                pair = merged(handle.table.num_rows, pair, each[:2], handle.table.takes_padding)[:2]
            found = [(*pair, None, -1, {})]
        for each in found:
            handle.deposit(*each, summed=True)

    def before_step(self) -> None:  # noqa: D102
        for lookup in self._lookups.values():
            lookup.is_open = False

    def after_step(self) -> None:  # noqa: D102
        self.changes += 1
        self._lookups = {number: lookup for number, lookup in self._lookups.items() if number > self._before_step}
        self._before_step = self._count


def check_counts(counts: Tensor) -> Tensor:
    """Return `counts`, ``(ranks, n)``; raise if those of a rank are negative, which could not look its ids up."""
    if bool((counts < 0).any()):
        rank = int((counts < 0).any(1).int().argmax())
        raise ProcessGroupError(f"rank {rank} refused its ids (its own message says why), so no process looked any up")
    return counts


def _summed(route: Route, has: Sequence[int], grads: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of `route.owned` have a gradient, and its sums, added in the order of the ranks: always the same bits."""
    total = grads.new_zeros(len(route.owned), grads.shape[1])
    touched = torch.zeros(len(route.owned), dtype=torch.bool, device=grads.device)
    start = begin = 0
    for count, some in zip(route.receives, has, strict=True):
        if some:
            rows = route.inverse[start : start + count]
            total.index_add_(0, rows, grads[begin : begin + count])
            touched[rows] = True
            begin += count
        start += count
    if all(has):
        return torch.arange(len(total), device=grads.device), total
    kept = touched.nonzero().flatten()
    return kept, total[kept]
