"""Which engine is fastest for how many rows of which size: measured once on a machine, kept in a file, chosen from later."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import cuda_status
from speedtransfer.engines.base import Engine
from speedtransfer.errors import InvalidValueError, SpeedtransferError
from speedtransfer.system import cache_folder, cpu_model, replace_file
from speedtransfer.version import __version__

Direction = Literal["gather", "scatter"]
DIRECTIONS: tuple[Direction, ...] = ("gather", "scatter")
ROW_BYTES = (16, 128, 512, 2048, 8192)
NUM_ROWS = (1_000, 16_000, 131_072)
# Of the planes that it is measured on, each four times the one before, up to 64 GB: the larger a table, the fewer of its rows
# share translations of addresses. The smallest is far larger than a cache.
PLANE_BYTES = 256 << 20
_CLASSES = 5
# What a choice of two engines must win over one for both directions: the host waits once a step for one of them, and cannot
# queue meanwhile. Not measured on a GPU yet.
_SWITCH_S = 50e-6
_CALL_BYTES = 64 << 20  # of the largest call
_SAMPLES = 5

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

    def measured(self, plane_bytes: int) -> bool:
        """Tell whether there are points for a plane of `plane_bytes`."""
        return any(point.plane_bytes == plane_bytes for point in self.points)

    def joined(self, newer: Calibration) -> Calibration:
        """Return these points and those of `newer`, which replace these for planes of the same size."""
        kept = [point for point in self.points if not newer.measured(point.plane_bytes)]
        return Calibration(newer.machine, [*kept, *newer.points], newer.copy_bytes_per_s)

    def save(self) -> Path:
        """Write the file that :func:`load` finds, whole or not at all, and return its path; StorageError where it cannot."""
        path = file_of(self.machine)
        data = {
            "machine": self.machine,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "points": [vars(point) for point in self.points],
        }
        with contextlib.suppress(OSError):  # where that fails the next line says so
            path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, "let SPEEDTRANSFER_CACHE name a folder that you may write to") as file:
            file.write((json.dumps(data, indent=1) + "\n").encode())
        return path


def size_class(table_bytes: int) -> int:
    """Return the bytes of the plane that speaks for a table of `table_bytes`."""
    step = round(math.log(max(1, table_bytes) / PLANE_BYTES, 4))
    return int(PLANE_BYTES * 4 ** min(max(step, 0), _CLASSES - 1))


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


def load(device: torch.device) -> Calibration | None:
    """Return the calibration of this machine and these versions; None where there is none that can be read."""
    machine = machine_of(device)
    try:
        path = file_of(machine)
    except RuntimeError:  # a user without a home
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["machine"] != machine:
            return None
        points = [Point(**point) for point in data["points"]]
        if not all(seconds > 0 for point in points for seconds in point.seconds.values()):
            raise ValueError("a time is not positive")
        return Calibration(machine, points, float(data["copy_bytes_per_s"]))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read (%s) and is left out; run `speedtransfer calibrate`", path, error)
        return None


def calibrate(
    engines: Mapping[str, Engine],
    device: torch.device,
    plane: Tensor,
    row_bytes: tuple[int, ...] = ROW_BYTES,
    num_rows: tuple[int, ...] = NUM_ROWS,
    progress: Callable[[Point], None] | None = None,
) -> Calibration:
    """Time `engines` against each other; an engine that gives a wrong row is left out with a warning.

    Parameters
    ----------
    engines : mapping of str to Engine
        All of them for the memory that `plane` lives in.
    device : torch.device
        The compute device.
    plane : Tensor
        ``(n,)`` uint8, the memory to measure on; it is overwritten. A multiple of the largest row.
    row_bytes, num_rows : tuple of int
        The calls to time, all pairs of the two in both directions; fewer rows where a call would exceed 64 MiB or the plane.
    progress : callable, optional
        Called with every point.
    """
    if not engines or plane.dtype != torch.uint8 or len(plane) < max(row_bytes):
        raise InvalidValueError("calibrate needs at least one engine and a uint8 plane of at least one row")
    result = Calibration(machine_of(device))
    for size in row_bytes:
        stored = plane[: len(plane) // size * size].view(-1, size)
        limit = min(len(stored), max(1, _CALL_BYTES // size))
        for count in sorted({min(count, limit) for count in num_rows}):
            given = _Given(stored, count, device)
            calls = {name: _Call(engine, given) for name, engine in engines.items()}
            right = {name: call for name, call in calls.items() if call.works(name)}
            for direction in DIRECTIONS if right else ():
                seconds = _medians({name: call.moves[direction] for name, call in right.items()}, device)
                point = Point(direction, size, count, seconds, len(plane))
                result.points.append(point)
                if progress is not None:
                    progress(point)
    part = plane[:_CALL_BYTES]
    there = torch.empty(len(part), dtype=torch.uint8, device=device)
    copy = {"copy": lambda: there.copy_(part, non_blocking=True)}
    result.copy_bytes_per_s = len(part) / _medians(copy, device)["copy"]
    return result


def _medians(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of each call; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_SAMPLES):
        for name, call in calls.items():
            _synchronize(device)
            start = time.perf_counter()
            call()
            _synchronize(device)
            samples[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in samples.items()}


class _Given:
    """Rows of a plane that all engines move."""

    def __init__(self, stored: Tensor, count: int, device: torch.device) -> None:
        self.stored = stored
        # Whatever device and generator the user has made the default.
        cpu: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
        # One id in each stretch of the plane: sorted, as those of a training step are, and spread over all of it.
        stretch = len(stored) // count
        self.index = torch.arange(count, device="cpu") * stretch + torch.randint(stretch, (count,), **cpu)
        self.there = self.index.to(device)
        self.pattern = torch.randint(256, (count, stored.shape[1]), dtype=torch.uint8, **cpu)
        self.rows = torch.empty(count, stored.shape[1], dtype=torch.uint8, device=device)


class _Call:
    """Calls of one engine."""

    def __init__(self, engine: Engine, given: _Given) -> None:
        self.engine, self.given = engine, given
        self.moves = {
            "gather": lambda: engine.gather([given.stored], given.there, [given.rows]),
            "scatter": lambda: engine.scatter([given.stored], given.there, [given.rows]),
        }

    def works(self, name: str) -> bool:
        """Move rows out and back and compare; the first calls compile and allocate as well."""
        given = self.given
        try:
            given.stored[given.index] = 0
            given.rows.copy_(given.pattern)
            self.moves["scatter"]()
            given.rows.zero_()
            self.moves["gather"]()
            self.engine.wait()
            there = given.rows.cpu(), given.stored[given.index]
            right = all(torch.equal(rows, given.pattern) for rows in there)
            reason = "it moves rows wrongly"
        except SpeedtransferError as error:
            right, reason = False, str(error)
        if not right:
            log.warning("engine %r is left out of the calibration: %s", name, reason)
        return right


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
