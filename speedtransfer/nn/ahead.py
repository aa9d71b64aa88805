"""Gather the rows of a batch before its lookup: in threads, and on a CUDA device on a stream of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.cuda import current_stream, keep_until_done, side_stream
from speedtransfer.dtypes import bits_of, rows_at
from speedtransfer.engines import faults_left
from speedtransfer.once import once
from speedtransfer.rows import Rows
from speedtransfer.tables import UniqueRows, WriteLog, kept, padded_unique, unique_rows
from speedtransfer.workers import Task, done_here, workers

# Rows that take more than this share of the device's memory are not padded: the host waits for their number, which is little
# beside what they take themselves.
_MOST_PADDED = 1 / 32
THREADS = 2  # they wait for pages of files, and copy; more would take the cores of whoever trains


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
    arrived : torch.cuda.Event, optional
        When all is there, for other streams than that of the reads.
    """

    groups: UniqueRows
    fetched: dict[str, Tensor]
    planes: tuple[str, ...] | None
    log: WriteLog
    arrived: torch.cuda.Event | None = None

    def take(self) -> None:
        """Let the current stream use them."""
        if self.arrived is not None:
            parts = [part for part in (*self.groups[:4], self.groups.known.length) if part is not None]
            use([*parts, *self.fetched.values()], self.arrived)

    def moved(self, rows: Rows, groups: UniqueRows) -> Ahead | None:
        """Return the same for the rows of other ids: those that were read ahead, and others read now.

        None where there are other planes by now.
        """
        ours, theirs = self.groups.ids, groups.ids
        if self.groups.known.length is not None:
            return self._moved_on_device(rows, groups)
        place = torch.searchsorted(ours, theirs).clamp_(max=max(len(ours) - 1, 0))
        there = ours[place] == theirs if len(ours) else torch.zeros_like(theirs, dtype=torch.bool)
        at, other = there.nonzero().flatten(), (~there).nonzero().flatten()
        fetched, found = dict[str, Tensor](), rows.fetch(theirs[other], self.planes)
        if found.keys() != self.fetched.keys():
            return None
        for name, new in found.items():
            fetched[name] = buffers.empty((len(theirs), *new.shape[1:]), new.dtype, new.device)
            bits_of(fetched[name])[at] = rows_at(bits_of(self.fetched[name]), place[at])
            bits_of(fetched[name])[other] = bits_of(new)
        return self._replace(groups=groups, fetched=fetched)

    def _moved_on_device(self, rows: Rows, groups: UniqueRows) -> Ahead | None:
        """Do the same for padded ids: the host does not wait."""
        ours, theirs = self.groups.ids, groups.ids
        place = torch.searchsorted(ours, theirs).clamp_(max=len(ours) - 1)
        # Padding names a row by now if the table has got more; but one that an id has got was written, and is read again.
        there = ours[place] == theirs
        others, known = kept(theirs, ~there, rows.table.num_rows)
        found = rows.fetch(others, self.planes, known)
        if found.keys() != self.fetched.keys():
            return None
        for name, new in found.items():
            target = bits_of(new)
            torch.where(there.unsqueeze(1), bits_of(self.fetched[name])[place], target, out=target)
        return self._replace(groups=groups, fetched=found)

    def stored(self, rows: Rows) -> dict[str, Tensor]:
        """Return the rows as they are stored, as `Rows.fetch` would."""
        return rows.refetch(self.groups.ids, self.planes, self.fetched, self.log, self.groups.known)

    def rows(self, rows: Rows) -> dict[str, Tensor]:
        """Return the rows as `Rows.read` would, ``(n, *tail)`` of each plane; once, as a step writes to their memory."""
        if self.planes is not None and rows.lag is not None:
            # The steps that rows may miss since then are known only with all planes.
            return rows.read(self.groups.ids, known=self.groups.known)
        with rows.lock:
            return rows.finish(self.stored(rows), self.groups.ids)


def begin_to_read(
    rows: Rows, ids: Tensor, padding_idx: int | None, planes: tuple[str, ...] | None, asked: torch.cuda.Event | None
) -> Task[Ahead | None]:
    """Begin to read the rows of ids.

    Parameters
    ----------
    rows : Rows
    ids : Tensor
        Int64, contiguous, not checked, on the compute device or the CPU.
    padding_idx : int, optional
    planes : tuple of str, optional
        None: all.
    asked : torch.cuda.Event, optional
        When `ids` are there.

    Returns
    -------
    Task of Ahead or None
        None where it is better to wait for the lookup.
    """
    work = rows, ids, padding_idx, planes, rows.table.watch(), asked
    if not (ids.is_cuda and rows.table.takes_padding):
        return workers("prefetch", THREADS).submit(_read, *work)
    # The host has nothing to do but to launch.
    return done_here(_read, *work)


def _read(
    rows: Rows,
    ids: Tensor,
    padding_idx: int | None,
    planes: tuple[str, ...] | None,
    log: WriteLog,
    asked: torch.cuda.Event | None,
) -> Ahead | None:
    device = rows.table.device
    # Nobody sees what this thread raises; and tensors of inference mode could not be trained.
    with faults_left(), torch.inference_mode(False), torch.no_grad():
        if device.type == "cpu":
            groups = unique_rows(ids.view(-1), rows.table.num_rows, ids, padding_idx)
            return Ahead(groups, rows.fetch(groups.ids, planes), planes, log)
        side = side_stream(device, "gather")
        with torch.cuda.device(device), torch.cuda.stream(side):
            if asked is not None:
                side.wait_event(asked)
                keep_until_done([ids], side)
            found = _unique(rows, ids, padding_idx)
            if found is None:
                return None
            return Ahead(found, rows.fetch(found.ids, planes, found.known), planes, log, side.record_event())


def _unique(rows: Rows, ids: Tensor, padding_idx: int | None) -> UniqueRows | None:
    """Return the unique rows of `ids` on the CUDA device of a table; None for ids there that are not to be padded."""
    table, flat = rows.table, ids.view(-1)
    if not (flat.is_cuda and table.takes_padding and len(flat)):
        # An engine that moves rows on the host takes ids there.
        there = ids.cpu() if table.moves_on_host else ids
        return unique_rows(there.view(-1), table.num_rows, there, padding_idx, grouped=True).to(table.device)
    if not may_pad(rows, min(len(flat), table.num_rows) + 1):
        return None
    table.check(flat)
    return padded_unique(flat, table.num_rows, spare=True)


def may_pad(rows: Rows, count: int) -> bool:
    """Tell whether `count` rows on a CUDA device should be padded."""
    return count * rows.table.dim * rows.dtype.itemsize <= _MOST_PADDED * _memory_of(rows.table.device)


@once
def _memory_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def use(tensors: list[Tensor], after: torch.cuda.Event) -> None:
    """Let the current stream use tensors of another stream, after an event of that."""
    stream = current_stream(tensors[0].device)
    stream.wait_event(after)
    keep_until_done(tensors, stream)
