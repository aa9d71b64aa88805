"""Rows on their way through a cache: from slots and planes together, and to them. All of it in a turn of the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.engines.cache_kernels import are_suitable, move
from speedtransfer.engines.cache_slots import Slots
from speedtransfer.engines.reference import as_integers, put_rows


class Reading:
    """A gather: it begins with the rows that have slots.

    Parameters
    ----------
    slots : Slots
        With room for some row.
    planes, rows : list of Tensor
        ``(num_rows, width_i)`` and ``(n, width_i)``, with columns.
    ids : Tensor
        ``(n,)`` on the compute device.

    Attributes
    ----------
    exists : Tensor
        ``(n,)``, which of `ids` are rows.
    missing : Tensor
        ``(n,)``, which rows must be read from the planes, as one of them is not in its slots.
    """

    def __init__(self, slots: Slots, planes: list[Tensor], ids: Tensor, rows: list[Tensor]) -> None:
        self.planes, self.ids, self._rows, self._slots = planes, ids, rows, slots
        self._places, self._known = slots.find(ids)
        self._parts = [slots.of(plane) for plane in planes]
        # For each plane, which rows its slots have.
        self._own = [self._known & part.valid[self._places] for part in self._parts]
        self._epoch = slots.epoch
        hit = self._own[0]
        for mine in self._own[1:]:
            hit = hit & mine
        self.exists = existing(ids, planes[0])
        self.missing = self.exists & ~hit
        for part, mine, out in zip(self._parts, self._own, rows, strict=True):
            part.read(torch.where(mine, self._places, slots.capacity + 1), out)

    def fetch(self, unsorted: bool) -> None:
        """Read the missing rows from the planes; the only part that on the host needs no turn."""
        if self._slots.inner.takes_padding:
            self._fetch_padded(unsorted)
            return
        order = self.missing.nonzero().flatten()
        if not len(order):
            return
        ids, ahead = self.ids[order], self._slots.ahead
        if ahead is not None:
            ids = ids.cpu()
            ahead(self.planes, ids)
        for out, came, mine in zip(self._rows, self._from_planes(ids, unsorted), self._own, strict=True):
            # What a slot has may be newer.
            others = (~mine[order]).nonzero().flatten()
            if len(others) == len(order):
                put_rows([out], order, [came])
            else:
                put_rows([out], order[others], [taken(came, others)])

    def _fetch_padded(self, unsorted: bool) -> None:
        """Read as many rows as there are ids, missing ones first and then padding, so that the host need not wait."""
        places = self.missing.cumsum(0) - 1
        fetched = self._from_planes(compacted(self.ids, self.missing, places, len(self.planes[0])), unsorted)
        places.clamp_(min=0)
        for out, came, mine in zip(self._rows, fetched, self._own, strict=True):
            wanted = (self.missing & ~mine).unsqueeze(1)
            out.copy_(torch.where(wanted, as_integers(came)[places], as_integers(out)).view(out.dtype))

    def _from_planes(self, ids: Tensor, unsorted: bool) -> list[Tensor]:
        fetched = [buffers.empty((len(ids), out.shape[1]), out.dtype, self._slots.device) for out in self._rows]
        self._slots.inner.gather(self.planes, ids, fetched, unsorted=unsorted)
        return fetched

    def keep(self) -> None:
        """Put what was read into the slots, unless rows have changed since it began."""
        slots = self._slots
        for part, mine, out in zip(self._parts, self._own, self._rows, strict=True):
            # Of a plane that was written to meanwhile they are forgotten by the next call.
            if slots.epoch == self._epoch and out.dtype == part.plane.dtype:
                fresh = self._known & self.missing & ~mine
                if out.is_cuda:
                    part.write(torch.where(fresh, self._places, slots.capacity), out, fresh, dirty=False)
                elif bool(fresh.any()):
                    part.write(self._places[fresh], taken(out, fresh), fresh[fresh], dirty=False)


def write_through(slots: Slots, planes: list[Tensor], ids: Tensor, rows: list[Tensor], unsorted: bool) -> None:
    """Write `rows` (n, width_i) of `planes` to the slots of `ids` (n,), and those of ids without a slot to the planes."""
    slots.notice()
    slots.epoch += 1
    # Those that have slots by tensors that count changes by themselves: after an interrupt the planes are as they were noted.
    to = [plane.data for plane in planes] if slots.capacity else planes
    if are_suitable(slots, planes, rows):
        move(slots, "scatter", planes, ids, rows, unsorted)
        return
    if not slots.may_have(ids):
        slots.inner.scatter(to, ids, rows, unsorted)
        return
    places, known = slots.find(ids)
    parts = [slots.of(plane) for plane in planes]
    _write_others(slots, to, ids, rows, existing(ids, planes[0]) & ~known, unsorted)
    some = ids.device.type == "cpu" and not bool(known.all())
    for part, source in zip(parts, rows, strict=True):
        if some:
            part.write(places[known], taken(source, known), known[known], dirty=True)
        else:
            part.write(places, source, known, dirty=True)


def _write_others(
    slots: Slots, planes: list[Tensor], ids: Tensor, rows: list[Tensor], others: Tensor, unsorted: bool
) -> None:
    """Write the rows where `others` (n,) says so to the planes."""
    if slots.inner.takes_padding:
        places = others.cumsum(0) - 1
        there = compacted(ids, others, places, len(planes[0]))
        order = compacted(torch.arange(len(ids), device=ids.device), others, places, 0)
    else:
        order = others.nonzero().flatten()
        there = ids[order]
        if not len(order):
            return
    slots.inner.scatter(planes, there, [taken(source, order) for source in rows], unsorted)


def existing(ids: Tensor, plane: Tensor) -> Tensor:
    """Tell which of `ids` (n,) are rows of `plane`: on the host all are."""
    if ids.device.type == "cpu":
        return torch.ones_like(ids, dtype=torch.bool)
    return (ids >= 0) & (ids < len(plane))


def compacted(values: Tensor, chosen: Tensor, places: Tensor, filler: int) -> Tensor:
    """Return those of `values` (n,) that are `chosen`, at their `places`, and then `filler` up to n."""
    count = len(values)
    return values.new_full((count + 1,), filler).scatter_(0, torch.where(chosen, places, count), values)[:count]


def taken(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows of `rows` (n, width) that `chosen` names, by a mask or by numbers."""
    return as_integers(rows)[chosen].view(rows.dtype)
