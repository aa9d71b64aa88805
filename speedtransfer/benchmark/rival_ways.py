"""The ways of others to move rows: PyTorch's at their best and at their plainest, and CuPy's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.benchmark.ways import Way, pinned_like
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import mapped_view, to_cupy, torch_stream
from speedtransfer.engines import Direction

BEST_TORCH = {"gather": "index_select(out=pinned) + copy", "scatter": "copy to pinned + index_copy_"}
PLAIN_TORCH = {"gather": "t[idx].to(device)", "scatter": "t[idx] = rows.cpu()"}
_CHUNKS = 8  # of a batch that crosses the bus in parts
OVERLAPPED_TORCH = {direction: f"{name}, {_CHUNKS} parts overlapped" for direction, name in BEST_TORCH.items()}
CUPY = {"gather": "CuPy t[idx]", "scatter": "CuPy t[idx] = rows"}


def other_ways(work: Workload, direction: Direction, all_of_them: bool = True) -> list[Way]:
    """Return PyTorch's and CuPy's ways; the best of each kind and t[idx] where not `all_of_them`."""
    if work.plane.device == work.device:  # on the CPU, or all of it on the GPU
        ways, best = _local_gathers(work) if direction == "gather" else _local_scatters(work), 2
    else:
        ways, best = _crossing_gathers(work) if direction == "gather" else _crossing_scatters(work), 3
    ways = ways if all_of_them else ways[:best]
    if work.device.type == "cuda" and work.table.memory in ("pinned", "device"):
        ways += _view_ways(work, direction)
    return ways


def _local_gathers(work: Workload) -> list[Way]:
    plane, out = work.plane, work.out
    return [
        Way("index_select(out=)", lambda ids: torch.index_select(plane, 0, ids.device, out=out)),
        Way("t[idx]", lambda ids: plane[ids.device], kind="plain"),
        Way("index_select", lambda ids: plane.index_select(0, ids.device)),
        Way("F.embedding", lambda ids: F.embedding(ids.device, plane)),
    ]


def _local_scatters(work: Workload) -> list[Way]:
    plane, rows = work.plane, work.rows
    return [
        Way("index_copy_", lambda ids: plane.index_copy_(0, ids.device, rows)),
        Way("t[idx] = rows", lambda ids: plane.__setitem__(ids.device, rows), kind="plain"),
        Way("index_put_", lambda ids: plane.index_put_((ids.device,), rows)),
    ]


def _crossing_gathers(work: Workload) -> list[Way]:
    plane, out, staging = work.plane, work.out, Staging(work.rows)
    chunk = -(-len(out) // _CHUNKS)

    def staged(ids: Ids) -> Tensor:
        with staging as buffer:
            torch.index_select(plane, 0, ids.host, out=buffer)
            return out.copy_(buffer, non_blocking=True)

    def overlapped(ids: Ids) -> Tensor:
        for part, where in zip(out.split(chunk), ids.host.split(chunk), strict=True):
            with staging as buffer:  # while the part before crosses the bus
                torch.index_select(plane, 0, where, out=buffer[: len(part)])
                part.copy_(buffer[: len(part)], non_blocking=True)
        return out

    return [
        Way(BEST_TORCH["gather"], staged),
        Way(PLAIN_TORCH["gather"], lambda ids: plane[ids.host].to(work.device), kind="plain"),
        Way(OVERLAPPED_TORCH["gather"], overlapped),
        Way("F.embedding, then .to(device)", lambda ids: F.embedding(ids.host, plane).to(work.device)),
    ]


def _crossing_scatters(work: Workload) -> list[Way]:
    plane, rows, staging = work.plane, work.rows, Staging(work.rows)
    chunk = -(-len(rows) // _CHUNKS)

    def fetched() -> Tensor:
        with staging as buffer:
            buffer.copy_(rows, non_blocking=True)
        staging.wait(buffer)
        return buffer

    def put(buffer: Tensor, where: Tensor) -> None:
        staging.wait(buffer)
        plane.index_copy_(0, where, buffer[: len(where)])

    def overlapped(ids: Ids) -> None:
        queued = None
        for part, where in zip(rows.split(chunk), ids.host.split(chunk), strict=True):
            with staging as buffer:
                buffer[: len(part)].copy_(part, non_blocking=True)
            if queued is not None:  # while this part crosses the bus
                put(*queued)
            queued = buffer, where
        if queued is not None:
            put(*queued)

    return [
        Way(BEST_TORCH["scatter"], lambda ids: plane.index_copy_(0, ids.host, fetched())),
        Way(PLAIN_TORCH["scatter"], lambda ids: plane.__setitem__(ids.host, rows.cpu()), kind="plain"),
        Way(OVERLAPPED_TORCH["scatter"], overlapped),
        Way("copy to pinned + index_put_", lambda ids: plane.index_put_((ids.host,), fetched())),
    ]


def _view_ways(work: Workload, direction: Direction) -> list[Way]:
    """Return what kernels of torch and CuPy do with a table that they can address: the second is SpeedTorch's way."""
    host = work.plane.device.type == "cpu"
    view = mapped_view(work.plane, work.device) if host else work.plane
    array, rows, out = to_cupy(view), to_cupy(work.rows), work.out
    indices = {id(ids.device): to_cupy(ids.device) for ids in work.sets}  # made outside of the time, as the view is

    def cupy_gather(ids: Ids) -> Any:
        with torch_stream(work.device):
            return array[indices[id(ids.device)]]

    def cupy_scatter(ids: Ids) -> None:
        with torch_stream(work.device):
            array[indices[id(ids.device)]] = rows

    by_torch: dict[str, Callable[[Ids], Any]] = {
        "index_select on a UVA view": lambda ids: torch.index_select(view, 0, ids.device, out=out),
        "index_copy_ on a UVA view": lambda ids: view.index_copy_(0, ids.device, work.rows),
    }
    name = list(by_torch)[direction == "scatter"]
    found = {name: by_torch[name]} if host else {}
    found[CUPY[direction]] = cupy_gather if direction == "gather" else cupy_scatter
    return [Way(name, move, queues=True, kind="view") for name, move in found.items()]


class Staging:
    """Two page-locked buffers in turn: the host fills or empties one while the other crosses the bus."""

    def __init__(self, like: Tensor) -> None:
        self._device = like.device
        self._buffers = [pinned_like(like) for _ in range(2)]
        self._events = {id(buffer): torch.cuda.Event() for buffer in self._buffers}
        self._turn = itertools.cycle(self._buffers)

    def __enter__(self) -> Tensor:
        self._current = next(self._turn)
        self.wait(self._current)
        return self._current

    def __exit__(self, *error: object) -> None:
        self._events[id(self._current)].record(torch.cuda.current_stream(self._device))

    def wait(self, buffer: Tensor) -> None:
        """Block the host until the last copy that uses `buffer` is done."""
        self._events[id(buffer)].synchronize()
