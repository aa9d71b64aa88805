"""The engine of a table in page-locked memory: for each call the fastest, as far as this machine has been measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from speedtransfer.cuda import is_capturing, pinned_empty
from speedtransfer.engines.base import Engine, KernelEngine, Queue, check_apart
from speedtransfer.engines.calibration import PLANE_BYTES, Calibration, Direction, known, log, machine_of
from speedtransfer.engines.host import HostEngine
from speedtransfer.engines.mapped import MappedEngine
from speedtransfer.engines.reference import ReferenceEngine
from speedtransfer.engines.staged import StagedEngine
from speedtransfer.engines.timing import calibrate
from speedtransfer.errors import HostMemoryError, InvalidValueError, suggest
from speedtransfer.once import fork_safe_lock
from speedtransfer.system import available_bytes


class AutoEngine:
    """Hands each call to one of several engines over the same planes.

    Which one: that of the pair, one to gather and one to scatter, with the smallest sum at the nearest point of the machine's
    calibration for a table of this size (`speedtransfer calibrate`), so that a step rarely changes engines; without one the
    first of `engines`, since measuring takes as long as many steps. From the first call that is captured in a CUDA graph on it
    is the first: it alone is in order with replays, by the stream.

    Order: each engine keeps its own calls in order. Before another one gathers the host waits for the scatters of the others,
    before it scatters for all of their calls, and for nothing where those move rows on the host. Threads take turns, since one
    engine does not see what another is about to do.

    Parameters
    ----------
    engines : dict of str to Engine
        The default first.
    device : torch.device
        The compute device.
    """

    name = "auto"
    takes_padding = True

    def __init__(self, engines: dict[str, Engine], device: torch.device) -> None:
        self.engines, self.device = engines, device
        self._names = list(engines)
        self._turn = fork_safe_lock()
        self._busy = set[str]()  # engines that may not be done with the planes
        self._captured = False
        self._row_bytes = 0  # of all planes of the table, as far as calls have shown
        # What `_seen` says of calls so far: a choice takes longer than a small call.
        self._seen: Calibration | None = None
        self._chosen: dict[tuple[int, ...], dict[Direction, str]] = {}

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        with self._turn:
            engine, first = self._ready("gather", planes, index), self.engines[self._names[0]]
            if isinstance(check, Tensor) and engine is not first:
                check_apart(first, planes, check)
                check = False
            engine.gather(planes, index, rows, check, unsorted)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        with self._turn:
            self._ready("scatter", planes, index).scatter(planes, index, rows, unsorted, behind)

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels can read and write the planes now, without waiting for an engine that they do not know."""
        return self._busy <= {"mapped"}

    def update(self, planes: Sequence[Tensor], ids: Tensor, read: Sequence[bool], queue: Queue) -> None:
        """Let `queue` queue kernels that read and write planes; see `KernelEngine`."""
        with self._turn:
            cast(KernelEngine, self._take_turn("scatter", "mapped")).update(planes, ids, read, queue)

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until every gather and scatter so far is done."""
        for engine in self.engines.values():
            engine.wait(writes_only)

    def choose(self, direction: Direction, row_bytes: int, num_rows: int, table_bytes: int = PLANE_BYTES) -> str:
        """Return the name of the engine for a call.

        Parameters
        ----------
        direction : {"gather", "scatter"}
        row_bytes : int
            Of a row in all planes of the table, which a training step moves both ways.
        num_rows : int
            Rows of the call.
        table_bytes : int
            Of all rows.
        """
        calibration = known(self.device)
        if calibration is not self._seen:
            self._seen, self._chosen = calibration, {}
        size = max(0, num_rows.bit_length() - 3)  # eighths of an octave are near enough
        key = row_bytes, num_rows >> size, size, table_bytes
        chosen = self._chosen.get(key)
        if chosen is None:
            if calibration is None:
                return self._names[0]
            chosen = self._chosen[key] = calibration.pair(self._names, row_bytes, num_rows, table_bytes)
        return chosen[direction]

    def _ready(self, direction: Direction, planes: Sequence[Tensor], index: Tensor) -> Engine:
        row_bytes = sum(plane.shape[1] * plane.element_size() for plane in planes)
        if not row_bytes or not len(index):  # an index that is only checked, or nothing at all
            return self.engines[self._names[0]]
        self._captured = self._captured or (index.is_cuda and is_capturing())
        if self._captured:
            name = self._names[0]
        else:
            self._row_bytes = max(self._row_bytes, row_bytes)
            name = self.choose(direction, self._row_bytes, len(index), self._row_bytes * planes[0].shape[0])
        return self._take_turn(direction, name)

    def _take_turn(self, direction: Direction, name: str) -> Engine:
        for other in self._busy - {name}:
            self.engines[other].wait(writes_only=direction == "gather")
            if direction == "scatter":
                self._busy.discard(other)
        self._busy.add(name)
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
        if wanted and wanted not in _MAKE:
            raise InvalidValueError(
                f"SPEEDTRANSFER_ENGINE is {wanted!r} in the environment, which is not an engine{suggest(wanted, _MAKE)}"
            )
        name = wanted if wanted in names else names[0]
    elif name == "auto":
        name = names[0]
    if name not in names:
        hint = suggest(str(name), names)
        raise InvalidValueError(f"engine is {name!r}, which does not move rows of memory={memory!r} on {device}{hint}")
    return _MAKE[name](device)


_MAKE: dict[str, Callable[[torch.device], Engine]] = {
    "auto": lambda device: AutoEngine({"mapped": MappedEngine(device), "staged": StagedEngine(device)}, device),
    "host": HostEngine,
    "mapped": MappedEngine,
    "reference": ReferenceEngine,
    "staged": StagedEngine,
}


def calibrate_device(
    device: torch.device, progress: Callable[..., None] | None = None, sizes: Sequence[int] | None = None
) -> Calibration:
    """Measure the engines that can serve on `device`: those between which `auto` chooses, or those of the CPU.

    Parameters
    ----------
    device : torch.device
    progress : callable, optional
        Called with every point.
    sizes : sequence of int, optional
        Bytes of the planes to measure on. By default 256 MB and, on CUDA, as much as 4 GB in steps of four where that is less
        than a quarter of the memory that is free.

    Raises
    ------
    HostMemoryError
        No memory for the first plane.
    """
    cuda = device.type == "cuda"
    if sizes is None:
        larger = [PLANE_BYTES * 4, PLANE_BYTES * 16] if cuda else []
        sizes = [PLANE_BYTES, *(size for size in larger if size <= available_bytes() // 4)]
    names = [name for name in engine_names("pinned", device) if name != "auto"]
    engines = {name: make_engine("pinned", device, name) for name in names}
    found = Calibration(machine_of(device))
    for size in sizes:
        try:
            plane = pinned_empty(size, device) if cuda else torch.empty(size, dtype=torch.uint8, device="cpu")
        except HostMemoryError as error:
            if not found.points:
                raise
            log.warning("larger tables are not measured: %s", error)
            break
        found = found.joined(calibrate(engines, device, plane, progress=progress))
        del plane  # before the next takes as much again and more
    return found
