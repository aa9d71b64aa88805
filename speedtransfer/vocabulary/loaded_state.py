"""The state of a vocabulary as it is saved, by name, read again with every check; it follows changes without a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import check_values
from speedtransfer.errors import InvalidValueError, SpeedtransferError
from speedtransfer.tables import Placement, Table
from speedtransfer.vocabulary.id_index import IdIndex
from speedtransfer.vocabulary.id_rows import FREE, PADDING_ROW, IdRows
from speedtransfer.vocabulary.initial import KINDS, Initial, as_line, check_initial
from speedtransfer.vocabulary.policies import DEPTH

FORMAT = 1
# What the tensor of numbers holds, in this order. Saved states may have a clock in microseconds (`by_time`), and a number of
# `draws`, which are of rules that are gone: both are written as 0.
NUMBERS = (
    "format",
    "clock",
    "by_time",
    "seed",
    "reserved",
    "padding",
    "draws",
    "sightings_added",
    "hand",
    "fresh",
    "admitted_now",
    "admitted_lately",
)
# What a state of several processes has of each, in this order: first how many rows, then how many that had ids before.
OF_SHARE = ("rows", "released", "sightings_added", "hand", "fresh", "admitted_now", "admitted_lately")
# Dtype and dimensions of each tensor, and whether it may be missing.
_SPECS = {
    "ids": (torch.int64, 1, False),
    "last_use": (torch.int64, 1, False),
    "numbers": (torch.int64, 1, False),
    "initial": (torch.float64, 1, False),
    "released": (torch.int64, 1, False),
    "origin": (torch.int64, 1, False),
    "counts": (torch.float32, 1, True),
    "sightings": (None, 2, True),
    "features": (torch.uint8, 1, True),
    "shares": (torch.int64, 2, True),
}


class SavedState(NamedTuple):
    """What :meth:`Vocabulary.state_dict` returned; see `IdRows` for `ids`, `last_use`, `counts` and `released`.

    `sightings` are the counters of the sketch, ``(lines, width)``; `origin` says whose changes it has, and up to which clock
    (see `Changes`); `features`, whose ids they are. Several processes have saved their rows, released ones (numbered in each
    from 0) and sightings one after the other; `shares`, ``(processes, 7)``, has what `OF_SHARE` names of each.
    """

    ids: np.ndarray
    last_use: np.ndarray
    counts: np.ndarray | None
    sightings: np.ndarray | None
    released: np.ndarray
    numbers: dict[str, int]
    initial: Initial
    origin: tuple[int, int]
    features: tuple[str, ...] = ()
    shares: np.ndarray | None = None

    def share(self, rank: int, ranks: int) -> tuple[SavedState, int] | None:
        """Return what process `rank` of `ranks` has saved, and its first row; None: others, or another number, have."""
        if self.shares is None or len(self.shares) != ranks:
            return None
        counts, ends = self.shares[rank], self.shares[:, :2].cumsum(0)[rank]
        rows, released = (slice(end - count, end) for end, count in zip(ends, counts[:2], strict=True))
        own = self._replace(
            ids=self.ids[rows],
            last_use=self.last_use[rows],
            counts=None if self.counts is None else self.counts[rows],
            sightings=None if self.sightings is None else np.split(self.sightings, ranks)[rank],
            released=self.released[released],
            numbers=self.numbers | dict(zip(OF_SHARE, counts.tolist(), strict=True)),
            shares=None,
        )
        return own, int(rows.start)


class LoadPlan(NamedTuple):
    """How a state, or one of a table without a vocabulary, goes into a table, which gets `num_rows` rows.

    `sources` are the rows of `saved` with ids, (n,) int64, `ids` these ids, and `rows` the rows that they get, as `known`
    says; `stays`: all rows of `saved` keep their numbers. The placement is that of all rows that count. `state` is what it was
    made for.
    """

    saved: SavedState | None
    placement: Placement
    num_rows: int
    sources: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    known: IdIndex
    stays: bool
    state: Mapping[str, Any]

    def is_for(self, state: Mapping[str, Any], num_saved: int) -> bool:
        """Tell whether it was made for the same tensors and number of rows."""
        same = state.keys() == self.state.keys() and all(value is self.state[name] for name, value in state.items())
        return same and self.placement.num_saved == num_saved


def packed(numbers: Mapping[str, int], initial: Initial) -> dict[str, Tensor]:
    """Return the part of a state that has numbers, 0 for those that are not given, and the initial values."""
    bits = [numbers.get(name, 0) & (2**64 - 1) for name in NUMBERS]
    kind, *values = as_line(initial)
    return {
        "numbers": torch.from_numpy(np.array(bits, dtype=np.uint64).view(np.int64)),
        "initial": torch.tensor([KINDS.index(kind), *values], dtype=torch.float64, device="cpu"),
    }


def unpack_features(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of features in a state, none if it has none; raise ValueError for other tensors."""
    return tuple(bytes(state["features"].tolist()).decode().split("\0")) if "features" in state else ()


