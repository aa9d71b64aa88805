"""Suite `vocabulary`: unbounded 64-bit ids. What does finding their rows cost, and a step compared with a plain table?

On one core, known ids are mapped to rows and new ones inserted, beside Python's dict and sorted arrays. See
`vocabulary_steps` for lookups and training steps beside a plain table whose ids are rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.benchmark import vocabulary_steps
from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import CaseResult, GroupResult, noise
from speedtransfer.benchmark.vocabulary_steps import PLAIN, names_of
from speedtransfer.benchmark.workload import Lookups
from speedtransfer.drawing import COLOURS, INK, bars
from speedtransfer.errors import HostMemoryError, check_size
from speedtransfer.nn import Embedding
from speedtransfer.units import format_count, format_ratio, format_seconds
from speedtransfer.vocabulary import Vocabulary
from speedtransfer.vocabulary.id_index import IdIndex

NOTE = (
    "Ids are mapped on one core, and drawn uniformly of all that are known: the worst for a cache. What they are looked up in "
    "is made before: sorting is no part of the time. Steps with AdamW take ids by Zipf's law, on all cores; the plain table "
    "has the same rows, and its ids are their numbers. Rows after the first step are compared with those of torch.nn."
)
FIND, INSERT = "find", "insert"
INDEX, VOCABULARY = "IdIndex.{}", "Vocabulary.find_in_training"
LOOP, MAP = "dict, in a loop", "dict, by map"
NUMPY, TORCH, UNIQUE = "np.searchsorted", "torch.searchsorted", "torch.unique + searchsorted"

_SIZES, _QUICK_SIZES = (1_000_000, 10_000_000), (2000,)
_BATCH, _QUICK_BATCH = 65_536, 500
_BATCHES = 32
_DIM = 8
_DICT_BYTES = 130  # measured, for an entry of a dict with its two integers


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make groups for finding and inserting ids, for steps and for lookups; `rows` is the number of known ids."""
    sizes = (check_size(rows, "rows", 2),) if rows is not None else _QUICK_SIZES if quick else _SIZES
    batch = _QUICK_BATCH if quick else _BATCH
    effort = {"budget_s": 2.0 if quick else 12.0}
    found = []
    for size in sizes:
        make: Callable[[], list[Case]] = functools.partial(_find_cases, size, batch, seed)
        params = {"kind": FIND, "rows": size, "ids": batch}
        found.append(Group(f"map {batch:,} known ids of {size:,}, one core", make, params, effort=effort))
        make = functools.partial(_insert_cases, size, batch)
        params = {"kind": INSERT, "rows": size, "ids": size}
        title = f"give {size:,} new ids rows, {batch:,} at a time, one core"
        found.append(Group(title, make, params, effort=effort))
    return found + vocabulary_steps.groups(device, quick, rows, seed)


