"""Methods to move rows: this library's, the best and simplest of PyTorch, CuPy's, and plain copies as the roof."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.measure import Case, cycle, synchronize
from speedtransfer.benchmark.results import Role
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import mapped_view, pinned_empty, to_cupy, torch_stream
from speedtransfer.engines import Direction, Engine, engine_names, gather_rows, make_engine, scatter_rows


@dataclass(frozen=True)
class Method:
    """A method to move the rows of one batch.

    `move` returns the rows of a gather, and of a plain copy what it has written and read.
    """

    name: str
    move: Callable[[Ids], Any]
    role: Role = "other"


def as_case(method: Method, work: Workload, direction: Direction) -> Case:
    """Make a case of a method, with the batches of `work` in turn."""
    turn = cycle(work.sets)
    check = check_copy if method.role == "roof" else CHECKS[direction]
    return Case(method.name, lambda: method.move(turn()), lambda: check(method, work), work.payload_bytes, method.role)


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
    table, rows = work.table, () if direction == "gather" else (work.rows,)
    call: Callable[..., Any] = table.gather if direction == "gather" else table.scatter
    names = [name for name in engine_names(table.memory, work.device) if name != "auto"]
    return [
        Method("speedtransfer", lambda ids: call(ids.device, *rows), "ours"),
        Method("speedtransfer, check=False", lambda ids: call(ids.device, *rows, check=False), "ours"),
        *(_engine(make_engine(table.memory, work.device, name), name, work, direction) for name in names),
    ]


def _engine(engine: Engine, name: str, work: Workload, direction: Direction) -> Method:
    """Return an engine by itself, with preallocated memory; it may sort ids, as for a table."""
    rows = work.out if direction == "gather" else work.rows

    def move(ids: Ids) -> Tensor:
        # Threads of the host get ids on the host, like torch's methods.
        index = ids.host if engine.name == "staged" else ids.device
        getattr(engine, direction)([work.plane], index, [rows], unsorted=True)
        return rows

    return Method(f"engine: {name}", move, "ours")


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

    found = [Method(_roof_name(work), copy, "roof")]
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


_CHUNKS = 8  # parts of a batch, whose transfers overlap with work of the host


def other_methods(work: Workload, direction: Direction) -> list[Method]:
    """Return the best and the simplest methods of PyTorch, and CuPy's."""
    methods = (_local_methods if work.plane.device == work.device else _crossing_methods)(work, direction)
    if work.device.type == "cuda" and work.table.memory in ("pinned", "device"):
        methods += _view_methods(work, direction)
    return methods


def _local_methods(work: Workload, direction: Direction) -> list[Method]:
    plane, out, rows = work.plane, work.out, work.rows
    if direction == "gather":
        return [
            Method("index_select(out=)", lambda ids: torch.index_select(plane, 0, ids.device, out=out)),
            Method("t[idx]", lambda ids: plane[ids.device]),
        ]
    return [
        Method("index_copy_", lambda ids: plane.index_copy_(0, ids.device, rows)),
        Method("t[idx] = rows", lambda ids: plane.__setitem__(ids.device, rows)),
    ]


def _crossing_methods(work: Workload, direction: Direction) -> list[Method]:
    plane, out, rows, staging = work.plane, work.out, work.rows, Staging(work.rows)

    def gather(ids: Ids, parts: int) -> Tensor:
        size = -(-len(out) // parts)
        for part, where in zip(out.split(size), ids.host.split(size), strict=True):
            with staging as buffer:
                torch.index_select(plane, 0, where, out=buffer[: len(part)])
                part.copy_(buffer[: len(part)], non_blocking=True)
        return out

    def put(buffer: Tensor, where: Tensor) -> None:
        staging.wait(buffer)
        plane.index_copy_(0, where, buffer[: len(where)])

    def scatter(ids: Ids, parts: int) -> None:
        queued, size = list[tuple[Tensor, Tensor]](), -(-len(rows) // parts)
        for part, where in zip(rows.split(size), ids.host.split(size), strict=True):
            with staging as buffer:
                buffer[: len(part)].copy_(part, non_blocking=True)
            # The part before it, which overlaps with the transfer of this one.
            queued.append((buffer, where))
            if len(queued) > 1:
                put(*queued.pop(0))
        put(*queued.pop())

    best, move = "copy to pinned + index_copy_", scatter
    plain = Method("t[idx] = rows.cpu()", lambda ids: plane.__setitem__(ids.host, rows.cpu()))
    if direction == "gather":
        best, move = "index_select(out=pinned) + copy", gather  # type: ignore[assignment]
        plain = Method("t[idx].to(device)", lambda ids: plane[ids.host].to(work.device))
    overlapped = Method(f"{best}, {_CHUNKS} parts overlapped", lambda ids: move(ids, _CHUNKS))
    return [Method(best, lambda ids: move(ids, 1)), plain, overlapped]


def _view_methods(work: Workload, direction: Direction) -> list[Method]:
    """Return kernels of torch and CuPy on a table that the device can address; SpeedTorch uses the latter."""
    host, gathers = work.plane.device.type == "cpu", direction == "gather"
    view = mapped_view(work.plane, work.device) if host else work.plane
    array, rows, out = to_cupy(view), to_cupy(work.rows), work.out
    # Like the view, made before anything is timed.
    indices = {id(ids.device): to_cupy(ids.device) for ids in work.sets}

    def by_cupy(ids: Ids) -> Any:
        with torch_stream(work.device):
            if gathers:
                return array[indices[id(ids.device)]]
            array[indices[id(ids.device)]] = rows

    found = [Method("CuPy t[idx]" if gathers else "CuPy t[idx] = rows", by_cupy)]
    if host and gathers:
        by_torch = Method("index_select on a UVA view", lambda ids: torch.index_select(view, 0, ids.device, out=out))
        return [by_torch, *found]
    if host:
        return [Method("index_copy_ on a UVA view", lambda ids: view.index_copy_(0, ids.device, work.rows)), *found]
    return found


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
