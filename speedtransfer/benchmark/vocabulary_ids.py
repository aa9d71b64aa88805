"""Known ids mapped to rows, and new ones given rows, beside Python's dict and sorted arrays; on one core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.vocabulary_steps import names_of
from speedtransfer.errors import HostMemoryError, check_size
from speedtransfer.nn import Embedding
from speedtransfer.vocabulary import Vocabulary
from speedtransfer.vocabulary.id_index import IdIndex

FIND, INSERT = "find", "insert"
INDEX, VOCABULARY = "IdIndex.{}", "Vocabulary.find_in_training"
LOOP, MAP = "dict, in a loop", "dict, by map"
NUMPY, TORCH, UNIQUE = "np.searchsorted", "torch.searchsorted", "torch.unique + searchsorted"

_SIZES, _QUICK_SIZES = (1_000_000, 10_000_000), (2000,)
_BATCH, _QUICK_BATCH = 65_536, 500
_BATCHES = 32
_DIM = 8  # of the tables whose ids are mapped
_DICT_BYTES = 130  # of an entry of a dict with its two integers, as measured


def groups(quick: bool, rows: int | None, seed: int) -> list[Group]:
    """Return what is compared: ids that are mapped, and ids that are given rows, for each number of them."""
    sizes = (check_size(rows, "rows", 2),) if rows is not None else _QUICK_SIZES if quick else _SIZES
    batch = _QUICK_BATCH if quick else _BATCH
    effort = {"budget_s": 2.0 if quick else 12.0}
    found = []
    for size in sizes:
        for kind, make, title in (
            (FIND, _find_cases, f"map {batch:,} known ids of {size:,}, one core"),
            (INSERT, _insert_cases, f"give {size:,} new ids rows, {batch:,} at a time, one core"),
        ):
            params = {"kind": kind, "rows": size, "ids": batch if kind == FIND else size}
            found.append(Group(title, functools.partial(make, size, batch, seed), params, effort=effort))
    return found


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch, and the compiled functions of this library, run on one thread within."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Mapping:
    """Ids are mapped to rows by a function, a batch after the other."""

    def __init__(self, find: Callable[[Tensor], Any], batches: list[tuple[Tensor, Tensor]]) -> None:
        self._find, self._turn = find, cycle(batches)

    def run(self) -> Any:
        """Map the next batch."""
        with one_core():
            return self._find(self._turn()[0])

    def check(self) -> None:
        """Raise AssertionError where a row is not that of the id."""
        ids, rows = self._turn()
        with one_core():
            found = torch.as_tensor(self._find(ids))
        assert torch.equal(found, rows), "the rows found are not those of the ids"


def _find_cases(rows: int, batch: int, seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    ids, numbers = names_of(torch.arange(rows)), torch.arange(rows)
    drawn = [torch.randint(rows, (batch,), generator=generator) for _ in range(_BATCHES)]
    batches = [(ids[each], each) for each in drawn]
    index, table = IdIndex.of(ids.numpy(), numbers.numpy()), _Table(rows)
    values, places = ids.sort()
    sorted_ids, order = values.numpy(), places.numpy()
    with one_core():
        given = torch.from_numpy(table.insert(ids))

    def unique(wanted: Tensor) -> Tensor:
        distinct, inverse = torch.unique(wanted, return_inverse=True)
        return places[torch.searchsorted(values, distinct)][inverse]

    error = _dict_without_room(rows)
    known = {} if error else dict(zip(ids.tolist(), range(rows), strict=True))
    ways: dict[str, Callable[[Tensor], Any]] = {
        NUMPY: lambda wanted: order[np.searchsorted(sorted_ids, wanted.numpy())],
        TORCH: lambda wanted: places[torch.searchsorted(values, wanted)],
        UNIQUE: unique,
    }
    dicts: dict[str, Callable[[Tensor], Any]] = {
        LOOP: lambda wanted: np.array([known[id] for id in wanted.tolist()]),
        MAP: lambda wanted: np.fromiter(map(known.get, wanted.tolist()), np.int64, len(wanted)),
    }
    return [
        Case.of(INDEX.format(FIND), Mapping(lambda wanted: index.find(wanted.numpy()), batches), "ours"),
        Case.of(VOCABULARY, Mapping(table.insert, [(wanted, given[at]) for wanted, at in batches]), "ours"),
        *(Case.of(name, Mapping(way, batches)) for name, way in ways.items()),
        *(Case.of(name, Mapping(way, batches), error=error) for name, way in dicts.items()),
    ]


def _dict_without_room(rows: int) -> HostMemoryError | None:
    """Return why there can be no dict of `rows` ids, if so."""
    return Room({"host": host_room()}).take(rows * _DICT_BYTES)


class _Dict:
    """Ids get rows in a dict."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def insert(self, ids: Tensor) -> Any:
        for id in ids.tolist():
            if id not in self.known:
                self.known[id] = len(self.known)

    def find(self, ids: Tensor) -> Any:
        return [self.known[id] for id in ids.tolist()]


class _DictAtOnce(_Dict):
    def insert(self, ids: Tensor) -> None:
        first = len(self.known)
        self.known.update(zip(ids.tolist(), range(first, first + len(ids)), strict=True))


class _Index(_Dict):
    """In an index, which does not know either how many will come."""

    def __init__(self) -> None:
        self._index = IdIndex()

    def insert(self, ids: Tensor) -> None:
        first = len(self._index)
        self._index.insert(ids.numpy(), np.arange(first, first + len(ids)))

    def find(self, ids: Tensor) -> Any:
        return self._index.find(ids.numpy())


class _Table(_Dict):
    """In a table, where they also get their initial values."""

    def __init__(self, rows: int) -> None:
        self._vocabulary = Vocabulary(initial=0.0, seed=0)
        place: dict[str, Any] = {"idle": "lazy", "device": "cpu", "memory": "pageable"}
        self._embedding = Embedding(rows, _DIM, vocabulary=self._vocabulary, **place)

    def insert(self, ids: Tensor) -> np.ndarray:
        return self._vocabulary.find_in_training(ids.numpy())

    def find(self, ids: Tensor) -> Any:
        return self._vocabulary.find(ids.numpy())


class Filling:
    """New ids get rows, a batch after the other, until all have one."""

    def __init__(self, make: Callable[[], _Dict], batches: list[Tensor]) -> None:
        self._make, self._batches = make, batches
        self.filled: _Dict | None = None

    def before(self) -> None:
        """Begin with no ids at all."""
        # Before the next is made: there may be room for one.
        self.filled = None
        self.filled = self._make()

    def run(self) -> None:
        """Insert all."""
        assert self.filled is not None
        with one_core():
            for ids in self._batches:
                self.filled.insert(ids)

    def check(self) -> None:
        """Raise AssertionError unless each id has a row of its own."""
        assert self.filled is not None
        ids = torch.cat(self._batches)
        rows = torch.as_tensor(self.filled.find(ids))
        assert rows.min() >= 0, "an id has no row"
        assert len(rows.unique()) == len(ids), "two ids have the same row"


def _insert_cases(rows: int, batch: int, seed: int) -> list[Case]:
    del seed  # it does not matter which ids they are
    batches = list(names_of(torch.arange(rows)).split(batch))
    error = _dict_without_room(rows)
    return [
        Case.of(INDEX.format(INSERT), Filling(_Index, batches), "ours"),
        Case.of(f"{VOCABULARY}, {_DIM} columns", Filling(functools.partial(_Table, rows), batches), "ours"),
        Case.of(LOOP, Filling(_Dict, batches), error=error),
        Case.of(MAP, Filling(_DictAtOnce, batches), error=error),
    ]
