"""Look ids up in several tables of several processes with the messages of one, ahead of their use.

When a batch is known its ids go to the owners of their rows, who begin to read them; at the first lookup in any of its tables
the rows of all come in one message, as they are by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from speedtransfer.dtypes import rows_at
from speedtransfer.nn.ahead import begin_to_read
from speedtransfer.nn.ticket import Ticket, begin_to_wait, rows_in, to_row_numbers
from speedtransfer.optim import Handle
from speedtransfer.optim.shards import Route
from speedtransfer.ranks import Exchange, IdsAhead, Segment, check_counts
from speedtransfer.tables import UniqueRows, unique_rows


class FusedPart:
    """What is read ahead for the ids of one ticket, rows of a table that several processes share out.

    Attributes
    ----------
    groups : UniqueRows
        Of the ids.
    training : bool
        Whether the rows are trained.
    fused, route : FusedLookups, Route
        What is read together with it; who asks whom for what.
    """

    fused: FusedLookups
    route: Route

    def __init__(self, ticket: Ticket, training: bool) -> None:
        self.handle: Any = ticket._handle
        rows, device = self.handle.num_rows, self.handle.table.device
        given, padding_idx = rows_in(ticket._given), ticket._padding_idx
        self.groups = unique_rows(ticket.ids, rows, given, padding_idx, grouped=device.type == "cuda").to(device)
        self.training = training
        # The rows that came, what this process has read for all, and the state of the table then.
        self._came: tuple[Tensor, dict[str, Tensor], int] | None = None

    def arrive(self, rows: Tensor, read: dict[str, Tensor]) -> None:
        """Keep the rows that have come."""
        self._came = rows, read, self.handle.owners.changes

    def take(self) -> tuple[UniqueRows, Tensor, Route, dict[str, Tensor]] | None:
        """Return the unique rows of the ids, their values, and the route and what was read for it; None where they are old."""
        if self._came is None:
            self.fused.pull()
        assert self._came is not None
        rows, read, changes = self._came
        return None if changes != self.handle.owners.changes else (self.groups, rows, self.route, read)


class FusedLookups:
    """The parts of one batch in the tables of one process group, which all processes make.

    Parameters
    ----------
    exchange : Exchange
    parts : list of FusedPart
    placed : list of tuple
        What `ShardLookups.by_owner` gives for each.
    message : IdsAhead, optional
        Brings what the others ask for; None: `arrive` is given that.
    """

    def __init__(
        self, exchange: Exchange, parts: list[FusedPart], placed: list[Any], message: IdsAhead | None = None
    ) -> None:
        self._exchange, self._placed, self._message = exchange, placed, message
        # A ticket may be gone before; the others need what it asks for.
        self._parts = [(part.handle, part.training, weakref.ref(part)) for part in parts]
        self._routes, self._ahead = list[Route](), list[Any]()
        for part in parts:
            part.fused = self
        if message is not None:
            _coming.setdefault(exchange, weakref.WeakSet()).add(self)

    def arrive(self, counts: list[list[int]], ids: list[Tensor]) -> None:
        """Take the ids of each table that are asked for here, (n,), and how many come from each rank."""
        for (handle, _, reference), (_, order, sends), got, rows in zip(
            self._parts, self._placed, counts, ids, strict=True
        ):
            route = handle.owners.lookups.routed(order, sends.tolist(), got, rows)
            self._routes.append(route)
            part = reference()
            if part is not None:
                part.route = route

    def begin(self) -> None:
        """Begin to read what all processes ask of this one, once it is there."""
        if self._message is not None:
            if self._routes or not self._parts or not self._message.has_come:
                return
            self.arrive(*self._message.take())
        for (handle, training, _), route in zip(self._parts, self._routes, strict=True):
            planes = None if training or handle.rows.lag is not None else ("weight",)
            # From the host: those of a device would be padded.
            self._ahead.append(begin_to_read(handle.rows, route.owned.cpu(), None, planes, None))

    @torch.no_grad()
    def pull(self) -> None:
        """Let the rows of all tables come."""
        if self._message is not None:
            self._message.wait()
        if self._message is not None or self._ahead:
            about = "rows ahead, of " + ", ".join(str(handle) for handle, _, _ in self._parts)
            self._exchange.agree_on_counts(
                "looks up rows", torch.zeros(self._exchange.ranks, 1, device="cpu"), 0, about
            )
        if not self._routes:
            assert self._message is not None
            self.arrive(*self._message.take())
        found: list[Any] = [ahead.result() for ahead in self._ahead] or [None] * len(self._routes)
        reads, segments = [], list[Segment]()
        for (handle, _, _), route, ahead in zip(self._parts, self._routes, found, strict=True):
            if ahead is not None:
                ahead.take()
            reads.append(handle.owners.lookups.read(route.owned, None, ahead))
            sent = reads[-1][1].values()
            segments += [Segment(rows_at(part, route.inverse), route.receives, route.sends) for part in sent]
        received = iter(self._exchange.move("rows", segments))
        for (handle, _, reference), route, (read, sent) in zip(self._parts, self._routes, reads, strict=True):
            rows = handle.owners.lookups.arranged(route, {name: next(received) for name in sent})
            part = reference()
            if part is not None:
                part.arrive(rows, read)
        # One that nobody takes would keep the tables of the others.
        self._parts.clear()


# Those whose ids nobody has waited for.
_coming: weakref.WeakKeyDictionary[Exchange, weakref.WeakSet[FusedLookups]] = weakref.WeakKeyDictionary()


def look_up_together(
    pairs: Sequence[tuple[Any, Tensor]], agree: Callable[[list[FusedPart], Tensor], list[list[int]] | None]
) -> list[Ticket] | None:
    """Return a ticket for each pair of a module and ids, whose rows have come; None: the processes do not all ask for these.

    `agree` takes the parts and how many ids go to each rank, ``(ranks, n)``, and returns how many come, or None. Collective.
    """
    try:
        tickets = [_ticket(module, ids, False) for module, ids in pairs]
        parts = [FusedPart(ticket, ticket._handle.requires_grad) for ticket in tickets]
    except Exception:
        # It is told where these ids are looked up, if they are.
        return None
    placed = [part.handle.owners.lookups.by_owner(part.groups.ids) for part in parts]
    counts = agree(parts, torch.stack([count for _, _, count in placed], 1))
    if counts is None:
        return None
    _ask(parts[0].handle.owners.exchange, parts, placed, counts).pull()
    for ticket, part in zip(tickets, parts, strict=True):
        ticket.part = part
    return tickets


def read_ahead(module: Any, ids: Any) -> Ticket:
    """Return a ticket for the ids of one module, which has rows; of a table of several processes collective."""
    if is_read_together(module):
        return read_ahead_of([(module, ids)])[0]
    return _ticket(module, ids, torch.is_grad_enabled() and module._handle.requires_grad)


def _ticket(module: Any, ids: Any, training: bool) -> Ticket:
    handle: Handle = module._handle
    found = module._found(ids)
    rows, padding_idx = to_row_numbers(handle, *((ids, module.padding_idx) if found is None else (found.index, None)))
    ticket = Ticket(handle, rows, padding_idx, training)
    ticket.found = found
    return ticket


def is_read_together(module: Any) -> bool:
    """Tell whether the rows of several processes are read ahead, in all of them, and not when they are looked up."""
    handle: Handle = module._handle
    return not (
        handle.owners.has_whole or handle.rows.own or handle.id_space.come_and_go or module.max_norm is not None
    )


def read_ahead_of(pairs: Iterable[tuple[Any, Any]]) -> list[Ticket]:
    """Return a ticket for each pair of a module and ids; those of several processes are sent together. Collective for these.

    All tables of a group on every process: in the order of `pairs`.
    """
    tickets: list[Ticket] = []
    groups: dict[Exchange, tuple[list[Any], list[FusedPart]]] = {}
    errors: dict[Exchange, Exception] = {}
    for module, ids in pairs:
        if not (module._has_rows() and is_read_together(module)):
            tickets.append(module.prefetch(ids))
            continue
        handle: Handle = module._handle
        exchange = handle.owners.exchange
        handles, parts = groups.setdefault(exchange, ([], []))
        handles.append(handle)
        try:
            ticket = _ticket(module, ids, handle.requires_grad)
            ticket.part = FusedPart(ticket, handle.requires_grad)
        except Exception as error:
            errors.setdefault(exchange, error)
            continue
        parts.append(ticket.part)
        tickets.append(ticket)
    for exchange, (handles, parts) in groups.items():
        _send_ahead(exchange, handles, parts, errors.get(exchange))
    for ticket in tickets:
        if ticket.part is not None:
            begin_to_wait(ticket)
    return tickets


def _send_ahead(exchange: Exchange, handles: list[Any], parts: list[FusedPart], error: Exception | None) -> None:
    """Send the ids of one batch to those who have their rows, who begin to read once they have come."""
    about = "ids ahead, of " + ", ".join(map(str, handles))
    beside = exchange.may_be_beside
    if error is not None:
        if beside:
            IdsAhead(exchange, None, [torch.empty(0, dtype=torch.int64, device="cpu")] * len(handles), about)
        else:
            exchange.agree("looks up rows", [-1] * len(handles), about)
        raise error
    placed = [part.handle.owners.lookups.by_owner(part.groups.ids) for part in parts]
    sends = torch.stack([count for _, _, count in placed], 1)
    if beside:
        for earlier in list(_coming.get(exchange, ())):
            earlier.begin()
        FusedLookups(exchange, parts, placed, IdsAhead(exchange, sends, [places for places, _, _ in placed], about))
    else:
        counts = check_counts(exchange.agree("looks up rows", sends, about))
        _ask(exchange, parts, placed, counts.T.tolist()).begin()


def _ask(exchange: Exchange, parts: list[FusedPart], placed: list[Any], counts: list[list[int]]) -> FusedLookups:
    """Send ids to those who have their rows, given how many come from each rank for each table."""
    made = FusedLookups(exchange, parts, placed)
    ids = [Segment(places.unsqueeze(1), n.tolist(), got) for (places, _, n), got in zip(placed, counts, strict=True)]
    made.arrive(counts, [got[:, 0] for got in exchange.move("ids", ids)])
    return made
