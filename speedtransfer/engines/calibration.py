"""Which engine is fastest for how many rows of which size: measured once on a machine, kept in a file, chosen from later."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
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
PLANE_BYTES = 256 << 20  # of the plane it is measured on: far larger than a cache
_CALL_BYTES = 64 << 20  # of the largest call
_SAMPLES = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """What was measured: seconds of a call by engine."""

    direction: Direction
    row_bytes: int
    num_rows: int
    seconds: dict[str, float]

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

    def nearest(self, direction: Direction, row_bytes: int, num_rows: int) -> Point | None:
        """Return the point next to a call, by ratio of sizes; None where the direction has none."""

        def distance(point: Point) -> float:
            rows = math.log(point.num_rows / max(1, num_rows))
            return math.hypot(math.log(point.row_bytes / max(1, row_bytes)), rows)

        same = [point for point in self.points if point.direction == direction and point.seconds]
        return min(same, key=distance, default=None)

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
            calls = {name: _Call(engine, stored, count, device) for name, engine in engines.items()}
            right = {name: call for name, call in calls.items() if call.works(name)}
            for direction in DIRECTIONS if right else ():
                seconds = _medians({name: call.moves[direction] for name, call in right.items()}, device)
                point = Point(direction, size, count, seconds)
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


class _Call:
    """Calls of one engine on the same rows."""

    def __init__(self, engine: Engine, stored: Tensor, count: int, device: torch.device) -> None:
        self.engine, self.stored, self.device = engine, stored, device
        # Whatever device and generator the user has made the default.
        cpu: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
        # One id in each stretch of the plane: spread at random, none twice, and made without a permutation of all rows.
        stretch = len(stored) // count
        ids = torch.arange(count, device="cpu") * stretch + torch.randint(stretch, (count,), **cpu)
        self.index = ids[torch.randperm(count, **cpu)]
        self.pattern = torch.randint(256, (count, stored.shape[1]), dtype=torch.uint8, **cpu)
        rows = self.rows = torch.empty(count, stored.shape[1], dtype=torch.uint8, device=device)
        there = self.index.to(device)
        self.moves = {
            "gather": lambda: engine.gather([stored], there, [rows]),
            "scatter": lambda: engine.scatter([stored], there, [rows]),
        }

    def works(self, name: str) -> bool:
        """Move rows out and back and compare; the first calls compile and allocate as well."""
        try:
            self.rows.copy_(self.pattern)
            self.moves["scatter"]()
            self.rows.zero_()
            self.moves["gather"]()
            self.engine.wait()
            right = torch.equal(self.rows.cpu(), self.pattern) and torch.equal(self.stored[self.index], self.pattern)
            reason = "it moves rows wrongly"
        except SpeedtransferError as error:
            right, reason = False, str(error)
        if not right:
            log.warning("engine %r is left out of the calibration: %s", name, reason)
        return right


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
