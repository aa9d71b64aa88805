"""The state of a vocabulary as it is saved, by name, and read again with every check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, SpeedtransferError
from speedtransfer.tables import Placement
from speedtransfer.vocabulary.id_index import IdIndex
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.initial import KINDS, Initial, as_line, check_initial

_FORMAT = 1
# What the tensor of numbers holds, in this order. Saved states may have a clock in microseconds (`by_time`), and a number of
# `draws`, which are of rules that are gone: both are written as 0.
_NUMBERS = (
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


def pack_numbers(**numbers: int) -> Tensor:
    """Return the tensor of numbers of a state."""
    numbers = {"format": _FORMAT, **numbers}
    bits = [numbers.get(name, 0) & (2**64 - 1) for name in _NUMBERS]
    return torch.from_numpy(np.array(bits, dtype=np.uint64).view(np.int64))


def pack_initial(initial: Initial) -> Tensor:
    """Return what rows begin with as a tensor."""
    kind, *values = as_line(initial)
    return torch.tensor([KINDS.index(kind), *values], dtype=torch.float64, device="cpu")


def unpack_initial(values: Tensor) -> Initial:
    """Return what `pack_initial` was given; raise ValueError, IndexError or SpeedtransferError for other tensors."""
    kind, *numbers = values.tolist()
    if kind not in (0.0, 1.0, 2.0) or len(numbers) != 2:
        raise ValueError(f"no such kind: {values.tolist()}")
    return check_initial(numbers[0] if kind == 0 else (KINDS[int(kind)], *numbers))


def pack_features(names: Sequence[str]) -> Tensor:
    """Return the names of features, of which there are some, as a tensor."""
    return torch.from_numpy(np.frombuffer("\0".join(names).encode(), dtype=np.uint8).copy())


def unpack_features(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of features in a state, none if it has none; raise ValueError for other tensors."""
    return tuple(bytes(state["features"].tolist()).decode().split("\0")) if "features" in state else ()


def read_state(state: Mapping[str, Any], about: str) -> SavedState:
    """Return the state in these tensors; InvalidValueError, which names the module `about`: something is malformed."""
    for name, (dtype, dims, optional) in _SPECS.items():
        if name not in state:
            if optional:
                continue
            raise InvalidValueError(
                f"{about}: the state has no 'vocabulary.{name}'; load all that state_dict() returned"
            )
        value = state[name]
        if not isinstance(value, Tensor) or value.dim() != dims or (dtype is not None and value.dtype != dtype):
            shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidValueError(
                f"{about}: 'vocabulary.{name}' is {shown} but must be a tensor of {dims} dimensions"
                f"{f' of {dtype}' if dtype is not None else ''}; load what state_dict() returned"
            )
    arrays = {name: state[name].detach().cpu().numpy() for name in _SPECS if name in state}
    numbers = dict(zip(_NUMBERS, arrays["numbers"].tolist(), strict=False))
    if numbers.get("format") != _FORMAT or len(arrays["numbers"]) != len(_NUMBERS):
        raise InvalidValueError(
            f"{about}: the state of the vocabulary has format {numbers.get('format')} but this version reads {_FORMAT}; "
            "update speedtransfer"
        )
    # Of any 64 bits.
    numbers["seed"] &= 2**64 - 1
    try:
        initial = unpack_initial(state["initial"])
    except (ValueError, SpeedtransferError) as error:
        raise InvalidValueError(
            f"{about}: 'vocabulary.initial' is not a valid initial value ({error}); load another state"
        ) from None
    try:
        features = unpack_features(state)
    except ValueError:
        raise InvalidValueError(
            f"{about}: 'vocabulary.features' has no names of features; load another state"
        ) from None
    ids, last_use, counts = arrays["ids"], arrays["last_use"], arrays.get("counts")
    reserved = numbers["reserved"]
    wrong = None
    if len(ids) != len(last_use) or (counts is not None and len(counts) != len(ids)):
        wrong = "ids, last_use and counts of different lengths"
    elif not 0 < reserved <= len(ids) or (last_use < FREE).any():
        wrong = "an impossible number of reserved rows, or impossible times of last use"
    elif "sightings" in arrays and (arrays["sightings"].dtype.kind != "u" or not arrays["sightings"].size):
        wrong = f"sightings of {arrays['sightings'].dtype}"
    elif len(arrays["origin"]) != 2:
        wrong = f"an origin of {len(arrays['origin'])} numbers"
    elif any(numbers[name] < 0 for name in ("clock", "sightings_added", "hand", "admitted_now", "admitted_lately")):
        wrong = "negative numbers"
    if wrong:
        raise InvalidValueError(f"{about}: the state of the vocabulary has {wrong}; load what state_dict() returned")
    origin, clock = arrays["origin"].tolist()
    return SavedState(
        ids, last_use, counts, arrays.get("sightings"), arrays["released"], numbers, initial, (origin, clock), features
    )


def free_rows(saved: SavedState) -> tuple[np.ndarray, int] | None:
    """Return the rows that had ids before, and the first that never had one; None: what was saved contradicts itself."""
    fresh, released = saved.numbers["fresh"], saved.released
    if not saved.numbers["reserved"] <= fresh <= len(saved.ids):
        return None
    free = np.flatnonzero(saved.last_use[saved.numbers["reserved"] : fresh] == FREE) + saved.numbers["reserved"]
    in_use_later = (saved.last_use[fresh:] != FREE).any()
    return None if in_use_later or not np.array_equal(np.sort(released), free) else (released.copy(), fresh)
