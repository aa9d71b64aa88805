"""Methods to move rows: this library's, and plain copies as the roof. See `rival_methods` for those of torch and CuPy."""

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


@dataclass(frozen=True)
class Method:
    """A method to move the rows of one batch.

    `move` returns the rows of a gather, and of a plain copy what it has written and read. `queues` and `kind` are those of
    its :class:`~speedtransfer.benchmark.measure.Case`; kind "empty" moves no rows to check.
    """

    name: str
    move: Callable[[Ids], Any]
    role: Role = "other"
    queues: bool = False
    kind: str = ""


def as_case(method: Method, work: Workload, direction: Direction) -> Case:
    """Make a case of a method, with the batches of `work` in turn."""
    turn = cycle(work.sets)
    check = check_copy if method.role == "roof" else CHECKS[direction]
    return Case(
        method.name,
        lambda: method.move(turn()),
        (lambda: check(method, work)) if method.kind != "empty" else None,
        work.payload_bytes,
        method.role,
        queues=method.queues,
        kind=method.kind,
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
    if direction == "gather":
        methods = [
            Method(DEFAULT, lambda ids: table.gather(ids.device), "ours", queues, "checked"),
            Method(UNCHECKED, lambda ids: table.gather(ids.device, check=False), "ours", queues, "unchecked"),
        ]
    else:
        methods = [
            Method(DEFAULT, lambda ids: table.scatter(ids.device, rows), "ours", kind="checked"),
            Method(UNCHECKED, lambda ids: table.scatter(ids.device, rows, check=False), "ours", queues, "unchecked"),
        ]
    return methods + [
        engine_method(name, engine, work, direction) for name, engine in engines(table.memory, work.device)
    ]


def _queues(work: Workload, direction: Direction) -> bool:
    """Whether the engine that the table chooses for a batch only queues work on the device."""
    engine = work.table._engine
    if isinstance(engine, AutoEngine):
        row_bytes = work.payload_bytes // max(1, len(work.rows))
        engine = engine.engines[engine.choose(direction, row_bytes, len(work.rows), work.plane.nbytes)]
    return isinstance(engine, MappedEngine)


def engines(memory: str, device: torch.device) -> list[tuple[str, Engine]]:
    """Return every engine between `memory` and `device` but "auto", with its name."""
    names = [name for name in engine_names(memory, device) if name != "auto"]
    return [(name, make_engine(memory, device, name)) for name in names]


def engine_method(name: str, engine: Engine, work: Workload, direction: Direction, unsorted: bool = True) -> Method:
    """Return an engine by itself, with preallocated memory; `unsorted`: it may sort ids, as for a table."""
    # Threads of the host get ids on the host, like torch's methods.
    pick: Callable[[Ids], Tensor] = (lambda ids: ids.host) if engine.name == "staged" else (lambda ids: ids.device)
    queues = isinstance(engine, MappedEngine)

    def gather(ids: Ids) -> Tensor:
        engine.gather([work.plane], pick(ids), [work.out], unsorted=unsorted)
        return work.out

    def scatter(ids: Ids) -> None:
        engine.scatter([work.plane], pick(ids), [work.rows], unsorted=unsorted)

    return Method(f"engine: {name}", gather if direction == "gather" else scatter, "ours", queues, "engine")


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
    if work.device.type == "cpu" and jit.available():
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
