"""The state of a vocabulary as it is saved, by name, and read again with every check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import check_values
from speedtransfer.errors import InvalidValueError, SpeedtransferError
from speedtransfer.tables import Placement
from speedtransfer.vocabulary.id_index import IdIndex
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.initial import KINDS, Initial, check_initial

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
}


class SavedState(NamedTuple):
    """What :meth:`Vocabulary.state_dict` returned; see `IdRows` for `ids`, `last_use`, `counts` and `released`.

    `sightings` are the counters of the sketch, ``(depth, width)``; `origin` says whose changes it has, and up to which clock
    (see `Changes`); `features`, whose ids they are.
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


class LoadPlan(NamedTuple):
    """How a state, or one of a table without a vocabulary, goes into a table, which gets `num_rows` rows.

    `sources` are the saved rows with ids, (n,) int64, `ids` these ids, and `rows` the rows that they get, as `known` says; the
    placement is that of all rows that count. `state` is what it was made for.
    """

    saved: SavedState | None
    placement: Placement
    num_rows: int
    sources: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    known: IdIndex
    state: Mapping[str, Any]

    def is_for(self, state: Mapping[str, Any], num_saved: int) -> bool:
        """Tell whether it was made for the same tensors and number of rows."""
        same = state.keys() == self.state.keys() and all(value is self.state[name] for name, value in state.items())
        return same and self.placement.num_saved == num_saved


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
    sightings, origin = arrays.get("sightings"), arrays["origin"]
    not_negative = ("clock", "sightings_added", "hand", "admitted_now", "admitted_lately")
    lengths = {len(ids), len(last_use), len(ids if counts is None else counts)}
    wrong = {
        "ids, last_use and counts of different lengths": len(lengths) > 1,
        "an impossible number of reserved rows": not 0 < numbers["reserved"] <= len(ids),
        "impossible times of last use": (last_use < FREE).any(),
        "sightings that are no counters": sightings is not None and (sightings.dtype.kind != "u" or not sightings.size),
        "an origin that is not of two numbers": len(origin) != 2,
        "negative numbers": any(numbers[name] < 0 for name in not_negative),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise error(f"the state of the vocabulary has {what}")
    synced = int(origin[0]), int(origin[1])
    return SavedState(ids, last_use, counts, sightings, arrays["released"], numbers, initial, synced, features)


def free_rows(saved: SavedState) -> tuple[np.ndarray, int] | None:
    """Return the rows that had ids before, and the first that never had one; None: what was saved contradicts itself."""
    fresh, released = saved.numbers["fresh"], saved.released
    if not saved.numbers["reserved"] <= fresh <= len(saved.ids):
        return None
    free = np.flatnonzero(saved.last_use[saved.numbers["reserved"] : fresh] == FREE) + saved.numbers["reserved"]
    in_use_later = (saved.last_use[fresh:] != FREE).any()
    return None if in_use_later or not np.array_equal(np.sort(released), free) else (released.copy(), fresh)
