"""Look ids up in several tables of several processes with the messages of one, ahead of their use.

When a batch is known its ids go to the owners of their rows, who begin to read them; at the first lookup in any of its tables
the rows of all come in one message, as they are by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.dtypes import rows_at
from speedtransfer.nn.ahead import begin_to_read
from speedtransfer.nn.ticket import Ticket, begin_to_wait, by_row, rows_in
from speedtransfer.nn.vocabulary_lookup import VocabularyTicket
from speedtransfer.optim import Handle, VocabularyIds
from speedtransfer.optim.shards import check_counts
from speedtransfer.ranks import Exchange, Segment
from speedtransfer.tables import UniqueRows, as_index, unique_rows


class ShardTicket(Ticket):
    """Ids whose owners know them already; a lookup takes it in the place of the ids, or finds it by the same ids."""

    def __init__(self, handle: Handle, ids: Any, padding_idx: int | None, training: bool) -> None:
        check_not_capturing("prefetch()", "read ahead before the capture, or leave it out")
        device = handle.table.device
        given = rows_in(ids)
        flat, self.shape, _ = as_index(given, handle.num_rows, device, check=False)
        self.groups = unique_rows(flat, handle.num_rows, given, padding_idx, grouped=device.type == "cuda").to(device)
        self._note(handle, flat, ids, padding_idx)
        self.training = training
        self.fused: FusedLookups | None = None
        self.route: Any = None
        # What this process reads ahead for all; the rows that came, and the state of the table then.
        self.ahead: Any = None
        self.rows: Tensor | None = None
        self.read: dict[str, Tensor] | None = None
        self.changes = -1

    @property
    def is_waiting(self) -> bool:
        """Whether no lookup has used it."""
        return self.fused is not None

    def take(self, padding_idx: int | None) -> tuple[UniqueRows, Tensor, dict[str, Tensor] | None] | None:
        """Return the unique rows of the ids, their values, and what this process has read for all; None where they are old."""
        fused, self.fused = self.fused, None
        self.forget()
        if fused is None or padding_idx != self._padding_idx:
            return None
        if self.rows is None:
            fused.pull()
        handle: Any = self._handle
        if self.changes != handle.owners.changes:
            return None
        assert self.rows is not None
        return self.groups, self.rows, self.read


class FusedLookups:
    """The tickets of one batch in the tables of one process group."""

    def __init__(
        self, exchange: Exchange, handles: list[Any], tickets: list[ShardTicket], error: Exception | None
    ) -> None:
        self._exchange, self._handles, self._tickets = exchange, handles, [weakref.ref(ticket) for ticket in tickets]
        self._about = "ids ahead, of " + ", ".join(map(str, handles))
        if error is not None:
            exchange.agree("looks up rows", [-1] * len(handles), self._about)
            raise error
        placed = [h.owners.lookups.by_owner(t.groups.ids) for h, t in zip(self._handles, tickets, strict=True)]
        sends = torch.stack([count for _, _, count in placed], 1)
        counts = check_counts(exchange.agree("looks up rows", sends, self._about)).T.tolist()
        ids = [
            Segment(places.unsqueeze(1), n.tolist(), got) for (places, _, n), got in zip(placed, counts, strict=True)
        ]
        for handle, ticket, place, segment, got in zip(
            self._handles, tickets, placed, ids, exchange.move("ids", ids), strict=True
        ):
            rows = handle.rows
            ticket.fused = self
            ticket.route = handle.owners.lookups.routed(place[1], segment.sends, segment.receives, got[:, 0])
            planes = None if ticket.training or rows.lag is not None else ("weight",)
            # From the host: those of a device would be padded.
            owned = ticket.route.owned.cpu()
            ticket.ahead = begin_to_read(rows, owned, tuple(owned.shape), None, planes, None)
        self._work = [(t.route, t.ahead) for t in tickets]

    @torch.no_grad()
    def pull(self) -> None:
        """Let the rows of all tables come."""
        self._exchange.agree("looks up rows", [0], self._about.replace("ids", "rows", 1))
        reads, segments, kinds = [], list[Segment](), list[list[str]]()
        for handle, (route, ahead) in zip(self._handles, self._work, strict=True):
            found = ahead.result()
            found.take()
            read, parts = handle.owners.lookups.read(route.owned, None, found)
            reads.append(read)
            kinds.append(list(parts))
            segments += [Segment(rows_at(part, route.inverse), route.receives, route.sends) for part in parts.values()]
        received = iter(self._exchange.move("rows", segments))
        for handle, reference, (route, _), read, names in zip(
            self._handles, self._tickets, self._work, reads, kinds, strict=True
        ):
            rows = handle.owners.lookups.arranged(route, {name: next(received) for name in names})
            ticket = reference()
            if ticket is not None:
                ticket.rows, ticket.read, ticket.changes = rows, read, handle.owners.changes


def read_ahead(module: Any, ids: Any) -> Ticket:
    """Return a ticket for the ids of one module, which has rows; of a table of several processes collective."""
    if is_read_together(module):
        return read_ahead_of([(module, ids)])[0]
    handle: Handle = module._handle
    found = module._found(ids)
    rows, padding_idx = by_row(handle, *((ids, module.padding_idx) if found is None else (found.index, None)))
    training = torch.is_grad_enabled() and handle.requires_grad
    if isinstance(handle.id_space, VocabularyIds):
        ticket: Ticket = VocabularyTicket(handle.id_space, rows, training)
    else:
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
    groups: dict[Exchange, tuple[list[Any], list[ShardTicket]]] = {}
    errors: dict[Exchange, Exception] = {}
    for module, ids in pairs:
        if not (module._has_rows() and is_read_together(module)):
            tickets.append(module.prefetch(ids))
            continue
        handle: Handle = module._handle
        exchange = handle.owners.exchange
        handles, some = groups.setdefault(exchange, ([], []))
        handles.append(handle)
        try:
            found = module._found(ids)
            rows, padding_idx = by_row(handle, *((ids, module.padding_idx) if found is None else (found.index, None)))
            made = ShardTicket(handle, rows, padding_idx, handle.requires_grad)
            made.found = found
        except Exception as error:
            errors.setdefault(exchange, error)
            continue
        some.append(made)
        tickets.append(made)
    for exchange, (handles, some) in groups.items():
        FusedLookups(exchange, handles, some, errors.get(exchange))
    for ticket in tickets:
        if isinstance(ticket, ShardTicket):
            begin_to_wait(ticket)
    return tickets
