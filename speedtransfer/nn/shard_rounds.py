"""Lookups in tables that processes share out, made one after the other, in one exchange.

The first of a round asks for what the round before asked for by parts of the same tensor of ids, such as its columns; the
others take what has come. The processes tell each other whether they all ask for the same: if not, each lookup asks by itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.nn.fused_lookup import is_read_together, look_up_together
from speedtransfer.nn.lookup_ops import INTEGERS
from speedtransfer.nn.rounds import Place
from speedtransfer.nn.ticket import Ticket, open_tickets
from speedtransfer.ranks import Exchange

log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """A module that has looked up, and where its ids lay beside those of the first of its round."""

    module: weakref.ref[Any]
    place: Place


class _Others(NamedTuple):
    """What is asked together with the lookup of a module by ids of these strides, and a number that names it."""

    strides: tuple[int, ...]
    asked: list[_Asked]
    named: int


class _Came(NamedTuple):
    """Rows that have come before their turn: for ids that lie as `beside`, had been changed so often, and had these values."""

    asked: _Asked
    beside: Tensor
    version: int
    values: Tensor
    ticket: Ticket

    def is_for(self, ids: Tensor) -> bool:
        beside = self.beside
        if ids.data_ptr() != beside.data_ptr() or ids.shape != beside.shape or ids.dtype != beside.dtype:
            return False
        # NumPy writes unseen.
        return ids._version == self.version and torch.equal(ids, self.values)


class _Round:
    """The lookups of a round; one ends where a module looks up again."""

    def __init__(self, expected: dict[weakref.ref[Any], _Others]) -> None:
        self.modules = set[weakref.ref[Any]]()
        # By the memory of their ids: the first, and all.
        self.firsts = dict[int, Tensor]()
        self.asked = dict[int, list[_Asked]]()
        # What is expected after the first lookup; what has come for modules that are there and was not taken.
        self.expected = expected
        self.came: weakref.WeakKeyDictionary[Any, _Came] = weakref.WeakKeyDictionary()

    def next(self) -> _Round:
        """Return the round after this, in which what this one was asked is expected."""
        expected = dict[weakref.ref[Any], _Others]()
        for memory, asked in self.asked.items():
            if len(asked) > 1:
                before, strides = self.expected.get(asked[0].module), self.firsts[memory].stride()
                known = before is not None and before[:2] == (strides, asked[1:])
                expected[asked[0].module] = before if known and before is not None else _named(strides, asked)
        return _Round(expected)

    def ask(self, module: Any, reference: weakref.ref[Any], ids: Tensor) -> Any:
        """Return a ticket for the ids of a module, or the ids."""
        self.modules.add(reference)
        memory = ids.untyped_storage().data_ptr()
        first = self.firsts.setdefault(memory, ids)
        came = self.came.pop(module, None)
        if came is not None and came.is_for(ids):
            self.asked.setdefault(memory, []).append(came.asked)
            return came.ticket
        place = Place.of(ids, first)
        if place is None:
            return ids
        self.asked.setdefault(memory, []).append(_Asked(reference, place))
        others = self.expected.get(reference) if first is ids else None
        # Where the ids of one process lie otherwise than before, the others would not be where they are expected.
        return ids if others is None or others.strides != ids.stride() else self._together(module, ids, others)

    def _together(self, module: Any, ids: Tensor, others: _Others) -> Any:
        pairs = [(module, ids)]
        for each in others.asked:
            other, beside = each.module(), each.place.beside(ids)
            if other is None or beside is None or not _may_ask(other, beside):
                return ids
            pairs.append((other, beside))
        tickets = look_up_together(pairs, others.named)
        if tickets is None:
            return ids
        for each, ticket, (other, beside) in zip(others.asked, tickets[1:], pairs[1:], strict=True):
            self.came[other] = _Came(each, beside, beside._version, beside.clone(), ticket)
        return tickets[0]


def _named(strides: tuple[int, ...], asked: list[_Asked]) -> _Others:
    modules = [each.module() for each in asked]
    tables = [
        f"{None if module is None else module._handle} {getattr(module, 'number', '')} {each.place}"
        for module, each in zip(modules, asked, strict=True)
    ]
    log.info("lookups of %d modules by parts of one tensor of ids are made in one exchange from now on", len(asked))
    return _Others(strides, asked[1:], 1 + zlib.crc32("; ".join(tables).encode()))


class _Rounds(threading.local):
    """The rounds of a thread, by the processes that the lookups ask."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Exchange, _Round] = weakref.WeakKeyDictionary()


_rounds = _Rounds()


def ask(module: Any, ids: Any) -> Any:
    """Return what `module`, whose rows other processes have too, is to look up in the place of `ids`: these, or a ticket."""
    if not _may_ask(module, ids):
        return ids
    exchange, reference = module._handle.owners.exchange, weakref.ref(module)
    now = _rounds.of.get(exchange)
    if now is None or reference in now.modules:
        now = _rounds.of[exchange] = _Round({}) if now is None else now.next()
    return now.ask(module, reference, ids)


def _may_ask(module: Any, ids: Any) -> bool:
    """Tell whether rows may be asked for before or after their turn."""
    if type(ids) is not Tensor or ids.dtype not in INTEGERS or not ids.dim() or not ids.numel() or ids.is_inference():
        return False
    handle = module._handle
    if handle is None or handle.owners.has_whole or not is_read_together(module):
        return False
    return not (handle.reads_ahead and open_tickets(handle))
