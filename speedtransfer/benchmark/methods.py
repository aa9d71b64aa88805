"""Methods to move rows: this library's, the best and simplest of PyTorch, CuPy's, and plain copies as the roof."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.measure import Case, cycle
from speedtransfer.benchmark.results import Role
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import mapped_view, pinned_empty, synchronize, to_cupy, torch_stream
from speedtransfer.engines import Direction, Engine, engine_names, gather_rows, make_engine, scatter_rows

# A method to move the rows of one batch. It returns the rows of a gather, and of a plain copy what it has written and read.
Move = Callable[[Ids], Any]


def all_cases(work: Workload, direction: Direction) -> list[Case]:
    """Make a case of every method."""
    moves: dict[Role, dict[str, Move]] = {
        "ours": our_methods(work, direction),
        "other": other_methods(work, direction),
        "roof": roofs(work, direction),
    }
    return [as_case(work, direction, name, move, role) for role, some in moves.items() for name, move in some.items()]


def as_case(work: Workload, direction: Direction, name: str, move: Move, role: Role = "other") -> Case:
    """Make a case of a method, with the batches of `work` in turn."""
    turn = cycle(work.sets)
    check = check_copy if role == "roof" else CHECKS[direction]
    return Case(name, lambda: move(turn()), lambda: check(move, work), work.payload_bytes, role)


def check_gather(move: Move, work: Workload) -> None:
    """Raise AssertionError if a gather returns wrong rows."""
    ids = work.sets[-1]
    # An earlier method may have left the right rows there. This one may use a stream that does not wait for ours.
    work.out.zero_()
    synchronize(work.device)
    got = move(ids)
    synchronize(work.device)
    expected = _stored(work, ids).to(work.device)
    assert torch.equal(_bits(torch.as_tensor(got)), _bits(expected)), "the rows are not those of the table"


def check_scatter(move: Move, work: Workload) -> None:
    """Raise AssertionError if a scatter does not write the rows to the table."""
    ids = work.sets[-1]
    work.plane.index_fill_(0, ids.host.to(work.plane.device), 0)
    synchronize(work.device)
    move(ids)
    work.table.wait()
    synchronize(work.device)
    assert torch.equal(_bits(_stored(work, ids)), _bits(work.rows.to(work.plane.device))), "the table has other rows"


def check_copy(move: Move, work: Workload) -> None:
    """Raise AssertionError if a plain copy does not copy."""
    # The blocks are used in turn, so as many runs as there are blocks lead back to the one that is cleared here.
    for _ in work.blocks:
        written, _read = move(work.sets[-1])
    synchronize(work.device)
    written.zero_()
    synchronize(work.device)
    for _ in work.blocks:
        written, read = move(work.sets[-1])
    synchronize(work.device)
    assert torch.equal(_bits(written.cpu()), _bits(read.cpu())), "the copy is not like the original"


CHECKS: dict[str, Callable[[Move, Workload], None]] = {"gather": check_gather, "scatter": check_scatter}


def _stored(work: Workload, ids: Ids) -> Tensor:
    return work.plane.index_select(0, ids.host.to(work.plane.device))


def _bits(rows: Tensor) -> Tensor:
    # Random bits may be NaN, which is unequal to itself.
    return rows.view(torch.int32)


# --- ours ---------------------------------------------------------------------------------------------------------------


def our_methods(work: Workload, direction: Direction) -> dict[str, Move]:
    """Return the table's call with all checks, as users make it, without them, as training does, and every engine.

    On CUDA the check of a gather is part of its kernel; that of a scatter (no id twice) is a sort that the host waits for.
    """
    table, rows = work.table, () if direction == "gather" else (work.rows,)
    call: Callable[..., Any] = table.gather if direction == "gather" else table.scatter
    names = [name for name in engine_names(table.memory, work.device) if name != "auto"]
    return {
        "speedtransfer": lambda ids: call(ids.device, *rows),
        "speedtransfer, check=False": lambda ids: call(ids.device, *rows, check=False),
        **{f"engine: {name}": _engine(make_engine(table.memory, work.device, name), work, direction) for name in names},
    }


def _engine(engine: Engine, work: Workload, direction: Direction) -> Move:
    """Return an engine by itself, with preallocated memory; it may sort ids, as for a table."""
    rows = work.out if direction == "gather" else work.rows

    def move(ids: Ids) -> Tensor:
        # Threads of the host get ids on the host, like torch's methods.
        index = ids.host if engine.name == "staged" else ids.device
        getattr(engine, direction)([work.plane], index, [rows], unsorted=True)
        return rows

    return move


# --- plain copies -----------------------------------------------------------------------------------------------------


def pinned_like(rows: Tensor) -> Tensor:
    """Allocate page-locked memory like `rows`, which are on a CUDA device."""
    return pinned_empty(rows.nbytes, rows.device).view(rows.dtype).view(rows.shape)


def roofs(work: Workload, direction: Direction) -> dict[str, Move]:
    """Return plain contiguous copies of the same bytes; the fastest is the roof."""
    blocks, device = work.blocks, work.device
    if device.type == "cuda" and work.table.memory in ("pageable", "mmap"):
        blocks = [pinned_like(work.rows)]
    turn, in_order = cycle(blocks), torch.arange(len(work.rows))

    def pair() -> tuple[Tensor, Tensor]:
        return (work.out, turn()) if direction == "gather" else (turn(), work.rows)

    def copy(ids: Ids) -> tuple[Tensor, Tensor]:
        to, source = pair()
        return to.copy_(source, non_blocking=True), source

    def past_the_cache(ids: Ids) -> tuple[Tensor, Tensor]:
        to, source = pair()
        if direction == "gather":
            gather_rows([source], in_order, [to])
        else:
            scatter_rows([to], in_order, [source])
        return to, source

    if device.type == "cpu":
        return {"memcpy": copy, "copy past the cache": past_the_cache}
    return {"plain copy on the device" if work.table.memory == "device" else "one cudaMemcpy": copy}


# --- of PyTorch and CuPy ------------------------------------------------------------------------------------------------


_CHUNKS = 8  # parts of a batch, whose transfers overlap with work of the host


def other_methods(work: Workload, direction: Direction) -> dict[str, Move]:
    """Return the best and the simplest methods of PyTorch, and CuPy's."""
    methods = (_local_methods if work.plane.device == work.device else _crossing_methods)(work, direction)
    if work.device.type == "cuda" and work.table.memory in ("pinned", "device"):
        methods |= _view_methods(work, direction)
    return methods