def read_state(state: Mapping[str, Any], about: str) -> SavedState:
    """Return the state in these tensors; InvalidValueError, which names the module `about`: something is malformed."""

    def error(what: str, remedy: str = "load what state_dict() returned") -> InvalidValueError:
        return InvalidValueError(f"{about}: {what}; {remedy}")

    arrays: dict[str, np.ndarray] = {}
    for name, (dtype, dims, optional) in _SPECS.items():
        value = state.get(name)
        if value is None and optional:
            continue
        if value is None:
            raise error(f"the state has no 'vocabulary.{name}'")
        if not isinstance(value, Tensor) or value.dim() != dims or dtype not in (None, value.dtype):
            shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise error(f"'vocabulary.{name}' is {shown} but must be {dtype or 'integers'} of {dims} dimensions")
        check_values(value, f"{about}: 'vocabulary.{name}'")
        arrays[name] = value.detach().cpu().numpy()
    numbers = dict(zip(NUMBERS, arrays["numbers"].tolist(), strict=False))
    if numbers.get("format") != FORMAT or len(arrays["numbers"]) != len(NUMBERS):
        found = f"the state of the vocabulary has format {numbers.get('format')} but this version reads {FORMAT}"
        raise error(found, "update speedtransfer")
    try:
        kind, first, second = arrays["initial"].tolist()
        initial = check_initial((dict(enumerate(KINDS))[kind], first, second) if kind else first)
        features = unpack_features(state)
    except (ValueError, KeyError, SpeedtransferError) as reason:
        raise error(f"'vocabulary.initial' or 'vocabulary.features' is not valid ({reason})") from None
    ids, last_use, counts = arrays["ids"], arrays["last_use"], arrays.get("counts")
    sightings, origin, shares = arrays.get("sightings"), arrays["origin"], arrays.get("shares")
    not_negative = ("clock", "sightings_added", "hand", "admitted_now", "admitted_lately")
    lengths = {len(ids), len(last_use), len(ids if counts is None else counts)}
    wrong = {
        "ids, last_use and counts of different lengths": len(lengths) > 1,
        "an impossible number of reserved rows": not PADDING_ROW
        <= numbers["reserved"]
        <= min(len(ids), PADDING_ROW + 1),
        "impossible times of last use": (last_use < FREE).any(),
        "sightings that are no counters": sightings is not None
        and (sightings.dtype.kind != "u" or not sightings.size or len(sightings) % DEPTH),
        "an origin that is not of two numbers": len(origin) != 2,
        "negative numbers": any(numbers[name] < 0 for name in not_negative)
        or (shares is not None and (shares < 0).any()),
        "other rows than its processes": shares is not None
        and (
            shares.shape[1] != len(OF_SHARE)
            or shares[:, :2].sum(0).tolist() != [len(ids), len(arrays["released"])]
            or (sightings is not None and len(sightings) != DEPTH * len(shares))
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise error(f"the state of the vocabulary has {what}")
    synced = int(origin[0]), int(origin[1])
    return SavedState(ids, last_use, counts, sightings, arrays["released"], numbers, initial, synced, features, shares)


def free_rows(saved: SavedState) -> tuple[np.ndarray, int] | None:
    """Return the rows that had ids before, and the first that never had one; None: what was saved contradicts itself."""
    fresh, released = saved.numbers["fresh"], saved.released
    if not saved.numbers["reserved"] <= fresh <= len(saved.ids):
        return None
    free = np.flatnonzero(saved.last_use[saved.numbers["reserved"] : fresh] == FREE) + saved.numbers["reserved"]
    in_use_later = (saved.last_use[fresh:] != FREE).any()
    return None if in_use_later or not np.array_equal(np.sort(released), free) else (released, fresh)


class KnownIds:
    """Which row each id of a saved state has, in a table that loads it and then follows changes (`Vocabulary.update`).

    Of these at most `num_new` ids are new. `padding` is the id of padding.
    """

    def __init__(self, saved: SavedState, num_new: int) -> None:
        self.numbers, self.initial, self.features = dict(saved.numbers), saved.initial, saved.features
        self.padding = self.numbers["padding"] if self.numbers["reserved"] > PADDING_ROW else None
        self._num_saved = len(saved.ids)
        table = Table(self._num_saved + num_new, 0, memory="pageable", device="cpu")
        self._live = live = IdRows(table, self.padding, saved.counts is not None)
        live.ids[: self._num_saved], live.last_use[: self._num_saved] = saved.ids, saved.last_use
        if live.counts is not None:
            live.counts[: self._num_saved] = saved.counts
        live.rebuild(free=free_rows(saved))
        if self.numbers["by_time"]:
            # Those of earlier versions had no clock.
            self.numbers["by_time"] = self.numbers["clock"] = live.last_use[self.used()] = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return max(self._num_saved, self._live.fresh)

    @property
    def ids(self) -> np.ndarray:
        """By row, the id that it has, or had last."""
        return self._live.ids[: len(self)]

    def used(self) -> np.ndarray:
        """Return the rows with an id, (n,) int64, sorted."""
        return self._live.occupied()

    def follow(self, ids: np.ndarray, gone: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
        """Let ids `gone` (m,) be unknown and return the rows of `ids` (n,), which were used now; new ones get free rows.

        `facts` are the clock, and the seed and initial values of ids without a row, if these are others.
        """
        live, now = self._live, max(self.numbers["clock"], facts["clock"])
        rows = live.index.find(gone)
        live.release(rows[rows >= 0])
        rows = live.index.find(ids)
        new = np.flatnonzero(rows < 0)
        rows[new] = live.take(len(new))
        live.assign(ids[new], rows[new], now)
        live.last_use[rows] = self.numbers["clock"] = now
        if facts["seed"] is not None:
            self.numbers["seed"] = facts["seed"]
        if facts["initial"] is not None:
            self.initial = check_initial(facts["initial"])
        return rows

    def note_uses(self, rows: np.ndarray, last_use: Tensor | None, counts: Tensor | None) -> None:
        """Note when, and how often, `rows` (n,) were used last, ``(n, 1)``, where that is known."""
        if last_use is not None:
            self._live.last_use[rows] = last_use[:, 0].numpy()
        if counts is not None and self._live.counts is not None:
            self._live.counts[rows] = counts[:, 0].numpy()

    def go_on_with(self, numbers: Tensor) -> None:
        """Take the numbers of another state, but for those of its rows."""
        found = dict(zip(NUMBERS, numbers.tolist(), strict=True))
        self.numbers |= {name: n for name, n in found.items() if name not in ("hand", "fresh", "reserved", "padding")}

    def state(self) -> dict[str, Tensor]:
        """Return what has changed of the state, by name."""
        state = {name: plane[: len(self)] for name, plane in self._live.planes().items()}
        released = torch.from_numpy(self._live.released)
        return state | {"released": released} | packed(self.numbers | {"fresh": self._live.fresh}, self.initial)
