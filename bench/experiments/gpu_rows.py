"""How large the experiments of gpu.py are, and those that move rows alone, on a GPU."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.benchmark.environment import host_room, set_variable
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine

DIM = 128
ROW_BYTES = 4 * DIM
HOST_SHARE = 0.4  # of this machine's memory, for the tables of an experiment

# What is measured, and what measures it.
Cases = Iterator[tuple[str, Callable[[], dict[str, float]]]]


class Scale(NamedTuple):
    """How much of everything: rows of a small and a large table, lookups, steps that are timed, gigabytes of memory."""

    small: int = 1_000_000
    large: int = 16_000_000
    lookups: int = 131_072
    steps: int = 20
    gb: tuple[float, ...] = (2, 8)
    product: int = 8192

    def rows(self, wanted: int, planes: int) -> int:
        """Return as many rows as `wanted`, fewer where `planes` of them do not fit."""
        return min(wanted, int(host_room(HOST_SHARE)) // (planes * ROW_BYTES))

    @property
    def sizes(self) -> list[float]:
        """Return those of `gb` that fit."""
        return [gb for gb in self.gb if gb * 2**30 < host_room(HOST_SHARE)]


TINY = Scale(2_000, 4_000, 512, 2, (1 / 256,), 64)
LAUNCHES = {"lanes": (16, 32, 264), "bulk": (33,)}  # kernels and blocks, of `pages` and `both_ways`
FEW = {"lanes": (4, 8, 16, 32, 66, 132, 264), "bulk": (4, 8, 16, 33, 66)}

Queue = tuple[torch.cuda.Stream, float, Callable[[], Any]]  # the bytes are those of a call


def both_ways(scale: Scale, rows: int) -> Cases:
    """Yield GB/s of rows read and of rows written, alone and at once, by kernels and by copies."""
    sides = torch.cuda.Stream(), torch.cuda.Stream()
    there = [torch.zeros(scale.lookups, DIM, device="cuda") for _ in sides]
    planes, index = [_plane(rows) for _ in sides], [_draw(rows, scale) for _ in sides]

    def found(queues: list[Queue]) -> dict[str, float]:
        alone, at_once = [_rates(one)[0] for one in queues], _rates(*queues)
        names = [f"{way} {when}" for when in ("alone", "at once") for way in ("read", "written")]
        return dict(zip(names, [*alone, *at_once], strict=True))

    # Two never share an engine, so that neither waits for the other.
    for (name, read), (_, written) in zip(_engines(LAUNCHES), _engines(LAUNCHES), strict=True):

        def by_kernels(engines: Any = (read, written)) -> dict[str, float]:
            queues = []
            for side, (engine, way) in enumerate(zip(engines, ("gather", "scatter"), strict=True)):
                device_rows = there[side][: len(index[side])]
                arguments = [planes[side]], index[side], [device_rows]
                move = getattr(engine, way)
                queues.append((sides[side], device_rows.nbytes, lambda move=move, a=arguments: move(*a)))
            return found(queues)

        yield name, by_kernels

    def by_copies() -> dict[str, float]:
        ends = [(one[: len(plane)], plane[: scale.lookups]) for one, plane in zip(there, planes, strict=True)]
        pairs = [ends[0], ends[1][::-1]]
        return found(
            [
                (side, to.nbytes, lambda to=to, of=of: to.copy_(of, non_blocking=True))
                for side, (to, of) in zip(sides, pairs, strict=True)
            ]
        )

    yield "plain copies", by_copies


def few_blocks(scale: Scale) -> Cases:
    """Yield GB/s of rows read by launches of few blocks, alone and beside a product of matrices, and what that loses."""
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    left = torch.randn(scale.product, scale.product, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    # Operations for bytes: thousands of them make GB/s TFLOP/s.
    product = main, 2 * scale.product**3 / 1e3, lambda: torch.mm(left, left, out=out)
    plane = _plane(scale.rows(8 * scale.small, 1))
    index = _draw(len(plane), scale)
    yield "none", lambda: {"product, TFLOP/s": _rates(product)[0]}
    rows = torch.zeros(len(index), DIM, device="cuda")
    for name, engine in _engines(FEW):

        def measure(engine: MappedEngine = engine) -> dict[str, float]:
            move = side, rows.nbytes, lambda: engine.gather([plane], index, [rows])
            alone, (beside, speed) = _rates(move)[0], _rates(move, product)
            return {"alone": alone, "beside": beside, "product, TFLOP/s": speed}

        yield name, measure


def pages(scale: Scale, gb: float) -> Cases:
    """Yield GB/s of rows read and written by allocator and launch."""
    rows = torch.zeros(scale.lookups, DIM, device="cuda")
    for allocator in ("alloc", "register"):
        with set_variable("SPEEDTRANSFER_PINNED", allocator):
            plane = _plane(int(gb * 2**30) // ROW_BYTES)
        sets = itertools.cycle([_draw(len(plane), scale) for _ in range(6)])
        for name, engine in _engines(LAUNCHES):

            def measure(engine: MappedEngine = engine, plane: Tensor = plane, sets: Any = sets) -> dict[str, float]:
                stream, num_bytes = torch.cuda.current_stream(), ROW_BYTES * len(next(sets))

                def move(way: str) -> None:
                    ids = next(sets)
                    getattr(engine, way)([plane], ids, [rows[: len(ids)]])

                ways = ("gather", "scatter")
                return {way: _rates((stream, num_bytes, lambda way=way: move(way)))[0] for way in ways}

            yield f"{name}, {allocator}", measure
        del plane


def _engines(launches: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, MappedEngine]]:
    """Yield an engine for each launch."""
    for kernel, every in launches.items():
        for blocks in every:
            if kernel != "bulk" or torch.cuda.get_device_capability() >= (9, 0):
                yield f"{kernel} {blocks}", MappedEngine("cuda", max_blocks=blocks, kernel=kernel)


def _plane(rows: int) -> Tensor:
    return pinned_empty(rows * ROW_BYTES).view(torch.float32).view(-1, DIM).zero_()


def _draw(rows: int, scale: Scale) -> Tensor:
    return torch.randint(rows, (scale.lookups,), device="cuda").unique()


def _rates(*queues: Queue, repeats: int = 5) -> list[float]:
    """Return GB/s of each queue, all at once, by events on the device."""
    found: list[list[float]] = [[] for _ in queues]
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        marks = []
        for stream, _, call in queues:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)  # the host gets ahead of the device
                ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                ends[0].record()
                for _ in range(4):
                    call()
                ends[1].record()
                marks.append(ends)
        torch.cuda.synchronize()
        for rates, (start, stop), (_, num_bytes, _) in zip(found, marks, queues, strict=True):
            rates.append(4 * num_bytes / max(start.elapsed_time(stop), 1e-6) / 1e6)
    return [round(statistics.median(rates[2:]), 1) for rates in found]  # the first ones warm up