def _local_methods(work: Workload, direction: Direction) -> dict[str, Move]:
    plane, out, rows = work.plane, work.out, work.rows
    if direction == "gather":
        return {
            "index_select(out=)": lambda ids: torch.index_select(plane, 0, ids.device, out=out),
            "t[idx]": lambda ids: plane[ids.device],
        }
    return {
        "index_copy_": lambda ids: plane.index_copy_(0, ids.device, rows),
        "t[idx] = rows": lambda ids: plane.__setitem__(ids.device, rows),
    }


def _crossing_methods(work: Workload, direction: Direction) -> dict[str, Move]:
    plane, out, rows, staging = work.plane, work.out, work.rows, Staging(work.rows)

    def gather(ids: Ids, parts: int = 1) -> Tensor:
        size = -(-len(out) // parts)
        for part, where in zip(out.split(size), ids.host.split(size), strict=True):
            with staging as buffer:
                torch.index_select(plane, 0, where, out=buffer[: len(part)])
                part.copy_(buffer[: len(part)], non_blocking=True)
        return out

    def put(buffer: Tensor, where: Tensor) -> None:
        staging.wait(buffer)
        plane.index_copy_(0, where, buffer[: len(where)])

    def scatter(ids: Ids, parts: int = 1) -> None:
        queued, size = list[tuple[Tensor, Tensor]](), -(-len(rows) // parts)
        for part, where in zip(rows.split(size), ids.host.split(size), strict=True):
            with staging as buffer:
                buffer[: len(part)].copy_(part, non_blocking=True)
            # The part before it, which overlaps with the transfer of this one.
            queued.append((buffer, where))
            if len(queued) > 1:
                put(*queued.pop(0))
        put(*queued.pop())

    if direction == "gather":
        return {
            "index_select(out=pinned) + copy": gather,
            "t[idx].to(device)": lambda ids: plane[ids.host].to(work.device),
            f"index_select(out=pinned) + copy, {_CHUNKS} parts overlapped": lambda ids: gather(ids, _CHUNKS),
        }
    return {
        "copy to pinned + index_copy_": scatter,
        "t[idx] = rows.cpu()": lambda ids: plane.__setitem__(ids.host, rows.cpu()),
        f"copy to pinned + index_copy_, {_CHUNKS} parts overlapped": lambda ids: scatter(ids, _CHUNKS),
    }


def _view_methods(work: Workload, direction: Direction) -> dict[str, Move]:
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

    found: dict[str, Move] = {}
    if host and gathers:
        found["index_select on a UVA view"] = lambda ids: torch.index_select(view, 0, ids.device, out=out)
    elif host:
        found["index_copy_ on a UVA view"] = lambda ids: view.index_copy_(0, ids.device, work.rows)
    return {**found, "CuPy t[idx]" if gathers else "CuPy t[idx] = rows": by_cupy}


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
