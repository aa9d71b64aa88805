"""Time engines against each other on one plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import synchronize
from speedtransfer.engines.base import Engine
from speedtransfer.engines.calibration import DIRECTIONS, Calibration, Point, log, machine_of
from speedtransfer.errors import InvalidValueError, SpeedtransferError

ROW_BYTES = (16, 128, 512, 2048, 8192)
NUM_ROWS = (1_000, 16_000, 131_072)
_CALL_BYTES = 64 << 20  # of the largest call
_SAMPLES = 5
_RESTLESS = 1.5  # samples that differ by more than this are of a machine that does something else, too


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
    result, spreads = Calibration(machine_of(device)), list[float]()
    for size in row_bytes:
        stored = plane[: len(plane) // size * size].view(-1, size)
        limit = min(len(stored), max(1, _CALL_BYTES // size))
        for count in sorted({min(count, limit) for count in num_rows}):
            given = _Given(stored, count, device)
            calls = {name: _Call(engine, given) for name, engine in engines.items()}
            right = {name: call for name, call in calls.items() if call.works(name)}
            for direction in DIRECTIONS if right else ():
                seconds = _medians({name: call.moves[direction] for name, call in right.items()}, device, spreads)
                point = Point(direction, size, count, seconds, len(plane))
                result.points.append(point)
                if progress is not None:
                    progress(point)
    part = plane[:_CALL_BYTES]
    there = torch.empty(len(part), dtype=torch.uint8, device=device)
    copy = {"copy": lambda: there.copy_(part, non_blocking=True)}
    result.copy_bytes_per_s = len(part) / _medians(copy, device, spreads)["copy"]
    if (spread := float(np.median(spreads))) > _RESTLESS:
        log.warning(
            "this machine was busy while it was measured: the same call took %.1f times as long as at best; measure again by "
            "`speedtransfer calibrate` when it is quiet, since what was measured is kept",
            spread,
        )
    return result


def _medians(calls: Mapping[str, Callable[[], object]], device: torch.device, spreads: list[float]) -> dict[str, float]:
    """Return the median seconds of each call, which take turns; add to `spreads` how many times the least that is."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_SAMPLES):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            samples[name].append(time.perf_counter() - start)
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    spreads += [medians[name] / min(values) for name, values in samples.items()]
    return medians


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
        # Numbers that no row begins with twice soon: as many as there are bytes would take longer to draw than to move.
        noise, num_bytes = torch.randint(256, (65_521,), dtype=torch.uint8, **cpu), count * stored.shape[1]
        self.pattern = noise.repeat(-(-num_bytes // len(noise)))[:num_bytes].view(count, stored.shape[1])
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
