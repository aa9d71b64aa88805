"""Methods to move rows: this library's, the best and simplest of PyTorch, CuPy's, and plain copies as the roof."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.benchmark.measure import Case, cycle, synchronize
from speedtransfer.benchmark.results import Role
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import mapped_view, pinned_empty, to_cupy, torch_stream
from speedtransfer.engines import (
    AutoEngine,
    Direction,
    Engine,
    MappedEngine,
    engine_names,
    gather_rows,
    make_engine,
    scatter_rows,
)


@dataclass(frozen=True)
class Method:
    """A method to move the rows of one batch.

    `move` returns the rows of a gather, and of a plain copy what it has written and read; one that is not `checked` moves
    none. `queues` is that of its :class:`~speedtransfer.benchmark.measure.Case`.
    """

    name: str
    move: Callable[[Ids], Any]
    role: Role = "other"
    queues: bool = False
    checked: bool = True


def as_case(method: Method, work: Workload, direction: Direction) -> Case:
    """Make a case of a method, with the batches of `work` in turn."""
    turn = cycle(work.sets)
    check = check_copy if method.role == "roof" else CHECKS[direction]
    return Case(
        method.name,
        lambda: method.move(turn()),
        (lambda: check(method, work)) if method.checked else None,
        work.payload_bytes,
        method.role,
        queues=method.queues,
    )


def check_gather(method: Method, work: Workload) -> None:
    """Raise AssertionError if a gather returns wrong rows."""
    ids = work.sets[-1]
    # An earlier method may have left the right rows there. The method may use a stream that does not wait for this one.
    work.out.zero_()
    synchronize(work.device)
    got = method.move(ids)
    synchronize(work.device)
    expected = _stored(work, ids).to(work.device)
    assert torch.equal(_bits(torch.as_tensor(got)), _bits(expected)), "the rows are not those of the table"


def check_scatter(method: Method, work: Workload) -> None:
    """Raise AssertionError if a scatter does not write the rows to the table."""
    ids = work.sets[-1]
    work.plane.index_fill_(0, ids.host.to(work.plane.device), 0)
    synchronize(work.device)
    method.move(ids)
    work.table.wait()
    synchronize(work.device)
    assert torch.equal(_bits(_stored(work, ids)), _bits(work.rows.to(work.plane.device))), "the table has other rows"


def check_copy(method: Method, work: Workload) -> None:
    """Raise AssertionError if a plain copy does not copy."""
    # The blocks are used in turn, so as many runs as there are blocks lead back to the one that is cleared here.
    for _ in work.blocks:
        written, _read = method.move(work.sets[-1])
    synchronize(work.device)
    written.zero_()
    synchronize(work.device)
    for _ in work.blocks:
        written, read = method.move(work.sets[-1])
    synchronize(work.device)
    assert torch.equal(_bits(written.cpu()), _bits(read.cpu())), "the copy is not like the original"


CHECKS: dict[str, Callable[[Method, Workload], None]] = {"gather": check_gather, "scatter": check_scatter}


def _stored(work: Workload, ids: Ids) -> Tensor:
    return work.plane.index_select(0, ids.host.to(work.plane.device))


def _bits(rows: Tensor) -> Tensor:
    # Random bits may be NaN, which is unequal to itself.
    return rows.view(torch.int32)


# --- ours ---------------------------------------------------------------------------------------------------------------


def our_methods(work: Workload, direction: Direction) -> list[Method]:
    """Return the table's call with all checks, as users make it, without them, as training does, and every engine.

    On CUDA the check of a gather is part of its kernel; that of a scatter (no id twice) is a sort that the host waits for.
    """
    table, rows = work.table, work.rows
    queues = _queues(work, direction)
    checked, unchecked = "speedtransfer", "speedtransfer, check=False"
    if direction == "gather":
        methods = [
            Method(checked, lambda ids: table.gather(ids.device), "ours", queues),
            Method(unchecked, lambda ids: table.gather(ids.device, check=False), "ours", queues),
        ]
    else:
        methods = [
            Method(checked, lambda ids: table.scatter(ids.device, rows), "ours"),
            Method(unchecked, lambda ids: table.scatter(ids.device, rows, check=False), "ours", queues),
        ]
    names = [name for name in engine_names(table.memory, work.device) if name != "auto"]
    return methods + [_engine(make_engine(table.memory, work.device, name), name, work, direction) for name in names]


def _queues(work: Workload, direction: Direction) -> bool:
    """Whether the engine that the table chooses for a batch only queues work on the device."""
    engine = work.table._engine
    if isinstance(engine, AutoEngine):
        row_bytes = work.payload_bytes // max(1, len(work.rows))
        engine = engine.engines[engine.choose(direction, row_bytes, len(work.rows), work.plane.nbytes)]
    return isinstance(engine, MappedEngine)


def _engine(engine: Engine, name: str, work: Workload, direction: Direction) -> Method:
    """Return an engine by itself, with preallocated memory; it may sort ids, as for a table."""
    # Threads of the host get ids on the host, like torch's methods.
    pick: Callable[[Ids], Tensor] = (lambda ids: ids.host) if engine.name == "staged" else (lambda ids: ids.device)

    def gather(ids: Ids) -> Tensor:
        engine.gather([work.plane], pick(ids), [work.out], unsorted=True)
        return work.out

    def scatter(ids: Ids) -> None:
        engine.scatter([work.plane], pick(ids), [work.rows], unsorted=True)

    move = gather if direction == "gather" else scatter
    return Method(f"engine: {name}", move, "ours", isinstance(engine, MappedEngine))


# --- plain copies -----------------------------------------------------------------------------------------------------


def pinned_like(rows: Tensor) -> Tensor:
    """Allocate page-locked memory like `rows`, which are on a CUDA device."""
    return pinned_empty(rows.nbytes, rows.device).view(rows.dtype).view(rows.shape)


def roofs(work: Workload, direction: Direction) -> list[Method]:
    """Return plain contiguous copies of the same bytes; the fastest is the roof."""
    blocks = work.blocks
    if work.device.type == "cuda" and work.table.memory in ("pageable", "mmap"):
        blocks = [pinned_like(work.rows)]
    turn, out, rows, gathers = cycle(blocks), work.out, work.rows, direction == "gather"

    def pair() -> tuple[Tensor, Tensor]:
        return (out, turn()) if gathers else (turn(), rows)

    def copy(ids: Ids) -> tuple[Tensor, Tensor]:
        to, source = pair()
        return to.copy_(source, non_blocking=True), source

    found = [Method(_roof_name(work), copy, "roof", queues=True)]
    if work.device.type == "cpu":
        in_order = torch.arange(len(rows))

        def past_the_cache(ids: Ids) -> tuple[Tensor, Tensor]:
            to, source = pair()
            if gathers:
                gather_rows([source], in_order, [to])
            else:
                scatter_rows([to], in_order, [source])
            return to, source

        found.append(Method("copy past the cache", past_the_cache, "roof"))
    return found


def _roof_name(work: Workload) -> str:
    if work.device.type == "cpu":
        return "memcpy"
    return "plain copy on the device" if work.table.memory == "device" else "one cudaMemcpy"


# --- of PyTorch and CuPy ------------------------------------------------------------------------------------------------


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
        Method("t[idx]", lambda ids: plane[ids.device]),
        Method("index_select", lambda ids: plane.index_select(0, ids.device)),
        Method("F.embedding", lambda ids: F.embedding(ids.device, plane)),
    ]


def _local_scatters(work: Workload) -> list[Method]:
    plane, rows = work.plane, work.rows
    return [
        Method("index_copy_", lambda ids: plane.index_copy_(0, ids.device, rows)),
        Method("t[idx] = rows", lambda ids: plane.__setitem__(ids.device, rows)),
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
        Method(PLAIN_TORCH["gather"], lambda ids: plane[ids.host].to(work.device)),
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
        Method(PLAIN_TORCH["scatter"], lambda ids: plane.__setitem__(ids.host, rows.cpu())),
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
    return [Method(name, move, queues=True) for name, move in found]


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
