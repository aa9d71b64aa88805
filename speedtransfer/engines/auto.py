"""The engine of a table in page-locked memory: for each call the fastest, as far as this machine has been measured."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from speedtransfer.cuda import pinned_empty
from speedtransfer.engines.base import Engine
from speedtransfer.engines.calibration import (
    PLANE_BYTES,
    Calibration,
    Direction,
    calibrate,
    file_of,
    known,
    log,
    machine_of,
    remember,
)
from speedtransfer.engines.host import HostEngine
from speedtransfer.engines.mapped import MappedEngine
from speedtransfer.engines.reference import ReferenceEngine
from speedtransfer.engines.staged import StagedEngine
from speedtransfer.errors import InvalidValueError, suggest

_WORTH_BYTES = 1 << 20  # what a call moves at least before this machine is measured for it
_LOCK_S = 120.0  # after that the lock of another process is a dead one's
_measuring = threading.Lock()


class AutoEngine:
    """Hands each call to one of several engines over the same planes.

    Which one: the fastest at the nearest point of the machine's calibration, or the first of `engines` without one.

    Order: each engine keeps its own calls in order. Where another one takes over, the host waits for what the last one has
    queued, and threads take turns, since one engine does not see what another is about to do.

    Parameters
    ----------
    engines : dict of str to Engine
        The default first.
    device : torch.device
        The compute device.
    measure : callable, optional
        Makes the calibration where there is none, at the first call worth it.
    """

    name = "auto"
    takes_padding = True

    def __init__(
        self, engines: dict[str, Engine], device: torch.device, measure: Callable[[], Calibration | None] = lambda: None
    ) -> None:
        self.engines, self.device, self._measure = engines, device, measure
        self._default = self._last = next(iter(engines))
        self._turn, self._measured = threading.Lock(), False
        # What `_seen` says of calls so far: a choice takes longer than a small call.
        self._seen: Calibration | None = None
        self._chosen: dict[tuple[object, ...], str] = {}

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        with self._turn:
            self._ready("gather", planes, index).gather(planes, index, rows, check)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], unsorted: bool = False) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        with self._turn:
            self._ready("scatter", planes, index).scatter(planes, index, rows)

    def wait(self) -> None:
        """Block the host until every gather and scatter so far is done."""
        for engine in self.engines.values():
            engine.wait()

    def choose(self, direction: Direction, row_bytes: int, num_rows: int) -> str:
        """Return the name of the engine for a call that moves `num_rows` rows, of `row_bytes` in all planes together."""
        calibration = known(self.device)
        if calibration is None and not self._measured and num_rows * row_bytes >= _WORTH_BYTES:
            self._measured = True  # once, whatever comes of it
            calibration = self._measure()
        if calibration is None:
            return self._default
        if calibration is not self._seen:
            self._seen, self._chosen = calibration, {}
        size = max(0, num_rows.bit_length() - 3)  # eighths of an octave are near enough
        key = direction, row_bytes, num_rows >> size, size
        if key not in self._chosen:
            point = calibration.nearest(direction, row_bytes, num_rows)
            seconds = {n: s for n, s in point.seconds.items() if n in self.engines} if point else {}
            self._chosen[key] = min(seconds, key=seconds.__getitem__, default=self._default)
        return self._chosen[key]

    def _ready(self, direction: Direction, planes: Sequence[Tensor], index: Tensor) -> Engine:
        if not planes or not len(index):
            return self.engines[self._default]
        row_bytes = sum(plane.shape[1] * plane.element_size() for plane in planes)
        if not row_bytes:  # an index that is only checked
            return self.engines[self._default]
        name = self.choose(direction, row_bytes, len(index))
        if name != self._last:
            self.engines[self._last].wait()
            self._last = name
        return self.engines[name]


def engine_names(memory: str, device: torch.device) -> tuple[str, ...]:
    """Return the engines that can move rows between `memory` and the compute device, the default first."""
    if device.type != "cuda":
        return "host", "reference"
    return {"pinned": ("auto", "mapped", "staged"), "device": ("mapped", "reference")}.get(memory, ("staged",))


def make_engine(memory: str, device: torch.device, name: str | None = None) -> Engine:
    """Return an engine for planes in `memory`.

    Without a `name` it is the environment's SPEEDTRANSFER_ENGINE where that can serve, else the first of :func:`engine_names`,
    which "auto" names too where there is nothing to choose from.

    Raises
    ------
    InvalidValueError
        No such engine, or one that cannot serve this memory and device.
    """
    names = engine_names(memory, device)
    if name is None:
        wanted = os.environ.get("SPEEDTRANSFER_ENGINE", "")
        name = wanted if wanted in names else names[0]
    elif name == "auto":
        name = names[0]
    if name not in names:
        hint = suggest(str(name), names)
        raise InvalidValueError(f"engine is {name!r}, which does not move rows of memory={memory!r} on {device}{hint}")
    return _MAKE[name](device)


def _make_auto(device: torch.device) -> AutoEngine:
    engines: dict[str, Engine] = {"mapped": MappedEngine(device), "staged": StagedEngine(device)}
    return AutoEngine(engines, device, lambda: measure_machine(device))


_MAKE: dict[str, Callable[[torch.device], Engine]] = {
    "auto": _make_auto,
    "host": HostEngine,
    "mapped": MappedEngine,
    "reference": ReferenceEngine,
    "staged": StagedEngine,
}


def measure_machine(device: torch.device) -> Calibration | None:
    """Measure the engines of page-locked memory once, a second or two, and keep the result; None where that fails.

    SPEEDTRANSFER_CALIBRATE=0 in the environment leaves it out. Another thread or process that asks meanwhile gets None.
    """
    if os.environ.get("SPEEDTRANSFER_CALIBRATE", "1") == "0" or not _measuring.acquire(blocking=False):
        return None
    try:
        with _alone(device) as alone:
            if not alone:
                return None
            log.info("measuring how rows move best on %s, once for this machine", device)
            result = calibrate_device(device)
            remember(device, result)
            log.info("kept in %s; see `speedtransfer calibrate --show`", result.save())
    except Exception as error:  # rows move without it too: nothing here may end a training
        log.warning("this machine was not measured for good (%s: %s)", type(error).__name__, error)
    finally:
        _measuring.release()
    return known(device)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[bool]:
    """Say whether no other process of this machine is measuring; each would slow the other down."""
    path, ours = file_of(machine_of(device)).with_suffix(".lock"), False
    with contextlib.suppress(OSError):  # nowhere to write: then no other process does either
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and time.time() - path.stat().st_mtime > _LOCK_S:
            path.unlink()  # of a process that was killed
        path.touch(exist_ok=False)
        ours = True
    try:
        yield ours or not path.exists()
    finally:
        if ours:
            path.unlink(missing_ok=True)


def calibrate_device(device: torch.device, progress: Callable[..., None] | None = None) -> Calibration:
    """Measure the engines that can serve on `device`: those between which `auto` chooses, or those of the CPU.

    Raises
    ------
    HostMemoryError
        No memory for the plane that it is measured on.
    """
    cuda = device.type == "cuda"
    plane = pinned_empty(PLANE_BYTES, device) if cuda else torch.empty(PLANE_BYTES, dtype=torch.uint8)
    names = [name for name in engine_names("pinned", device) if name != "auto"]
    return calibrate({name: make_engine("pinned", device, name) for name in names}, device, plane, progress=progress)
