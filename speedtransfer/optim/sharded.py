"""Tables that several processes own: the table of each has its rows, and the parameter stands for all.

The way of a row: a lookup sends the ids of a batch to the owners of their rows (`optim.shards`), who read them and send them
back; backward leaves the gradient here (`hold`), and when it has ended each goes to its owner, who adds those of all processes
in the order of the ranks and deposits the sum as that of one process: optimizers, idle rows and codecs know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedtransfer.dtypes import bits_of
from speedtransfer.encoding import Codec, Keys, codec_for, decode_rows, encode_rows, write_key
from speedtransfer.errors import InvalidTypeError, InvalidValueError, ProcessGroupError, RowIndexError
from speedtransfer.optim.merge import Part, added
from speedtransfer.optim.owners import Owners
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.shard_gradient import ShardGradient
from speedtransfer.optim.shards import KEPT, Route, ShardLookups
from speedtransfer.ranks import Exchange, Partition, Segment
from speedtransfer.tables import NOTHING, row_chunks
from speedtransfer.vocabulary.initial import initial_values

# Values that all processes draw, half a second, so that they are those of one.
_DRAWN_BY_ALL = 1 << 26


class Sharded(Owners):
    """The processes that own the rows of a table, each some, as the handle of one sees them.

    Parameters
    ----------
    handle : Handle
        Of the rows of this process, in the order of `partition`.
    exchange : Exchange
        To the other owners.
    partition : Partition
    comm_dtype : torch.dtype, optional
        What gradients are sent as.
    """

    is_alone = has_whole = shows_sparse = False
    holds = True
    # Whether rows have in each process the numbers that they have in the whole table.
    is_shared: ClassVar[bool] = False
    lookups_kind: ClassVar[type[ShardLookups]] = ShardLookups
    partition: Partition

    def __init__(
        self, handle: Any, exchange: Exchange, partition: Partition, comm_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(handle, exchange)
        self.partition, self.comm_dtype = partition, comm_dtype
        self.lookups = self.lookups_kind(handle, exchange, partition)
        # By the number of their lookup, gradients for the next exchange.
        self._left: dict[int, Tensor] = {}
        self.share_rows()

    @property
    def so_far(self) -> str:  # noqa: D102
        # Rows may have been loaded in some processes alone.
        return f"{super().so_far}, {self.changes} changes of its rows"

    @property
    def looked_up(self) -> str:  # noqa: D102
        # Rows that were asked for ahead are taken without a message.
        return f"{self.so_far} and {self.lookups.count} lookups"

    def check_rows(self, rows: Tensor) -> None:
        """Raise for one of `rows` (n,), within the whole table, that its process does not have."""
        missing = self.partition.first_missing(rows)
        if missing is not None:
            owner = missing % self.partition.ranks
            raise RowIndexError(
                f"{self.handle}: row {missing} is one of rank {owner}, which has {self.partition.size(owner)} rows so far; "
                "pass rows that ids have (vocabulary.rows)"
            )

    # --- gradients ------------------------------------------------------------------------------------------------------

    def is_open(self, at_step: bool = False) -> bool:  # noqa: D102
        return any(lookup.is_open for lookup in self.lookups)

    def hold(self, part: Part, whole: bool, lookup: Any) -> None:  # noqa: D102
        if lookup is None:
            raise InvalidTypeError(
                f"{self.handle} is owned by {self.exchange.ranks} processes and a gradient was given for rows that were not "
                "looked up; look them up in all processes (emb(ids), emb.activate(ids))"
            )
        if lookup not in self.lookups:
            raise ProcessGroupError(
                f"a gradient came to rows of {self.handle} that were looked up more than {KEPT} lookups or one step ago, "
                "which the processes that own them have forgotten; look up again before each step"
            )
        lookup.is_open = True
        grad = part[1].detach()
        before = self._left.get(lookup.number)
        self._left[lookup.number] = grad if before is None else before + grad
        self.lookups.release(lookup)

    def has_left(self) -> bool:  # noqa: D102
        return bool(self._left)

    def forget(self) -> None:  # noqa: D102
        self._left.clear()

    def announce(self) -> list[int]:  # noqa: D102
        return self.lookups.announce(self._left)

    def send(self, numbers: Sequence[int]) -> list[Segment]:  # noqa: D102
        segments: list[Segment] = []
        for lookup, has in self.lookups.touched(numbers):
            route, grad = lookup.route, self._left.get(lookup.number)
            receives = [count * some for count, some in zip(route.receives, has, strict=True)]
            if grad is None:
                sends, (order, grad, _) = [0] * self.exchange.ranks, self.no_gradient()
            else:
                sends, order = route.sends, route.order.to(grad.device)
            values = grad[order]
            if not self.is_adaptive:
                # The mean over processes, as of DistributedDataParallel.
                values.mul_(1 / self.exchange.ranks)
            segments.extend(Segment(part, sends, receives) for part in self._encoded(values, lookup.number).values())
        return segments

    def _codec(self) -> Codec | None:
        """Return what gradients are encoded by, or None."""
        handle, comm_dtype = self.handle, self.comm_dtype
        return None if comm_dtype is None else codec_for(handle.table.dim, handle.rows.dtype, comm_dtype)

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
        touched = self.lookups.touched(numbers)
        for lookup, _ in touched:
            self.lookups.release(lookup, is_answered=True)
        self._left.clear()
        found: list[Any] = []
        for lookup, has in touched:
            got = {name: next(parts) for name in names}
            grads = got[""] if codec is None else decode_rows(codec, got)
            kept, total = _summed(lookup.route, has, grads, self.is_adaptive)
            read, owned = dict(lookup.read or {}), lookup.route.owned
            lookup.is_open = False
            if len(kept) < len(owned):
                owned, read = owned[kept], {name: values[kept] for name, values in read.items()}
            found.append((owned, total, NOTHING, read.pop("weight", None), lookup.version, read))
            # The step updates these rows where they are.
            lookup.read = None
        table = handle.table
        if len(found) > 1 and (handle.has_hooks() or table.device.type == "cpu"):
            # Hooks see all of the gradient, once.
            found = [(*added(table.num_rows, [each[:3] for each in found], table.takes_padding), None, -1, {})]
        for each in found:
            handle.pending.deposit(*each, summed=True)

    def row_gradient(  # noqa: D102
        self, num_rows: int, part: Part, changed: Callable[..., None] | None, sparse: bool
    ) -> RowGradient:
        return ShardGradient.of(num_rows, part, changed, self.exchange)

    def check_gradient(self, grad: Tensor) -> None:
        """Raise unless it was made of that of the weight: the rows of another are those of all."""
        if not isinstance(grad, ShardGradient):
            self.check_whole(
                "is assigned a gradient",
                "change weight.grad in place, or give gradients of rows: activate(ids).add_grad",
            )

    def before_step(self) -> None:  # noqa: D102
        self.lookups.before_step()

    def after_step(self) -> None:  # noqa: D102
        self.changes += 1
        # Rows may go to other ids now, so that no second gradient can come for them.
        self.lookups.after_step(forget_answered=self.handle.id_space.come_and_go)

    # --- all rows ---------------------------------------------------------------------------------------------------------

    def share_rows(self) -> None:  # noqa: D102
        partition, first = self.partition, self.partition.start(self.exchange.rank)
        # Rounding draws by row: by the number that it has in every process.
        self.handle.rows.name_rows = lambda ids: partition.ids(ids + first)

    def own_row(self, row: int | None) -> int | None:  # noqa: D102
        local = None if row is None else self.owned(torch.tensor([row], device="cpu"))[1].tolist()
        return local[0] if local else None

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        rank = self.exchange.rank
        local = self.partition.places_of(rank, ids)
        at = ((local >= 0) & (local < self.partition.size(rank))).nonzero().flatten()
        return at, local[at]

    def to_all(self, ids: Tensor, values: Tensor) -> Tensor:  # noqa: D102
        return of_owners(self.exchange, self.partition.owners(self.partition.places(ids)), values)

    def own_rows(self, start: int, stop: int) -> Tensor:
        """Return some of the rows of the table here that this process updates: all are, and are numbered from 0."""
        return torch.arange(start, stop, device="cpu")

    @torch.no_grad()
    def draw(
        self,
        function: Callable[[Tensor], object],
        start: int = 0,
        stop: int | None = None,
        kind: tuple[str, float, float] | None = None,
    ) -> None:
        """Have `function` fill the rows from `start` to `stop` of the whole table, and keep those of this process.

        Every process draws the numbers of all, so that they are those of one process with the same seed. Of more than
        `_DRAWN_BY_ALL` values, of a `kind` of initial values, each draws its own, by the numbers of their rows.
        """
        rows, dim = self._writable_rows("drawn anew"), self.handle.table.dim
        stop, dtype = self.partition.num_rows if stop is None else stop, rows.dtype
        if kind is not None and (stop - start) * dim > _DRAWN_BY_ALL:
            seed = int(torch.randint(2**63 - 1, (1,), device="cpu"))
            for ids, numbers in self._own_parts(start, stop):
                rows.put("weight", ids, initial_values(numbers.numpy(), dim, seed, kind, rows.dtype))
            return
        for part in row_chunks(stop - start, dim * dtype.itemsize):
            values = torch.empty(part.stop - part.start, dim, dtype=dtype, device="cpu")
            function(values)
            self._keep(torch.arange(start + part.start, start + part.stop, device="cpu"), values)

    @torch.no_grad()
    def change(self, function: Callable[[Tensor], object], start: int = 0, stop: int | None = None) -> None:
        """Have `function` change every value, each by itself, in the rows from `start` to `stop` of the whole table."""
        rows, table = self._writable_rows("changed as a whole"), self.handle.table
        for ids, _ in self._own_parts(start, stop):
            values = rows.read(ids.to(table.device))["weight"]
            function(values)
            rows.put("weight", ids, values)

    def _own_parts(self, start: int, stop: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield in chunks the rows here, and their numbers in the whole table, where they are from `start` to `stop`."""
        self.changes += 1
        row_bytes = self.handle.table.dim * self.handle.rows.dtype.itemsize
        for part in row_chunks(self.partition.size(self.exchange.rank), row_bytes):
            ids = self.own_rows(part.start, part.stop)
            numbers = self.handle.named_rows(ids)
            if start or stop is not None:
                within = (numbers >= start) & (numbers < (self.partition.num_rows if stop is None else stop))
                ids, numbers = ids[within], numbers[within]
            yield ids, numbers

    def _writable_rows(self, what: str) -> Any:
        self.handle.id_space.check_written(what)
        self.handle.rows.catch_up()
        return self.handle.rows

    def _keep(self, ids: Tensor, values: Tensor) -> None:
        self.changes += 1
        at, local = self.owned(ids.cpu())
        self.handle.rows.put("weight", local, values[at.to(values.device)])

    def normal_(self, start: int = 0, stop: int | None = None) -> None:  # noqa: D102
        self.draw(lambda values: values.normal_(), start, stop, ("normal", 0.0, 1.0))

    @torch.no_grad()
    def load(self, values: Tensor, start: int = 0) -> None:  # noqa: D102
        self.handle.rows.catch_up()
        for part in row_chunks(len(values), values[:1].nbytes):
            self._keep(torch.arange(start + part.start, start + part.stop, device="cpu"), values[part])

    def store(self, values: Tensor) -> None:  # noqa: D102
        shape = self.partition.num_rows, self.handle.table.dim
        if tuple(values.shape) != shape:
            raise InvalidValueError(
                f"{self.handle} is {shape} but the values given are {tuple(values.shape)}; pass all rows of the table, to "
                "every process"
            )
        self.load(values.detach())

    def check_whole(self, what: str, remedy: str) -> None:  # noqa: D102
        raise InvalidValueError(
            f"{self.handle} {what}, but its rows are owned by {self.exchange.ranks} processes; {remedy}"
        )

    def shown(self) -> str:  # noqa: D102
        size = f"{self.partition.num_rows} x {self.handle.table.dim} {self.handle.rows.dtype}"
        return f"rows of rank {self.exchange.rank} of {self.exchange.ranks}, of {size}"

    def begin_copy(self) -> None:  # noqa: D102
        self.handle.rows.catch_up()

    def copy_to(self, handle: Any) -> None:  # noqa: D102
        handle.owners = type(self)(handle, self.exchange, self.partition.copy(), self.comm_dtype)
        handle.owners.is_adaptive = self.is_adaptive


