"""Tickets: ids whose rows are read ahead of their lookup.

Rows are read as they are stored, at any time between the call of `prefetch` and the lookup. Meanwhile the table keeps a log of
what is written, and the lookup reads those rows again: its numbers are those that it would have found by itself.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing, current_stream, is_capturing
from speedtransfer.engines import CHANGED_ID
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.ahead import Ahead, begin_to_read, use
from speedtransfer.once import fork_safe_lock
from speedtransfer.optim import Handle
from speedtransfer.tables import UniqueRows, as_index, padded_unique, unique_rows
from speedtransfer.vocabulary import NotedIds, as_ids
from speedtransfer.workers import Task

# Tickets that no lookup has used yet, in their order: of two for the same ids, in all processes the earlier one is used.
_open: weakref.WeakKeyDictionary[Handle, weakref.WeakKeyDictionary[Ticket, None]] = weakref.WeakKeyDictionary()
_turn = fork_safe_lock()


class FoundRows(NamedTuple):
    """The rows of some ids, that a vocabulary, a hash or the features of a table have given to them.

    Attributes
    ----------
    rows : Tensor
        Int64 in the shape of the ids; where they came from, the CPU or the compute device.
    num_unseen : int
        How many ids have none, as far as the host knows.
    fill : UnseenValues or UnseenOnDevice, optional
        What unseen ids read; None: `UNSEEN_ROW`.
    noted : NotedIds, optional
        The ids for the host, where it knows or will know their rows.
    asked, stamp : Asked, Stamp, optional
        What the owners know of them, of several processes; what a gradient must know of the lookup.
    ticket : Ticket, optional
        That was made for the ids.
    source : tuple, optional
        By whom they were computed, and the tensors that they were computed from.
    """

    rows: Tensor
    num_unseen: int = 0
    fill: Any = None
    noted: NotedIds | None = None
    asked: Any = None
    ticket: Ticket | None = None
    stamp: Any = None
    source: tuple[Any, tuple[Any, ...]] | None = None

    def filled(self, out: Tensor) -> Tensor:
        """Return `out`, ``(*shape of the ids, dim)``, with the values of unseen ids in it."""
        return out if self.fill is None else cast(Tensor, self.fill.into(out))


class Ticket:
    """Ids whose rows are being read ahead; a lookup takes it in the place of the ids, and finds it by the same ids.

    With a vocabulary they are the rows that the ids have by now; the lookup finds or admits the others, and reads those.

    Attributes
    ----------
    source : Tensor
        A copy of the ids, int64 in their shape.
    shape : tuple of int
        Of the ids.
    noted : NotedIds, optional
        Ids of a vocabulary on a CUDA device, for the host.
    part : FusedPart, optional
        Its part of what several processes read together.
    """

    _task: Task[Ahead | None] | None = None
    # What several features, or one, have made of the ids (`feature_ids.FeatureRows`); None: they are those of a table.
    found: Any = None
    part: Any = None

    def __init__(self, handle: Handle, ids: Any, padding_idx: int | None, training: bool) -> None:
        rows, table, id_space = handle.rows, handle.table, handle.id_space
        # The caller may fill the memory of `ids` anew for the next batch.
        self.source = _values(handle, ids).clone()
        self.shape = tuple(self.source.shape)
        if table.device.type == "cuda":
            check_not_capturing("prefetch()", "read ahead before the capture, or leave it out")
        # Ids on a CUDA device are known by their memory, which is kept so that it is not reused.
        self._place, self._given = place_of(ids), ids
        # Ids that were computed from the same since.
        self._again: Tensor | None = None
        self._handle, self._rows, self._process, self._padding_idx = handle, rows, os.getpid(), padding_idx
        self.noted = NotedIds(self.source.view(-1)) if id_space.come_and_go and self.source.is_cuda else None
        self._version, ahead = id_space.version, id_space.rows_ahead(self.source)
        self._ids = (self.source if ahead is None else ahead).view(-1)
        # Once all is there: rows that the host has found are on their way to the device as well.
        self._asked = current_stream(table.device).record_event() if self.source.is_cuda else None
        if ahead is None:
            begin_to_wait(self)
            return  # those who know their rows find them when they are looked up
        if not handle.owners.has_whole:
            return  # other processes write rows, or have them
        if table.device.type == "cuda" and table.memory == "device":
            return  # nothing has to cross the bus
        if table._place.turns is not None:
            return  # the process that this one was forked from may be writing: the lookup takes care of it
        planes = None if training or rows.lag is not None else ("weight",)
        self._task = begin_to_read(rows, self._ids.view(self.shape), padding_idx, planes, self._asked)
        begin_to_wait(self)

    def __del__(self) -> None:
        task = self.__dict__.get("_task")
        if task is not None:
            task.cancel()

    @property
    def ids(self) -> Tensor:
        """The rows that they had, ``(n,)`` int64, for the current stream."""
        # The host finds rows of its own memory for ids of a vocabulary on the device.
        if self._asked is not None and self._ids.is_cuda:
            use([self._ids], self._asked)
        return self._ids

    @property
    def is_waiting(self) -> bool:
        """Whether rows are read ahead for it that no lookup has used."""
        return self._task is not None or self.part is not None

    def is_changed(self) -> bool:
        """Tell whether the ids that it was made for have other values by now, as far as the host can see."""
        if self.source.is_cuda:
            return self._place is not None and self._place != place_of(self._given)
        return not torch.equal(self.source, _values(self._handle, self._given))

    def check(self, handle: Handle) -> None:
        """Raise `InvalidValueError` unless it was made for the table of `handle`."""
        if self._handle is not handle:
            raise InvalidValueError(
                f"this ticket was made for {self._handle} but is used in {handle}; pass it to the module that made it"
            )

    def wait(self, padded: bool, ids: Any, padding_idx: int | None) -> Ahead | None:
        """Return what was read, for the first who asks; None where nothing was, or for another table than there is now.

        Parameters
        ----------
        padded : bool
            Whether its rows may be padded.
        ids : Tensor or Ticket
            What it was found by; with a vocabulary the rows that the ids have by now.
        padding_idx : int, optional
            Of the module that looks up: several may have one table.
        """
        task, self._task = self._task, None
        self.forget()
        # A forked process has none of the threads.
        if task is None or self._handle.rows is not self._rows or self._process != os.getpid():
            return None
        if padding_idx != self._padding_idx:
            return None
        try:
            ahead = task.result()
        except Exception:
            # Planes may have been dropped while they were read. The lookup reads by itself, and raises what is the matter.
            return None
        if ahead is None or (ahead.groups.known.length is not None and not padded):
            return None
        ahead.take()
        return ahead if ids is self else self._of_rows(ahead, ids.detach().reshape(-1).to(torch.int64), padding_idx)

    def _of_rows(self, ahead: Ahead, wanted: Tensor, padding_idx: int | None) -> Ahead | None:
        """Return what was read for the rows (n,) that the ids have by now."""
        table, id_space = self._rows.table, self._handle.id_space
        if ahead.groups.known.length is not None:
            if self._version != id_space.version:
                return ahead.moved(self._rows, padded_unique(wanted, table.num_rows, spare=True))
            # Somebody may have written to their memory whom torch does not see. The host cannot look without waiting.
            table.check(torch.where(self.ids == wanted, wanted, CHANGED_ID))
            return ahead
        if not id_space.come_and_go or torch.equal(self.ids, wanted):
            return ahead
        # As `activate` finds them.
        groups = unique_rows(wanted.cpu(), table.num_rows, wanted, padding_idx, grouped=table.device.type == "cuda")
        return ahead.moved(self._rows, groups.to(table.device))

    def take(self, padding_idx: int | None) -> Any:
        """Return what several processes have read together for it, for the first who asks, as `FusedPart.take`."""
        part, self.part = self.part, None
        self.forget()
        return None if part is None or padding_idx != self._padding_idx else part.take()

    def forget(self) -> None:
        """Let no lookup find it any more."""
        with _turn:
            tickets = _open.get(self._handle)
            if tickets is not None:
                tickets.pop(self, None)

    def is_for(self, ids: Tensor) -> bool:
        """Tell whether `ids` are those that it was made for; on a device, in the same memory, not written to since."""
        if self.shape != tuple(ids.shape) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            return False
        by_value = not self._handle.id_space.come_and_go
        if ids.is_cuda and (self._rows.table.takes_padding or not by_value):
            place = place_of(ids)
            return ids is self._again or (place is not None and place in (self._place, place_of(self.source)))
        # Rows that the host moves make it wait for the device anyway.
        known = self.ids if by_value else self.source.view(-1)
        return known.device == ids.device and torch.equal(known, ids.reshape(-1).to(torch.int64))


def _values(handle: Handle, ids: Any) -> Tensor:
    """Return ids, or the rows in `FoundRows`, int64 in their shape, not checked."""
    if handle.id_space.come_and_go:
        return as_ids(ids)
    flat, shape, _ = as_index(rows_in(ids), handle.num_rows, handle.table.device, check=False)
    return flat.view(shape)


def begin_to_wait(ticket: Ticket) -> None:
    """Let lookups find a ticket by its ids."""
    with _turn:
        _open.setdefault(ticket._handle, weakref.WeakKeyDictionary())[ticket] = None
    ticket._handle.reads_ahead = True


def open_tickets(handle: Handle) -> list[Ticket]:
    """Return the tickets of `handle` that no lookup has used."""
    with _turn:
        return list(_open.get(handle, ()))


def place_of(ids: Any) -> tuple[Any, ...] | None:
    """Return where ids on a CUDA device lie and how often torch has written to them; None where that is not known."""
    rows = rows_in(ids)
    if not isinstance(rows, Tensor) or not rows.is_cuda:
        return None
    names, tensors = (isinstance(ids, FoundRows) and ids.source) or ((), (rows,))
    if any(not isinstance(tensor, Tensor) or tensor.is_inference() for tensor in tensors):
        return None
    return names, *((t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in tensors)


def rows_in(ids: Any) -> Any:
    """Return the row numbers in `ids`, which may be `FoundRows`."""
    return ids.rows if isinstance(ids, FoundRows) else ids


def to_row_numbers(handle: Handle, ids: Any, padding_idx: int | None) -> tuple[Any, int | None]:
    """Return the rows of ids that are no row numbers, as `FoundRows`, and that of padding; of others the arguments.

    Raises
    ------
    RowIndexError
        An id has no row.
    """
    id_space = handle.id_space
    if id_space.by_row or isinstance(ids, Ticket):
        return ids, padding_idx
    if id_space.come_and_go:
        # A lookup finds, or admits, them.
        return ids, id_space.padding_row(padding_idx)
    refuse_unique_rows(handle, ids)
    source = ids.source if isinstance(ids, FoundRows) else ((), (ids,))
    return FoundRows(id_space.find(rows_in(ids)), source=source), id_space.padding_row(padding_idx)


def refuse_unique_rows(handle: Handle, ids: Any) -> None:
    """Raise for numbers of rows where ids are looked up."""
    if isinstance(ids, UniqueRows):
        raise InvalidTypeError(
            f"{handle} looks {handle.id_space.kind} up, but got UniqueRows, which are numbers of rows; pass the ids, or the "
            "ticket of its own prefetch()"
        )


def known_again(handle: Handle | None, found: Any) -> Any:
    """Return the rows in `found`, by which a ticket for others that were computed from the same can be found now."""
    if handle is not None and handle.reads_ahead and not torch._C._are_functorch_transforms_active():
        place = place_of(found)
        for ticket in open_tickets(handle):
            if place is not None and ticket._place == place:
                ticket._again = rows_in(found)
    return rows_in(found)


def find_ticket(handle: Handle, ids: Any) -> Ticket | None:
    """Return the ticket that `ids` are or have, or one of `handle` for the same ids that no lookup has used.

    Raises
    ------
    InvalidValueError
        It was made for another table.
    """
    if isinstance(ids, FoundRows):
        return ids.ticket
    if isinstance(ids, Ticket):
        ids.check(handle)
        return ids
    tickets = open_tickets(handle)
    if not tickets or not isinstance(ids, Tensor) or is_capturing():
        return None
    return next((ticket for ticket in tickets if ticket.is_for(ids)), None)
