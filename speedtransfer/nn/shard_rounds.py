"""Lookups in tables that processes share out, made one after the other, in one exchange.

A model that is watched asks when its forward begins for what the forward before looked up by parts of its arguments. Elsewhere
the first lookup of a round asks for what the round before looked up by parts of the same tensor of ids, such as its columns.
The others take what has come. The processes tell each other whether they all ask for the same: if not, each lookup asks alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from speedtransfer.nn.fused_lookup import FusedPart, is_read_together, look_up_together
from speedtransfer.nn.rounds import Place, may_have_parts
from speedtransfer.nn.ticket import Ticket, open_tickets
from speedtransfer.nn.tracing import in_transform
from speedtransfer.ranks import Exchange

log = logging.getLogger(__name__)

# How many ids come from each rank, for each table.
Counts: TypeAlias = list[list[int]]


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

    beside: Tensor
    version: int
    values: Tensor
    ticket: Ticket
    # None: by the arguments of a model.
    asked: _Asked | None

    @classmethod
    def of(cls, ids: Tensor, ticket: Ticket, asked: _Asked | None = None) -> _Came:
        """Return that of `ids` as they are now."""
        return cls(ids, ids._version, ids.clone(), ticket, asked)

    def is_for(self, ids: Tensor) -> bool:
        """Tell whether `ids` are those, as they were."""
        beside = self.beside
        if ids.data_ptr() != beside.data_ptr() or ids.shape != beside.shape or ids.dtype != beside.dtype:
            return False
        # NumPy writes unseen.
        return ids._version == self.version and torch.equal(ids, self.values)


class _Round:
    """The lookups of a round; one ends where a module looks up again."""

    def __init__(self, expected: dict[weakref.ref[Any], _Others], came: Any = ()) -> None:
        self.modules = set[weakref.ref[Any]]()
        # By the memory of their ids: the first, and all.
        self.firsts = dict[int, Tensor]()
        self.asked = dict[int, list[_Asked]]()
        # What is expected after the first lookup; what has come for modules that are there and was not taken.
        self.expected = expected
        self.came: weakref.WeakKeyDictionary[Any, _Came] = weakref.WeakKeyDictionary(came)

    def next(self) -> _Round:
        """Return the round after this, in which what this one was asked is expected."""
        expected = dict[weakref.ref[Any], _Others]()
        for memory, (first, *others) in self.asked.items():
            if not others:
                continue
            found, strides = self.expected.get(first.module), self.firsts[memory].stride()
            if found is None or found[:2] != (strides, others):
                log.info(
                    "lookups of %d modules by parts of one tensor of ids are made at once from now on", 1 + len(others)
                )
                found = _Others(strides, others, _number([first, *others]))
            expected[first.module] = found
        return _Round(expected, {module: each for module, each in self.came.items() if each.asked is None})

    def ask(self, module: Any, reference: weakref.ref[Any], ids: Tensor) -> Any:
        """Return a ticket for the ids of a module, or the ids."""
        self.modules.add(reference)
        memory = ids.untyped_storage().data_ptr()
        first = self.firsts.setdefault(memory, ids)
        came = self.came.pop(module, None)
        if came is not None and came.is_for(ids):
            if came.asked is not None:
                self.asked.setdefault(memory, []).append(came.asked)
            return came.ticket
        # Those of one example lie like a row and like a column: of two they would lie elsewhere.
        place = None if ids.shape[0] == 1 else Place.of(ids, first)
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

        def agree(parts: list[FusedPart], sends: Tensor) -> Counts | None:
            training = torch.is_grad_enabled() and parts[0].training
            return parts[0].handle.owners.lookups.agree_on_counts(sends, training, others.named)

        tickets = look_up_together(pairs, agree)
        if tickets is None:
            return ids
        for each, ticket, (other, beside) in zip(others.asked, tickets[1:], pairs[1:], strict=True):
            self.came[other] = _Came.of(beside, ticket, each)
        return tickets[0]


def _number(asked: Iterable[_Asked | _Argument]) -> int:
    """Return a number, not 0, that is the same in all processes for lookups of the same tables in the same places."""
    told = []
    for reference, *where in asked:
        module = reference()
        told.append(f"{None if module is None else module._handle} {getattr(module, 'number', '')} {where}")
    return 1 + zlib.crc32("; ".join(told).encode())


class _Argument(NamedTuple):
    """A module that has looked up by a part of an argument of the model that it is in: of one row of it, if `in_row`.

    `strides` are those of the argument; None: it was contiguous.
    """

    module: weakref.ref[Any]
    name: str
    in_row: bool
    place: Place
    strides: tuple[int, ...] | None

    def ids_in(self, arguments: dict[str, Tensor]) -> Tensor | None:
        """Return the ids that the module is expected to look up, if they are there."""
        found = arguments.get(self.name)
        if found is None or _strides(found) != self.strides:
            return None
        return self.place.beside(found[0] if self.in_row else found)


class _Forwards:
    """The forwards of a model, which begin with a meeting of the processes if the one before has looked up several times."""

    def __init__(self) -> None:
        # The arguments of the last forward, and the first in each memory; how many lookups it made, and those by parts of
        # the arguments, of which some are named by a number.
        self._arguments = dict[str, Tensor]()
        self._memories = dict[int, str]()
        self._numbers = dict[Exchange, tuple[list[_Argument], int]]()
        self._lookups = dict[Exchange, int]()
        self._asked = dict[Exchange, dict[weakref.ref[Any], _Argument]]()

    def begin(self, arguments: dict[str, Tensor]) -> None:
        """Ask for what the forward before has looked up."""
        lookups, asked = self._lookups, self._asked
        self._arguments, self._lookups, self._asked, self._memories = arguments, {}, {}, {}
        for name, argument in arguments.items():
            self._memories.setdefault(argument.untyped_storage().data_ptr(), name)
        for exchange, count in lookups.items():
            if count > 1 and not exchange.is_destroyed():
                now = _rounds.of[exchange] = _rounds.of.get(exchange, _Round({})).next()
                now.came.clear()
                self._ask(exchange, now, list(asked.get(exchange, {}).values()))

    def _ask(self, exchange: Exchange, now: _Round, asked: list[_Argument]) -> None:
        found = [(each.module(), each.ids_in(self._arguments)) for each in asked]
        pairs = [(module, ids) for module, ids in found if module is not None and ids is not None]
        told = False

        def agree(_: Any, sends: Tensor) -> Counts | None:
            nonlocal told
            told = True
            if self._numbers.get(exchange, (None,))[0] != asked:
                self._numbers[exchange] = asked, _number(asked)
            return exchange.agree_on_counts("begins a forward", sends, self._numbers[exchange][1])

        if 1 < len(pairs) == len(found) and all(itertools.starmap(_may_ask, pairs)):
            for (module, ids), ticket in zip(pairs, look_up_together(pairs, agree) or (), strict=False):
                now.came[module] = _Came.of(ids, ticket)
        if not told:
            exchange.agree_on_counts("begins a forward", torch.zeros(exchange.ranks, 1, device="cpu"), 0)

    def note(self, exchange: Exchange, reference: weakref.ref[Any], ids: Tensor | None) -> None:
        """Take note of a lookup, by ids that may be asked for before their turn."""
        self._lookups[exchange] = self._lookups.get(exchange, 0) + 1
        if ids is None:
            return
        name = self._memories.get(ids.untyped_storage().data_ptr())
        if name is None:
            return
        argument = self._arguments[name]
        in_row = argument.shape[0] != ids.shape[0]
        # In a square of ids, or of one example, a row lies like a column.
        is_either = ids.shape[0] == 1 or (not in_row and argument.dim() > 1 and argument.shape[1:] == ids.shape)
        of_rows = in_row and argument.dim() < 2
        place = None if is_either or of_rows else Place.of(ids, argument[0] if in_row else argument)
        if place is not None:
            found = _Argument(reference, name, in_row, place, _strides(argument))
            self._asked.setdefault(exchange, {}).setdefault(reference, found)


def _strides(ids: Tensor) -> tuple[int, ...] | None:
    return None if ids.is_contiguous() else ids.stride()


def watch(model: nn.Module) -> None:
    """Have the forward of `model` ask for the rows of all its tables that processes share out in one exchange."""
    if _begin_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin_forward, with_kwargs=True)


def _begin_forward(model: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or in_transform():
        return
    leaves, _ = tree_flatten_with_path((args, kwargs))
    forwards = _rounds.forwards.get(model)
    if forwards is None:
        forwards = _rounds.forwards[model] = _Forwards()
    _rounds.now = weakref.ref(forwards)
    forwards.begin({keystr(path): leaf for path, leaf in leaves if may_have_parts(leaf)})


class _Rounds(threading.local):
    """The rounds of a thread by the processes that the lookups ask, and the forwards of models, the last of which is `now`."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Exchange, _Round] = weakref.WeakKeyDictionary()
        self.forwards: weakref.WeakKeyDictionary[nn.Module, _Forwards] = weakref.WeakKeyDictionary()
        self.now: Callable[[], _Forwards | None] = lambda: None


_rounds = _Rounds()


def ask(module: Any, ids: Any) -> Any:
    """Return what `module`, whose rows other processes have too, is to look up in the place of `ids`: these, or a ticket."""
    exchange, reference, forwards = module._handle.owners.exchange, weakref.ref(module), _rounds.now()
    may_ask = _may_ask(module, ids)
    if forwards is not None:
        forwards.note(exchange, reference, ids if may_ask else None)
    if not may_ask:
        return ids
    now = _rounds.of.get(exchange)
    if now is None or reference in now.modules:
        now = _rounds.of[exchange] = _Round({}) if now is None else now.next()
    return now.ask(module, reference, ids)


def _may_ask(module: Any, ids: Any) -> bool:
    """Tell whether rows may be asked for before or after their turn."""
    if not may_have_parts(ids) or ids.is_inference() or in_transform():
        return False
    handle = module._handle
    if handle is None or handle.owners.has_whole or not is_read_together(module):
        return False
    return not (handle.reads_ahead and open_tickets(handle))
