"""The ways to move rows: this library's, PyTorch's at their best and at their plainest, CuPy's, and plain copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer import jit
from speedtransfer.benchmark.measure import Case, cycle, synchronize
from speedtransfer.benchmark.results import DEFAULT, UNCHECKED, Role
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

BEST_TORCH = {"gather": "index_select(out=pinned) + copy", "scatter": "copy to pinned + index_copy_"}
PLAIN_TORCH = {"gather": "t[idx].to(device)", "scatter": "t[idx] = rows.cpu()"}
_CHUNKS = 8  # of a batch that crosses the bus in parts
OVERLAPPED_TORCH = {direction: f"{name}, {_CHUNKS} parts overlapped" for direction, name in BEST_TORCH.items()}
BOTH_ENGINES = "engines: mapped and staged at once"
CUPY = {"gather": "CuPy t[idx]", "scatter": "CuPy t[idx] = rows"}


@dataclass(frozen=True)
class Way:
    """A way to move the rows of one batch.

    Attributes
    ----------
    name : str
    move : callable
        Takes :class:`Ids`. A gather returns the rows on the compute device, a plain copy what it has written and read.
    role : {"ours", "other", "roof"}
    queues : bool
        It only queues work on the device.
    moves : bool
        False: it moves no rows that could be checked, but shows what a call costs that does nothing.
    """

    name: str
    move: Callable[[Ids], Any]
    role: Role = "other"
    queues: bool = False
    moves: bool = True


def as_case(way: Way, work: Workload, direction: Direction) -> Case:
    """Return `way` with the batches of `work` in turn, and the check that it does what `direction` says."""
    turn = cycle(work.sets)
    check = check_copy if way.role == "roof" else {"gather": check_gather, "scatter": check_scatter}[direction]
    return Case(
        way.name,
        lambda: way.move(turn()),
        (lambda: check(way, work)) if way.moves else None,
        work.payload_bytes,
        way.role,
        queues=way.queues,
    )


def check_gather(way: Way, work: Workload) -> None:
    """Raise AssertionError where `way` gives other rows than the table has."""
    ids = work.sets[-1]
    work.out.zero_()  # rows that another way left there must not count
    synchronize(work.device)  # the way may use a stream that does not wait for this one
    got = way.move(ids)
    synchronize(work.device)
    expected = _stored(work, ids).to(work.device)
    assert torch.equal(_bits(torch.as_tensor(got)), _bits(expected)), "the rows are not those of the table"


def check_scatter(way: Way, work: Workload) -> None:
    """Raise AssertionError where `way` does not put the rows into the table."""
    ids = work.sets[-1]
    work.plane.index_fill_(0, ids.host.to(work.plane.device), 0)
    synchronize(work.device)  # as above
    way.move(ids)
    work.table.wait()
    synchronize(work.device)
    assert torch.equal(_bits(_stored(work, ids)), _bits(work.rows.to(work.plane.device))), "the table has other rows"


def check_copy(way: Way, work: Workload) -> None:
    """Raise AssertionError where a plain copy does not copy."""
    # Its blocks take turns: after as many runs as there are blocks it comes to the one that has been emptied.
    for _ in work.blocks:
        written, _read = way.move(work.sets[-1])
    synchronize(work.device)
    written.zero_()
    synchronize(work.device)
    for _ in work.blocks:
        written, read = way.move(work.sets[-1])
    synchronize(work.device)
    assert torch.equal(_bits(written.cpu()), _bits(read.cpu())), "the copy is not like the original"


def _stored(work: Workload, ids: Ids) -> Tensor:
    return work.plane.index_select(0, ids.host.to(work.plane.device))


def _bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)  # a NaN equals no NaN


# --- ours ---------------------------------------------------------------------------------------------------------------


def our_ways(work: Workload, direction: Direction) -> list[Way]:
    """Return the table's own call with all its checks, as anyone makes it, then without, as training does, and each engine.

    Training knows that its ids are distinct and in range. On CUDA the check of a gather is part of its kernel; that of a
    scatter (no id twice) is a sort and a wait of the host.
    """
    table, rows = work.table, work.rows
    queues = _queues(work, direction)
    if direction == "gather":
        ways = [
            Way(DEFAULT, lambda ids: table.gather(ids.device), "ours", queues),
            Way(UNCHECKED, lambda ids: table.gather(ids.device, check=False), "ours", queues),
        ]
    else:
        ways = [
            Way(DEFAULT, lambda ids: table.scatter(ids.device, rows), "ours"),
            Way(UNCHECKED, lambda ids: table.scatter(ids.device, rows, check=False), "ours", queues),
        ]
    return ways + [engine_way(name, engine, work, direction) for name, engine in engines(table.memory, work.device)]


def _queues(work: Workload, direction: Direction) -> bool:
    """Tell whether the engine that the table takes for a batch leaves all of it to the device."""
    engine = work.table._engine
    if isinstance(engine, AutoEngine):
        row_bytes = work.payload_bytes // max(1, len(work.rows))
        engine = engine.engines[engine.choose(direction, row_bytes, len(work.rows), work.plane.nbytes)]
    return isinstance(engine, MappedEngine)


def engines(memory: str, device: torch.device) -> list[tuple[str, Engine]]:
    """Return every engine that moves rows of any batch between `memory` and `device`, by name."""
    names = [name for name in engine_names(memory, device) if name != "auto"]
    return [(name, make_engine(memory, device, name)) for name in names]


def engine_way(name: str, engine: Engine, work: Workload, direction: Direction, unsorted: bool = True) -> Way:
    """Return `engine` by itself, into and out of memory that is there already; `unsorted`: it may sort ids, as for a table."""
    # Host threads are given the ids on the host, as torch's own ways are.
    pick: Callable[[Ids], Tensor] = (lambda ids: ids.host) if engine.name == "staged" else (lambda ids: ids.device)
    queues = isinstance(engine, MappedEngine)

    def gather(ids: Ids) -> Tensor:
        engine.gather([work.plane], pick(ids), [work.out], unsorted=unsorted)
        return work.out

    def scatter(ids: Ids) -> None:
        engine.scatter([work.plane], pick(ids), [work.rows], unsorted=unsorted)

    return Way(f"engine: {name}", gather if direction == "gather" else scatter, "ours", queues)


def both_engines_way(work: Workload) -> Way:
    """Return a gather of which the kernels read one half across the bus while the copy engine brings the other, staged."""
    device, half = work.device, len(work.rows) // 2
    mapped, staged = (make_engine(work.table.memory, device, name) for name in ("mapped", "staged"))
    side = torch.cuda.Stream(device)

    def move(ids: Ids) -> Tensor:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            mapped.gather([work.plane], ids.device[:half], [work.out[:half]], unsorted=True)
        staged.gather([work.plane], ids.host[half:], [work.out[half:]])
        current.wait_stream(side)
        return work.out

    return Way(BOTH_ENGINES, move, "ours")


# --- others -------------------------------------------------------------------------------------------------------------


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
        Way("t[idx]", lambda ids: plane[ids.device]),
        Way("index_select", lambda ids: plane.index_select(0, ids.device)),
        Way("F.embedding", lambda ids: F.embedding(ids.device, plane)),
    ]


def _local_scatters(work: Workload) -> list[Way]:
    plane, rows = work.plane, work.rows
    return [
        Way("index_copy_", lambda ids: plane.index_copy_(0, ids.device, rows)),
        Way("t[idx] = rows", lambda ids: plane.__setitem__(ids.device, rows)),
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
        Way(PLAIN_TORCH["gather"], lambda ids: plane[ids.host].to(work.device)),
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
        Way(PLAIN_TORCH["scatter"], lambda ids: plane.__setitem__(ids.host, rows.cpu())),
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

    if direction == "gather":
        on_view = Way(
            "index_select on a UVA view", lambda ids: torch.index_select(view, 0, ids.device, out=out), queues=True
        )
        by_cupy = Way(CUPY["gather"], cupy_gather, queues=True)
    else:
        on_view = Way("index_copy_ on a UVA view", lambda ids: view.index_copy_(0, ids.device, work.rows), queues=True)
        by_cupy = Way(CUPY["scatter"], cupy_scatter, queues=True)
    return [on_view, by_cupy] if host else [by_cupy]


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


def pinned_like(rows: Tensor) -> Tensor:
    """Return page-locked memory for `rows`, which are on a CUDA device."""
    return pinned_empty(rows.nbytes, rows.device).view(rows.dtype).view(rows.shape)


def roofs(work: Workload, direction: Direction) -> list[Way]:
    """Return plain copies of the same bytes in one piece: the fastest of them is the roof."""
    blocks = work.blocks
    if work.device.type == "cuda" and work.table.memory in ("pageable", "mmap"):
        blocks = [pinned_like(work.rows)]
    turn, out, rows, gathers = cycle(blocks), work.out, work.rows, direction == "gather"

    def pair() -> tuple[Tensor, Tensor]:
        return (out, turn()) if gathers else (turn(), rows)

    def copy(ids: Ids) -> tuple[Tensor, Tensor]:
        to, source = pair()
        return to.copy_(source, non_blocking=True), source

    found = [Way(_roof_name(work), copy, "roof", queues=True)]
    if work.device.type == "cpu" and jit.available():
        in_order = torch.arange(len(rows))

        def past_the_cache(ids: Ids) -> tuple[Tensor, Tensor]:
            to, source = pair()
            if gathers:
                gather_rows([source], in_order, [to])
            else:
                scatter_rows([to], in_order, [source])
            return to, source

        found.append(Way("copy past the cache", past_the_cache, "roof"))
    return found


def _roof_name(work: Workload) -> str:
    if work.device.type == "cpu":
        return "memcpy"
    return "plain copy on the device" if work.table.memory == "device" else "one cudaMemcpy"
