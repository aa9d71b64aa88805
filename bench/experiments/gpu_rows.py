"""How large the experiments of gpu.py are, and those that move rows alone, on a GPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.benchmark.environment import set_variable
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine
from speedtransfer.system import physical_bytes

DIM = 128
ROW_BYTES = 4 * DIM
HOST_SHARE = 0.4  # of this machine's memory, for the tables of an experiment

# What is measured, and what measures it.
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


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
        return min(wanted, int(self.room) // (planes * ROW_BYTES))

    @property
    def room(self) -> float:
        """Return the bytes that tables may take."""
        return HOST_SHARE * (physical_bytes() or 8e9)


TINY = Scale(2_000, 4_000, 512, 2, (1 / 256,), 64)
LAUNCHES = {"lanes": (16, 32, 264), "bulk": (33,)}  # kernels and blocks, of `pages` and `both_ways`
FEW = {"lanes": (4, 8, 16, 32, 66, 132, 264), "bulk": (4, 8, 16, 33, 66)}

Queue = tuple[torch.cuda.Stream, float, Callable[[], Any]]  # the bytes are those of a call


def both_ways(scale: Scale) -> Cases:
    """Yield GB/s of rows read and of rows written, alone and at once, by kernels and by copies."""
    sides = torch.cuda.Stream(), torch.cuda.Stream()
    there = [torch.zeros(scale.lookups, DIM, device="cuda") for _ in sides]
    for rows in (scale.small, scale.rows(8 * scale.small, 2)):
        planes = [_plane(rows) for _ in sides]
        index = [_draw(rows, scale) for _ in sides]

        def rows_by(engine: MappedEngine, way: str, side: int, planes: Any = planes, index: Any = index) -> Any:
            ids, device_rows = index[side], there[side][: len(index[side])]
            return sides[side], device_rows.nbytes, lambda: getattr(engine, way)([planes[side]], ids, [device_rows])

        def copied(way: str, side: int, planes: Any = planes) -> Any:
            ends = [there[side][: len(planes[side])], planes[side][: scale.lookups]]
            to, out_of = ends if way == "gather" else ends[::-1]
            return sides[side], to.nbytes, lambda: to.copy_(out_of, non_blocking=True)

        found = {}
        for side, way in enumerate(("gather", "scatter")):
            made = {name: rows_by(engine, way, side) for name, engine in _engines(LAUNCHES)}
            found[way] = {**made, "copy": copied(way, side)}
        for (read_by, one), (written_by, two) in itertools.product(*(found[way].items() for way in found)):

            def measure(one: Any = one, two: Any = two) -> dict[str, Any]:
                return {"alone": [_rates(one)[0], _rates(two)[0]], "at_once": _rates(one, two)}

            yield {"rows": rows, "read": read_by, "written": written_by}, measure


def few_blocks(scale: Scale) -> Cases:
    """Yield GB/s of rows read by launches of few blocks, alone and beside a product of matrices, and what that loses."""
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    left = torch.randn(scale.product, scale.product, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    # Operations for bytes: thousands of them make GB/s TFLOP/s.
    product = main, 2 * scale.product**3 / 1e3, lambda: torch.mm(left, left, out=out)
    plane = _plane(scale.rows(8 * scale.small, 1))
    index = _draw(len(plane), scale)
    yield {"rows": len(plane), "kernel": "none", "blocks": 0}, lambda: {"tflop_per_s": _rates(product)[0]}
    rows = torch.zeros(len(index), DIM, device="cuda")
    for name, engine in _engines(FEW):

        def measure(engine: MappedEngine = engine) -> dict[str, Any]:
            move = side, rows.nbytes, lambda: engine.gather([plane], index, [rows])
            alone, (beside, speed) = _rates(move)[0], _rates(move, product)
            return {"alone": alone, "beside": beside, "tflop_per_s": speed}

        kernel, _, blocks = name.partition(" ")
        yield {"rows": len(plane), "kernel": kernel, "blocks": int(blocks)}, measure


def pages(scale: Scale) -> Cases:
    """Yield GB/s of rows read and written by allocator, bytes of the table and launch."""
    sizes = [gb for gb in scale.gb if gb * 2**30 < scale.room]
    rows = torch.zeros(scale.lookups, DIM, device="cuda")
    for allocator in ("alloc", "register"):
        start = time.perf_counter()
        with set_variable("SPEEDTRANSFER_PINNED", allocator):
            flat = _plane(int(max(sizes) * 2**30) // ROW_BYTES)
        seconds = round(time.perf_counter() - start, 2)
        for gb in sizes:
            plane = flat[: int(gb * 2**30) // ROW_BYTES]
            sets = itertools.cycle([_draw(len(plane), scale) for _ in range(6)])
            for name, engine in _engines(LAUNCHES):

                def measure(engine: MappedEngine = engine, plane: Tensor = plane, sets: Any = sets) -> dict[str, Any]:
                    stream, num_bytes = torch.cuda.current_stream(), ROW_BYTES * len(next(sets))

                    def rate(way: str) -> float:
                        def move() -> None:
                            ids = next(sets)
                            getattr(engine, way)([plane], ids, [rows[: len(ids)]])

                        return _rates((stream, num_bytes, move))[0]

                    return {way: rate(way) for way in ("gather", "scatter")}

                yield {"allocator": allocator, "seconds": seconds, "gb": gb, "launch": name}, measure
        del flat, plane


def _engines(launches: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, MappedEngine]]:
    """Yield an engine for each launch: two never share one, so that neither waits for the other."""
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
