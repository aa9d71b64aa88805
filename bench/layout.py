"""Times rows of weight, two planes of state and the last step with layout "planes" and "rows", and whole training steps.

``python bench/layout.py [--dims 16 64] [--quick]``. In ordinary memory and in a file: with all pages in memory ("warm"), after
the system has written them to the disk, when the first write to a page costs a fault ("written back"), and with none in memory
("cold"), there also without page advice. The layouts take turns; the medians go to ``bench/results/<device>/layout.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store import LAYOUT, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

import speedtransfer as st
from speedtransfer.tables import page_advice

LOOKUPS = 98_304
COLD_LOOKUPS = 16_384
PLANE_BYTES = 1 << 28
LAYOUTS = ("planes", "rows")
LAST = "idle.last_step"
_PAGEOUT = 21  # MADV_PAGEOUT, which Python does not know by name


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/layout.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--folder", type=Path, help="where the files of tables lie, by default one for temporary files")
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small tables and few rounds, to see that it runs")
    args = parser.parse_args(arguments)
    about = header(ROOT, LAYOUT)
    plane_bytes, rounds = (1 << 20, 2) if args.quick else (PLANE_BYTES, 15)
    # Planes of any size count as larger than memory should hold, so that they are read page by page.
    os.environ["SPEEDTRANSFER_HOST_BYTES"] = str(plane_bytes * 8)
    out = args.out or path_of(ROOT, about["environment"]["device"], LAYOUT)
    cases = list[dict[str, Any]]()
    result = {**about, "lookups": LOOKUPS, "cold_lookups": COLD_LOOKUPS, "cases": cases, "complete": False}
    for dim in args.dims:
        num_rows = plane_bytes // (4 * dim)
        for memory in ("pageable", "mmap"):
            for ids in ("uniform", "zipf"):
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    for case in measure(memory, num_rows, dim, ids, rounds, Path(folder)):
                        cases.append({"memory": memory, "dim": dim, "rows": num_rows, "ids": ids, **case})
                        print(describe(cases[-1]), flush=True)
                # An interrupted run keeps what it has measured.
                write(out, result)
    write(out, {**result, "complete": not args.quick})
    print(f"wrote {out}")
    return 0


def measure(memory: str, num_rows: int, dim: int, ids: str, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what was measured: an operation, and the median ms of each layout."""
    generator = np.random.default_rng(0)

    def draw(lookups: int) -> torch.Tensor:
        if ids == "uniform":
            return torch.from_numpy(generator.integers(0, num_rows, lookups))
        # Ranks by Zipf's law with exponent 1, spread over the table.
        ranks = np.minimum(float(num_rows) ** generator.random(lookups), num_rows - 1).astype(np.int64)
        return torch.from_numpy(ranks * 2_654_435_761 % num_rows)

    tables = {layout: table_in(memory, num_rows, dim, layout, folder / f"{layout}.npy") for layout in LAYOUTS}
    for state in ("warm",) if memory == "pageable" else ("warm", "written back"):
        yield from gather_and_scatter(tables, lambda: draw(LOOKUPS).unique(), rounds, state)
    if memory == "mmap":
        for advice in (True, False):
            with contextlib.nullcontext() if advice else without_advice():
                name = "cold" if advice else "cold, without page advice"
                yield from gather_and_scatter(tables, lambda: draw(COLD_LOOKUPS).unique(), max(rounds // 3, 1), name)
    del tables
    yield from training_steps(memory, num_rows, dim, lambda: draw(LOOKUPS), rounds, folder, "warm")
    if memory == "mmap":
        yield from training_steps(
            memory, num_rows, dim, lambda: draw(COLD_LOOKUPS), max(rounds // 3, 1), folder, "cold"
        )


def table_in(memory: str, num_rows: int, dim: int, layout: str, path: Path) -> st.Table:
    """Return a table as AdamW with exact idle rows leaves it, every page written."""
    file = path if memory == "mmap" else None
    table = st.Table(num_rows, dim, memory=memory, path=file, device="cpu", layout=layout).fill_(1)
    table.add_planes({"exp_avg": (dim, None, 1.0), "exp_avg_sq": (dim, None, 1.0)})
    table.add_plane(LAST, 1, torch.int32, 1)
    return table


def gather_and_scatter(
    tables: dict[str, st.Table], draw: Callable[[], torch.Tensor], rounds: int, state: str
) -> Iterator[dict[str, Any]]:
    """Yield gather and scatter of the same rows by both layouts, with the pages of files in `state`."""
    seconds: dict[str, dict[str, list[float]]] = {"gather": {}, "scatter": {}}
    for number in range(rounds + 1):
        ids = draw()
        for layout, table in tables.items():
            if state != "warm":
                flush(table, state.startswith("cold"))
            start = time.perf_counter()
            rows = table.read(ids, table.planes)
            middle = time.perf_counter()
            table.write(ids, rows)
            end = time.perf_counter()
            # The first round makes buffers and compiles.
            if number:
                seconds["gather"].setdefault(layout, []).append(middle - start)
                seconds["scatter"].setdefault(layout, []).append(end - middle)
    for operation, by_layout in seconds.items():
        yield {"state": state, "operation": operation, "unique": len(ids), "ms": medians(by_layout)}


def training_steps(
    memory: str, num_rows: int, dim: int, draw: Callable[[], torch.Tensor], rounds: int, folder: Path, state: str
) -> Iterator[dict[str, Any]]:
    """Yield forward, backward and a step of AdamW with exact idle rows."""
    seconds: dict[str, list[float]] = {}
    models = {}
    for layout in LAYOUTS:
        path = folder / f"{state}-{layout}.npy" if memory == "mmap" else None
        emb = st.Embedding(num_rows, dim, memory=memory, path=path, device="cpu", layout=layout, idle="exact")
        models[layout] = emb, torch.optim.AdamW(emb.parameters(), fused=True)
        # A step of all rows writes every page.
        emb.weight.sum().backward()
        models[layout][1].step()
        models[layout][1].zero_grad()
    for number in range(rounds + 4):
        ids = draw()
        for layout, (emb, optimizer) in models.items():
            if state == "cold":
                flush(emb.table, evict=True)
            start = time.perf_counter()
            emb(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # The first steps probe the optimizer and compile.
            if number >= 4:
                seconds.setdefault(layout, []).append(time.perf_counter() - start)
    yield {"state": state, "operation": "training step", "unique": len(ids.unique()), "ms": medians(seconds)}


def flush(table: st.Table, evict: bool) -> None:
    """Write every page of the table to the disk and, to `evict`, let go of it."""
    for name in table.planes:
        found = page_advice.map_of(table.stored(name))
        if found is not None:
            found[0].flush()
            if evict:
                found[0].madvise(_PAGEOUT)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Let rows be read as they are touched."""
    few, page_advice.FEW_ROWS = page_advice.FEW_ROWS, sys.maxsize
    try:
        yield
    finally:
        page_advice.FEW_ROWS = few


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians in ms."""
    return {layout: round(1e3 * statistics.median(values), 3) for layout, values in seconds.items()}


def describe(case: dict[str, Any]) -> str:
    """Return a line about one case."""
    planes, rows = (case["ms"][layout] for layout in LAYOUTS)
    return (
        f"{case['operation']} of {case['unique']:,} rows of {case['rows']:,} x {case['dim']}, {case['ids']}, {case['memory']} "
        f"{case['state']}: planes {planes:.2f} ms, rows {rows:.2f} ms, {planes / rows:.2f}x"
    )


if __name__ == "__main__":
    sys.exit(main())
