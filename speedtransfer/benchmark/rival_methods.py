"""Methods of PyTorch (its best and its simplest) and CuPy to move rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.benchmark.methods import Method, pinned_like
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import mapped_view, to_cupy, torch_stream
from speedtransfer.engines import Direction

BEST_TORCH = {"gather": "index_select(out=pinned) + copy", "scatter": "copy to pinned + index_copy_"}
PLAIN_TORCH = {"gather": "t[idx].to(device)", "scatter": "t[idx] = rows.cpu()"}
_CHUNKS = 8  # parts of a batch, whose transfers overlap with work of the host
OVERLAPPED_TORCH = {direction: f"{name}, {_CHUNKS} parts overlapped" for direction, name in BEST_TORCH.items()}
CUPY = {"gather": "CuPy t[idx]", "scatter": "CuPy t[idx] = rows"}


def other_methods(work: Workload, direction: Direction, all_of_them: bool = True) -> list[Method]:
    """Return PyTorch's and CuPy's methods; unless `all_of_them`, only the best ones and t[idx]."""
    if work.plane.device == work.device:
        methods, best = _local_gathers(work) if direction == "gather" else _local_scatters(work), 2
    else:
        methods, best = _crossing_gathers(work) if direction == "gather" else _crossing_scatters(work), 3
    methods = methods if all_of_them else methods[:best]
    if work.device.type == "cuda" and work.table.memory in ("pinned", "device"):
        methods += _view_methods(work, direction)
    return methods


def _local_gathers(work: Workload) -> list[Method]:
    plane, out = work.plane, work.out
    return [
        Method("index_select(out=)", lambda ids: torch.index_select(plane, 0, ids.device, out=out)),
        Method("t[idx]", lambda ids: plane[ids.device], kind="plain"),
        Method("index_select", lambda ids: plane.index_select(0, ids.device)),
        Method("F.embedding", lambda ids: F.embedding(ids.device, plane)),
    ]


def _local_scatters(work: Workload) -> list[Method]:
    plane, rows = work.plane, work.rows
    return [
        Method("index_copy_", lambda ids: plane.index_copy_(0, ids.device, rows)),
        Method("t[idx] = rows", lambda ids: plane.__setitem__(ids.device, rows), kind="plain"),
        Method("index_put_", lambda ids: plane.index_put_((ids.device,), rows)),
    ]


def _crossing_gathers(work: Workload) -> list[Method]:
    plane, out, staging = work.plane, work.out, Staging(work.rows)
    chunk = -(-len(out) // _CHUNKS)

    def staged(ids: Ids) -> Tensor:
        with staging as buffer:
            torch.index_select(plane, 0, ids.host, out=buffer)
            return out.copy_(buffer, non_blocking=True)

    def overlapped(ids: Ids) -> Tensor:
        for part, where in zip(out.split(chunk), ids.host.split(chunk), strict=True):
            with staging as buffer:
                torch.index_select(plane, 0, where, out=buffer[: len(part)])
                part.copy_(buffer[: len(part)], non_blocking=True)
        return out

    return [
        Method(BEST_TORCH["gather"], staged),
        Method(PLAIN_TORCH["gather"], lambda ids: plane[ids.host].to(work.device), kind="plain"),
        Method(OVERLAPPED_TORCH["gather"], overlapped),
        Method("F.embedding, then .to(device)", lambda ids: F.embedding(ids.host, plane).to(work.device)),
    ]


def _crossing_scatters(work: Workload) -> list[Method]:
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
            # Overlaps with the transfer of this part.
            if queued is not None:
                put(*queued)
            queued = buffer, where
        if queued is not None:
            put(*queued)

    return [
        Method(BEST_TORCH["scatter"], lambda ids: plane.index_copy_(0, ids.host, fetched())),
        Method(PLAIN_TORCH["scatter"], lambda ids: plane.__setitem__(ids.host, rows.cpu()), kind="plain"),
        Method(OVERLAPPED_TORCH["scatter"], overlapped),
        Method("copy to pinned + index_put_", lambda ids: plane.index_put_((ids.host,), fetched())),
    ]


def _view_methods(work: Workload, direction: Direction) -> list[Method]:
    """Return kernels of torch and CuPy on a table that the device can address; SpeedTorch uses the latter."""
    host = work.plane.device.type == "cpu"
    view = mapped_view(work.plane, work.device) if host else work.plane
    array, rows, out = to_cupy(view), to_cupy(work.rows), work.out
    # Like the view, made before anything is timed.
    indices = {id(ids.device): to_cupy(ids.device) for ids in work.sets}

    def cupy_gather(ids: Ids) -> Any:
        with torch_stream(work.device):
            return array[indices[id(ids.device)]]

    def cupy_scatter(ids: Ids) -> None:
        with torch_stream(work.device):
            array[indices[id(ids.device)]] = rows

    by_torch: tuple[str, Callable[[Ids], Any]]
    by_cupy: Callable[[Ids], Any]
    if direction == "gather":
        by_torch = "index_select on a UVA view", lambda ids: torch.index_select(view, 0, ids.device, out=out)
        by_cupy = cupy_gather
    else:
        by_torch = "index_copy_ on a UVA view", lambda ids: view.index_copy_(0, ids.device, work.rows)
        by_cupy = cupy_scatter
    found = [by_torch] * host + [(CUPY[direction], by_cupy)]
    return [Method(name, move, queues=True, kind="view") for name, move in found]


class Staging:
    """Two page-locked buffers used in turn, so that the host works on one while the other is transferred."""

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
        """Wait until the last copy that uses `buffer` is done."""
        self._events[id(buffer)].synchronize()
