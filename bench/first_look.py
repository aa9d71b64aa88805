"""Measures what decides how fast rows leave host memory: the allocator and its pages, the size of the table, the order of the
ids, the engine and its blocks. About three minutes on a GPU with 40 GB of host memory free:

    python bench/first_look.py [--sizes 0.25,2,8,32] [--seconds 200]

Last come ids without a bound: the map on the device, steps that admit ids after them, tables that grow.

Each line is one cell of the table, in GB/s of rows of 512 bytes: medians of calls, timed by events on the device ("staged": by
the clock, until the rows are there). They are in ``bench/results/<device>/first_look.json`` too, as far as it has come. What a
machine does not have is reported in its line.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import first_look_ids
import torch
from store import ROOT, path_of, write
from torch import Tensor

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.cuda import cuda_status, pinned_empty
from speedtransfer.engines import Engine, MappedEngine, StagedEngine
from speedtransfer.system import physical_bytes

PART = "first_look"
ROWS, DIM = 131_072, 128
BLOCKS = (16, 66, 264, 1056)
UNIT = 2 << 20  # a huge page
SHARE = 0.5  # of the memory of this machine, at most
SETS = 6  # of ids, in turn

Make = Callable[[int], tuple[Tensor, Callable[[], None]]]  # memory, and what frees it


# --- allocators -----------------------------------------------------------------------------------------------------------


def host_alloc(num_bytes: int) -> tuple[Tensor, Callable[[], None]]:
    """Page-locked memory as tables have it."""
    return pinned_empty(num_bytes), lambda: None


def huge_pages(num_bytes: int) -> tuple[Tensor, Callable[[], None]]:
    """Memory in transparent huge pages, page-locked when it is there."""
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(block, dtype=torch.uint8).fill_(0)  # by all cores
    runtime = _runtime()
    runtime.hostRegister(flat.data_ptr(), num_bytes, 1 | 2)  # portable, mapped: CuPy has no names for them
    return flat, lambda: runtime.hostUnregister(flat.data_ptr())


def numa_node(num_bytes: int) -> tuple[Tensor, Callable[[], None]]:
    """Memory of the driver's virtual memory management, on the host's first node."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")

    size, start, handle = ctypes.c_size_t(num_bytes), ctypes.c_uint64(), ctypes.c_uint64()
    node, device = (3, 0), (1, torch.cuda.current_device())  # CU_MEM_LOCATION_TYPE_HOST_NUMA, _DEVICE
    # CUmemAllocationProp: pinned, no handle to share, the place, no metadata, no flags.
    wanted = (ctypes.c_int * 8)(1, 0, *node)
    access = (ctypes.c_int * 6)(*node, 3, *device, 3)  # two CUmemAccessDesc: read and write
    call("cuMemCreate", ctypes.byref(handle), size, wanted, ctypes.c_uint64(0))
    call("cuMemAddressReserve", ctypes.byref(start), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    call("cuMemMap", start, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    call("cuMemSetAccess", start, access, ctypes.c_size_t(2))

    def free() -> None:
        call("cuMemUnmap", start, size)
        call("cuMemRelease", handle)
        call("cuMemAddressFree", start, size)

    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(start.value), dtype=torch.uint8), free


ALLOCATORS: dict[str, Make] = {"hostAlloc": host_alloc, "huge pages": huge_pages, "NUMA node": numa_node}


def _runtime() -> Any:
    from speedtransfer.cuda.status import load_cupy

    return load_cupy().cuda.runtime


def pages(pointer: int) -> str:
    """Return what the system says of the pages at an address."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= pointer < high
        elif inside and first in ("KernelPageSize:", "Rss:", "AnonHugePages:", "ShmemPmdMapped:", "VmFlags:"):
            found.append(" ".join(line.split()))
    return ", ".join(found) or "in no map of this process"


# --- measuring --------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/first_look.py", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sizes", type=_numbers, default=[0.25, 2, 8, 32], metavar="GB,GB", help="of the table")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a call")
    parser.add_argument("--repeats", type=int, default=10, help="calls of a cell")
    parser.add_argument("--seconds", type=float, default=200, help="no cell is begun after that")
    args = parser.parse_args(arguments)
    if reason := cuda_status().reason:
        print(f"error: the first look needs CUDA, but {reason}", file=sys.stderr)
        return 2
    from store import header

    about = header(ROOT, PART)
    path = path_of(ROOT, about["environment"]["device"], PART)
    cells: list[dict[str, Any]] = []
    of_ids: list[dict[str, Any]] = []
    memory: dict[str, str] = {}
    result = {**about, "rows": args.rows, "row_bytes": 4 * DIM, "memory": memory, "cells": cells, "ids": of_ids}
    room = SHARE * (physical_bytes() or 8e9)
    sizes = [size for size in sorted(args.sizes) if size * 2**30 <= room]
    look = _Look(args.rows, args.repeats, time.monotonic() + args.seconds)
    for name, make in ALLOCATORS.items():
        for cell in look.at(name, make, sizes, memory):
            cells.append(cell)
            rates = "  ".join(f"{d} {cell[d]:7.2f}" for d in ("gather", "scatter"))
            print(f"{name:10} {cell['gb']:6} GB  {cell['ids']:8} {cell['engine']:12} {rates} GB/s", flush=True)
            write(path, result)
        print(f"{name}: {memory[name]}", flush=True)
    for found in first_look_ids.look(args.rows, args.repeats, look.end):
        of_ids.append(found)
        print("ids: " + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
        write(path, result)
    result["complete"] = not look.late
    write(path, result)
    print(f"{'the time was up' if look.late else 'all measured'}; wrote {path.relative_to(ROOT)}")
    return 0


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


_AHEAD_CYCLES = 400_000  # some 200 us


class _Look:
    """Measures one allocator after the other."""

    def __init__(self, count: int, repeats: int, end: float) -> None:
        self.count, self.repeats, self.end = count, repeats, end
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.late = False
        self.rows = torch.empty(count, DIM, device=self.device)
        self.engines: dict[str, Engine] = {}
        for kernel in ("lanes", "bulk"):
            for blocks in BLOCKS:
                try:
                    self.engines[f"{kernel} {blocks}"] = MappedEngine(self.device, max_blocks=blocks, kernel=kernel)
                except Exception as error:
                    print(f"{kernel} {blocks}: not here: {error}")
        self.engines["staged"] = StagedEngine(self.device)

    def at(self, name: str, make: Make, sizes: list[float], memory: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the cells of one allocator; tables are parts of one block. Describe it in `memory`."""
        start = time.monotonic()
        if start > self.end:
            self.late, memory[name] = True, "no time was left"
            return
        try:
            flat, free = make(max(1, int(max(sizes) * 2**30) // UNIT) * UNIT)
        except Exception as error:
            memory[name] = f"not here: {' '.join(str(error).split())[:200]}"
            return
        table = flat.view(torch.float32).view(-1, DIM)
        numbers = table.view(torch.int32)[:, 0]
        numbers.copy_(torch.arange(len(table), dtype=torch.int32))  # every row knows its number
        memory[name] = f"{max(sizes)} GB in {time.monotonic() - start:.1f} s; {pages(flat.data_ptr())}"
        yield {"allocator": name, "gb": max(sizes), "ids": "all", "engine": "cudaMemcpy", **self._plain(table)}
        # The youngest kernels last: what hangs in them must not take the other figures along.
        for young, size in itertools.product((False, True), sizes):
            plane = table[: int(size * 2**30) // (4 * DIM)]
            drawn = [torch.randint(len(plane), (self.count,), device=self.device).unique() for _ in range(SETS)]
            for order in ("sorted", "shuffled"):
                sets = (
                    drawn if order == "sorted" else [ids[torch.randperm(len(ids), device=ids.device)] for ids in drawn]
                )
                for engine_name, engine in self.engines.items():
                    if engine_name.startswith("bulk") != young:
                        continue
                    if time.monotonic() > self.end:
                        self.late = True
                        break
                    try:
                        rates = self._rates(engine, plane, sets)
                    except RuntimeError as error:
                        print(f"{name} {size} GB {order} {engine_name}: {error}", flush=True)
                        continue
                    yield {"allocator": name, "gb": size, "ids": order, "engine": engine_name, **rates}
        torch.cuda.synchronize()
        free()

    def _rates(self, engine: Engine, plane: Tensor, sets: list[Tensor]) -> dict[str, float]:
        def gather(ids: Tensor) -> None:
            engine.gather([plane], ids, [self.rows[: len(ids)]])

        def scatter(ids: Tensor) -> None:
            engine.scatter([plane], ids, [self.rows[: len(ids)]])

        gather(sets[0])
        if not torch.equal(self.rows.view(torch.int32)[: len(sets[0]), 0], sets[0].int()):
            raise RuntimeError("a gather gives other rows than the table has")
        wait = engine.wait if engine.name == "staged" else None
        gathered = self._rate(gather, sets, wait=wait)
        # Each batch is written to the rows that it came from.
        scattered = self._rate(scatter, sets, before=gather, wait=wait)
        return {"gather": gathered, "scatter": scattered}

    def _plain(self, table: Tensor) -> dict[str, float]:
        blocks = [
            table[i * self.count : (i + 1) * self.count] for i in range(max(1, min(SETS, len(table) // self.count)))
        ]
        to = self._rate(lambda block: self.rows[: len(block)].copy_(block, non_blocking=True), blocks)
        back = self._rate(
            lambda block: block.copy_(self.rows[: len(block)], non_blocking=True),
            blocks,
            before=lambda block: self.rows[: len(block)].copy_(block),
        )
        return {"gather": to, "scatter": back}

    def _rate(
        self,
        move: Callable[[Tensor], Any],
        sets: list[Tensor],
        before: Callable[[Tensor], Any] = lambda chosen: None,
        wait: Callable[[], None] | None = None,
    ) -> float:
        """Return GB/s of `move` for ids or blocks, after `before`, which is not timed; by the clock if it has a `wait`."""
        rates = []
        for number in range(self.repeats + 2):
            chosen = sets[number % len(sets)]
            before(chosen)
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if wait is None:
                torch.cuda._sleep(_AHEAD_CYCLES)  # the host gets ahead of the device
            began = time.perf_counter()
            start.record()
            move(chosen)
            stop.record()
            if wait is not None:
                wait()
            stop.synchronize()
            seconds = start.elapsed_time(stop) / 1e3 if wait is None else time.perf_counter() - began
            rates.append(len(chosen) * 4 * DIM / max(seconds, 1e-9) / 1e9)
        return round(statistics.median(rates[2:]), 3)  # the first ones warm up


if __name__ == "__main__":
    sys.exit(main())
