"""Which engine is fastest for how many rows of which size: measured once on a machine, kept in a file, chosen from later."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from speedtransfer.cuda import cuda_status
from speedtransfer.system import cache_folder, check_writable, cpu_model, replace_file
from speedtransfer.untrusted import MAX_JSON_BYTES, open_file, parse_json
from speedtransfer.version import __version__

Direction = Literal["gather", "scatter"]
DIRECTIONS: tuple[Direction, ...] = ("gather", "scatter")
# Of the smallest plane that it is measured on, far larger than a cache. The larger a table, the fewer of its rows share
# translations of addresses.
PLANE_BYTES = 256 << 20
# What a choice of two engines must win over one for both directions: the host waits once a step for one of them, and cannot
# queue meanwhile. An estimate.
_SWITCH_S = 50e-6
REMEDY = "let SPEEDTRANSFER_CACHE name a folder that you may write to"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """What was measured: seconds of a call by engine, for rows of a plane of that many bytes."""

    direction: Direction
    row_bytes: int
    num_rows: int
    seconds: dict[str, float]
    plane_bytes: int = PLANE_BYTES

    @property
    def fastest(self) -> str:
        """The engine that took the least time."""
        return min(self.seconds, key=self.seconds.__getitem__)


@dataclass
class Calibration:
    """Points of one machine; :meth:`nearest` speaks for the calls between them.

    Attributes
    ----------
    machine : dict
        Device, threads and versions that the points hold for.
    points : list of Point
    copy_bytes_per_s : float
        Rate of one large contiguous copy to the compute device.
    """

    machine: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    copy_bytes_per_s: float = 0.0

    def nearest(
        self, direction: Direction, row_bytes: int, num_rows: int, table_bytes: int = PLANE_BYTES
    ) -> Point | None:
        """Return the point next to a call, by ratio of sizes; None where the direction has none."""

        def distance(point: Point) -> tuple[float, float]:
            table = abs(math.log(point.plane_bytes / max(1, table_bytes)))
            rows = math.log(point.num_rows / max(1, num_rows))
            return table, math.hypot(math.log(point.row_bytes / max(1, row_bytes)), rows)

        same = [point for point in self.points if point.direction == direction and point.seconds]
        return min(same, key=distance, default=None)

    def pair(self, names: Sequence[str], row_bytes: int, num_rows: int, table_bytes: int) -> dict[Direction, str]:
        """Return which of `names` is to gather and which to scatter: those of the smallest sum; the first where none is known.

        A training step gathers and scatters the same rows, so the two belong together.
        """
        seconds = dict[Direction, dict[str, float]]()
        for direction in DIRECTIONS:
            point = self.nearest(direction, row_bytes, num_rows, table_bytes)
            seconds[direction] = {n: point.seconds[n] for n in names if n in point.seconds} if point else {}

        def total(pair: tuple[str, ...]) -> float:
            switch = _SWITCH_S if len(set(pair)) > 1 else 0.0
            return sum(seconds[d].get(name, 0.0) for d, name in zip(DIRECTIONS, pair, strict=True)) + switch

        pairs = itertools.product(*(seconds[direction] or names[:1] for direction in DIRECTIONS))
        best = min(pairs, key=total)
        return dict(zip(DIRECTIONS, best, strict=True))

    def joined(self, newer: Calibration) -> Calibration:
        """Return these points and those of `newer`, which replace these for planes of the same size."""
        sizes = {point.plane_bytes for point in newer.points}
        kept = [point for point in self.points if point.plane_bytes not in sizes]
        return Calibration(newer.machine, [*kept, *newer.points], newer.copy_bytes_per_s)

    def save(self) -> Path:
        """Write the file that :func:`load` finds, whole or not at all, and return its path; StorageError where it cannot."""
        path = check_writable(file_of(self.machine), REMEDY)
        data = {
            "machine": self.machine,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "points": [vars(point) for point in self.points],
        }
        with replace_file(path, REMEDY) as file:
            file.write((json.dumps(data, indent=1) + "\n").encode())
        return path


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return what a calibration depends on."""
    status = cuda_status() if device.type == "cuda" else None  # to ask starts CUDA: not for a table on the CPU
    return {
        "device": status.devices[device.index or 0] if status else None,
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "driver": status.driver if status else None,
        "cupy": status.cupy if status else None,
        "torch": torch.__version__,
        "pinned": os.environ.get("SPEEDTRANSFER_PINNED", "alloc") if status else None,
        "numba": importlib.util.find_spec("numba") is not None,
        "speedtransfer": __version__,
    }


def file_of(machine: Mapping[str, Any]) -> Path:
    """Return where the calibration of `machine` is kept: below $SPEEDTRANSFER_CACHE, or the user's cache folder."""
    name = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"calibration-{name}.json"


_known: dict[torch.device, Calibration | None] = {}


def known(device: torch.device) -> Calibration | None:
    """Return what :func:`load` finds; it looks once a process."""
    if device not in _known:
        _known[device] = load(device)
    return _known[device]


def remember(device: torch.device, calibration: Calibration | None) -> None:
    """Let :func:`known` return `calibration` from now on."""
    _known[device] = calibration


def _checked(point: Point) -> Point:
    """Return a point of a file; raise ValueError where it is none that could have been measured."""
    sizes = point.row_bytes, point.num_rows, point.plane_bytes
    if point.direction not in DIRECTIONS or not all(type(n) is int and 0 < n < 2**63 for n in sizes):
        raise ValueError(f"no point is {point.direction!r:.40} of sizes {sizes!s:.80}")
    if not all(isinstance(name, str) and name.isidentifier() for name in point.seconds):
        raise ValueError("an engine without a name")
    return dataclasses.replace(point, seconds={name: _positive(s) for name, s in point.seconds.items()})


def _positive(value: Any, least: float = 5e-324) -> float:
    if type(value) not in (int, float) or not (least <= value < math.inf):
        raise ValueError(f"{value!r:.40} is no time or rate")
    return float(value)


def load(device: torch.device) -> Calibration | None:
    """Return the calibration of this machine and these versions; None where there is none that can be read."""
    machine = machine_of(device)
    try:
        path = file_of(machine)
    except RuntimeError:  # a user without a home
        return None
    try:
        with open_file(path) as file:
            data = parse_json(file.read(MAX_JSON_BYTES))
        if data["machine"] != machine:
            return None
        points = [_checked(Point(**point)) for point in data["points"]]
        return Calibration(machine, points, _positive(data["copy_bytes_per_s"], least=0.0))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read (%s) and is left out; run `speedtransfer calibrate`", path, error)
        return None