def of_owners(exchange: Exchange, owners: Tensor, values: Tensor) -> Tensor:
    """Return ``(n, width)`` values, the same in all processes, of which each gives those whose `owners` (n,) say so."""
    if not len(owners):
        return values
    got = exchange.gather("rows", values, owners.bincount(minlength=exchange.ranks).tolist())
    whole = torch.empty_like(got)
    bits_of(whole)[owners.argsort(stable=True)] = bits_of(got)
    return whole


def _summed(route: Route, has: Sequence[int], grads: Tensor, is_adaptive: bool) -> tuple[Tensor, Tensor]:
    """Return which of `route.owned` have a gradient, and its sums, added in the order of the ranks: always the same bits."""
    total = grads.new_zeros(len(route.owned), grads.shape[1])
    touched = torch.zeros(len(route.owned), dtype=torch.bool, device=grads.device)
    start = begin = 0
    for count, some in zip(route.receives, has, strict=True):
        if some:
            rows, part = route.inverse[start : start + count], grads[begin : begin + count]
            if is_adaptive:
                total[rows] = added_adaptively(total[rows], part)
            else:
                total.index_add_(0, rows, part)
            touched[rows] = True
            begin += count
        start += count
    if all(has):
        return torch.arange(len(total), device=grads.device), total
    kept = touched.nonzero().flatten()
    return kept, total[kept]


def added_adaptively(first: Tensor, second: Tensor) -> Tensor:
    """Return, for each row of two gradients, ``(n, dim)``, their sum where they are orthogonal and their mean where equal.

    Adasum (S. Maleki et al., arXiv:2006.02924): a and b become ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``, as what the second
    would have learnt after the first had moved the row is no longer what it has learnt beside it.
    """
    product = (first * second).sum(1, keepdim=True)
    parts = [
        each * (1 - product / (2 * each.square().sum(1, keepdim=True)).clamp_min(1e-30)) for each in (first, second)
    ]
    return parts[0] + parts[1]
