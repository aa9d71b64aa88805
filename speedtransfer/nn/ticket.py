"""Read the rows of a batch ahead of its lookup, in threads of their own.

They are read as they are stored, at any time between the call of `prefetch` and the lookup. Meanwhile the table keeps a log of
what is written, and the lookup reads those rows again: its numbers are those that it would have found by itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim import Handle
from speedtransfer.rows import Rows
from speedtransfer.tables import UniqueRows, WriteLog, as_index, unique_rows

THREADS = 2  # they wait for pages of files, and copy; more would take the cores of whoever trains

# Tickets that no lookup has used yet.
_open: weakref.WeakKeyDictionary[Handle, weakref.WeakSet[Ticket]] = weakref.WeakKeyDictionary()


class Ahead(NamedTuple):
    """Rows that were read ahead.

    Attributes
    ----------
    groups : UniqueRows
        Of the ids.
    fetched : dict of str to Tensor
        Their rows by plane, as `Rows.fetch` has returned them.
    planes : tuple of str, optional
        Those asked for; None: all.
    log : WriteLog
        Of the table, from before.
    """

    groups: UniqueRows
    fetched: dict[str, Tensor]
    planes: tuple[str, ...] | None
    log: WriteLog

    def rows(self, rows: Rows) -> dict[str, Tensor]:
        """Return the rows as `Rows.read` would, ``(n, *tail)`` of each plane; once, as a step writes to their memory."""
        if self.planes is not None and rows.lag is not None:
            # The steps that rows may miss since then are known only with all planes.
            return rows.read(self.groups.ids)
        with rows.lock:
            return rows.finish(rows.refetch(self.groups.ids, self.planes, self.fetched, self.log))


class Ticket:
    """Ids whose rows are being read ahead; a lookup takes it in the place of the ids, and finds it by the same ids.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, flat.
    shape : tuple of int
        Of the ids.
    """

    def __init__(self, handle: Handle, ids: Any, padding_idx: int | None, training: bool) -> None:
        rows, table = handle.rows, handle.table
        flat, self.shape, _ = as_index(ids, table.num_rows, table.device, check=False)
        # The caller may fill the memory of `ids` anew for the next batch.
        self.ids = flat.clone()
        self._handle, self._rows, self._process = handle, rows, os.getpid()
        planes = None if training or rows.lag is not None else ("weight",)
        self._future: concurrent.futures.Future[Ahead] | None = None
        if table.device.type == "cpu":
            work = rows, self.ids, self.shape, padding_idx, planes, table.watch()
            self._future = _threads().submit(_read, *work)
            _open.setdefault(handle, weakref.WeakSet()).add(self)
            handle.reads_ahead = True

    def __del__(self) -> None:
        future = self.__dict__.get("_future")
        if future is not None:
            future.cancel()

    def check(self, handle: Handle) -> None:
        """Raise `InvalidValueError` unless it was made for the table of `handle`."""
        if self._handle is not handle:
            raise InvalidValueError(
                f"this ticket was made for {self._handle} but is used in {handle}; pass it to the module that made it"
            )

    def wait(self) -> Ahead | None:
        """Return what was read, for the first who asks; None where nothing was, or for another table than there is now."""
        future, self._future = self._future, None
        tickets = _open.get(self._handle)
        if tickets is not None:
            tickets.discard(self)
        # A forked process has none of the threads.
        if future is None or self._handle.rows is not self._rows or self._process != os.getpid():
            return None
        try:
            return future.result()
        except Exception:
            # Planes may have been dropped while they were read. The lookup reads by itself, and raises what is the matter.
            return None


@torch.no_grad()
def _read(
    rows: Rows,
    flat: Tensor,
    shape: tuple[int, ...],
    padding_idx: int | None,
    planes: tuple[str, ...] | None,
    log: WriteLog,
) -> Ahead:
    groups = unique_rows(flat, rows.table.num_rows, flat.view(shape), padding_idx)
    return Ahead(groups, rows.fetch(groups.ids, planes), planes, log)


def find_ticket(handle: Handle, ids: Any) -> Ticket | None:
    """Return the ticket that `ids` are, or one of `handle` for the same ids that no lookup has used.

    Raises
    ------
    InvalidValueError
        It was made for another table.
    """
    if isinstance(ids, Ticket):
        ids.check(handle)
        return ids
    tickets = _open.get(handle)
    if not tickets or not isinstance(ids, Tensor) or ids.device.type != "cpu":
        return None
    for ticket in list(tickets):
        if ticket.shape == tuple(ids.shape) and torch.equal(ticket.ids, ids.reshape(-1).to(torch.int64)):
            return ticket
    return None


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="speedtransfer-prefetch")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)