@contextmanager
def one_core() -> Iterator[None]:
    """Run torch, and compiled functions of this library, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- known ids ------------------------------------------------------------------------------------------------------------


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

    def case(name: str, find: Callable[[Tensor], Any], **others: Any) -> Case:
        return Case.of(name, Lookups(find, batches, one_core), **others)

    in_training = Lookups(table.insert, [(wanted, given[at]) for wanted, at in batches], one_core)
    return [
        case(INDEX.format(FIND), lambda wanted: index.find(wanted.numpy()), role="ours"),
        Case.of(VOCABULARY, in_training, "ours"),
        case(NUMPY, lambda wanted: order[np.searchsorted(sorted_ids, wanted.numpy())]),
        case(TORCH, lambda wanted: places[torch.searchsorted(values, wanted)]),
        case(UNIQUE, unique),
        case(LOOP, lambda wanted: np.array([known[id] for id in wanted.tolist()]), error=error),
        case(MAP, lambda wanted: np.fromiter(map(known.get, wanted.tolist()), np.int64, len(wanted)), error=error),
    ]


def _dict_without_room(rows: int) -> HostMemoryError | None:
    return Room({"host": host_room()}).take(rows * _DICT_BYTES)


# --- new ids --------------------------------------------------------------------------------------------------------------


class _Dict:
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
    """An index that does not know in advance how many ids will come."""

    def __init__(self) -> None:
        self._index = IdIndex()

    def insert(self, ids: Tensor) -> None:
        first = len(self._index)
        self._index.insert(ids.numpy(), np.arange(first, first + len(ids)))

    def find(self, ids: Tensor) -> Any:
        return self._index.find(ids.numpy())


class _Table(_Dict):
    """A table, where new ids also get initial values."""

    def __init__(self, rows: int) -> None:
        self._vocabulary = Vocabulary(initial=0.0, seed=0)
        place: dict[str, Any] = {"idle": "lazy", "device": "cpu", "memory": "pageable"}
        self._embedding = Embedding(rows, _DIM, vocabulary=self._vocabulary, **place)

    def insert(self, ids: Tensor) -> np.ndarray:
        return self._vocabulary.find_in_training(ids.numpy())

    def find(self, ids: Tensor) -> Any:
        return self._vocabulary.find(ids.numpy())


class _Filling:
    """Inserts batches of new ids into a container that starts empty."""

    def __init__(self, make: Callable[[], _Dict], batches: list[Tensor]) -> None:
        self._make, self._batches = make, batches
        self.filled: _Dict | None = None

    def before(self) -> None:
        # There may be room for one only.
        self.filled = None
        self.filled = self._make()

    def run(self) -> None:
        assert self.filled is not None
        with one_core():
            for ids in self._batches:
                self.filled.insert(ids)

    def check(self) -> None:
        assert self.filled is not None
        ids = torch.cat(self._batches)
        rows = torch.as_tensor(self.filled.find(ids))
        assert rows.min() >= 0, "an id has no row"
        assert len(rows.unique()) == len(ids), "two ids have the same row"


def _insert_cases(rows: int, batch: int) -> list[Case]:
    batches = list(names_of(torch.arange(rows)).split(batch))
    error = _dict_without_room(rows)
    return [
        Case.of(INDEX.format(INSERT), _Filling(_Index, batches), "ours"),
        Case.of(f"{VOCABULARY}, {_DIM} columns", _Filling(functools.partial(_Table, rows), batches), "ours"),
        Case.of(LOOP, _Filling(_Dict, batches), error=error),
        Case.of(MAP, _Filling(_DictAtOnce, batches), error=error),
    ]


# --- report -------------------------------------------------------------------------------------------------------------


def sentences(groups: list[GroupResult]) -> list[str]:
    """Compare ids a second, or times with those of a plain table, for each group."""
    return [found for group in groups if (found := (_rates if _is_rate(group) else _times)(group))]


def _is_rate(group: GroupResult) -> bool:
    return group.params["kind"] in (FIND, INSERT)


def _rate(group: GroupResult, case: CaseResult) -> float:
    return float(group.params["ids"]) / case.median_s


def _rates(group: GroupResult) -> str:
    ours = [case for case in group.ran if case.role == "ours"]
    others = sorted((case for case in group.ran if case.role != "ours"), key=lambda case: case.median_s)
    if not ours:
        return ""
    shown = ", ".join(f"{case.name} {format_count(_rate(group, case))} ids a second" for case in ours)
    beside = ", ".join(f"{case.name} {format_count(_rate(group, case))}" for case in others)
    return f"{group.title}: {shown}" + (f"; {beside}" if beside else "") + noise(*group.ran)


def _times(group: GroupResult) -> str:
    plain = group.by_name.get(PLAIN)
    others = [case for case in group.ran if case is not plain]
    if plain is None or not others:
        return ""
    ratios = ", ".join(f"{case.name} {format_ratio(case.median_s / plain.median_s)}" for case in others)
    return f"{group.title}: of the {format_seconds(plain.median_s)} of the {PLAIN}: {ratios}" + noise(*group.ran)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a bar for each method: ids a second, or the time."""
    figure = make_figure(7.5, 0.5 + sum(0.75 + 0.27 * len(group.ran) for group in groups))
    ratios = [1 + len(group.ran) for group in groups]
    panels = figure.subplots(len(groups), 1, height_ratios=ratios, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        cases, is_rate = group.ran, _is_rate(group)
        values = [_rate(group, case) / 1e6 if is_rate else 1e3 * case.median_s for case in cases]
        texts = [f"{v:.3g}" if is_rate else format_seconds(c.median_s) for v, c in zip(values, cases, strict=True)]
        colours = [COLOURS[0 if c.role == "ours" else 5 if c.name == PLAIN else 6] for c in cases]
        bars(axes, [case.name for case in cases], values, texts, colours, 0.7, 0.15, 8)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.tick_params(labelsize=8)
        unit = "million ids a second, more is better" if is_rate else "milliseconds, less is better"
        axes.set_title(f"{group.title}\n{unit}", fontsize=8.5, color=INK, loc="left", parse_math=False)
    return figure
