"""The ways to move rows: this library's and plain copies; others' are in `rival_ways`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedtransfer import jit
from speedtransfer.benchmark.measure import Case, cycle, synchronize
from speedtransfer.benchmark.results import DEFAULT, UNCHECKED, Role
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.cuda import pinned_empty
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

BOTH_ENGINES = "engines: mapped and staged at once"


@dataclass(frozen=True)
class Way:
    """A way to move the rows of one batch."""

    name: str
    move: Callable[[Ids], Any]  # a gather returns rows on the compute device, a plain copy what it has written and read
    role: Role = "other"
    queues: bool = False  # only queues work on the device
    kind: str = ""  # that of its case; an "empty" one moves no rows that could be checked


def as_case(way: Way, work: Workload, direction: Direction) -> Case:
    """Return `way` with the batches of `work` in turn, and the check that it does what `direction` says."""
    turn = cycle(work.sets)
    check = check_copy if way.role == "roof" else {"gather": check_gather, "scatter": check_scatter}[direction]
    return Case(
        way.name,
        lambda: way.move(turn()),
        (lambda: check(way, work)) if way.kind != "empty" else None,
        work.payload_bytes,
        way.role,
        queues=way.queues,
        kind=way.kind,
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
            Way(DEFAULT, lambda ids: table.gather(ids.device), "ours", queues, "checked"),
            Way(UNCHECKED, lambda ids: table.gather(ids.device, check=False), "ours", queues, "unchecked"),
        ]
    else:
        ways = [
            Way(DEFAULT, lambda ids: table.scatter(ids.device, rows), "ours", kind="checked"),
            Way(UNCHECKED, lambda ids: table.scatter(ids.device, rows, check=False), "ours", queues, "unchecked"),
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

    return Way(f"engine: {name}", gather if direction == "gather" else scatter, "ours", queues, "engine")


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

    return Way(BOTH_ENGINES, move, "ours", kind="engine")


# --- plain copies -----------------------------------------------------------------------------------------------------


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
