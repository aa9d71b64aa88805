"""Suite `transfer`: selected rows to the compute device and back, against PyTorch, CuPy and a plain copy.

Tables are much larger than the cache, and batches of ids are used in turn: this measures memory and the bus.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from speedtransfer.benchmark.measure import MIN_TABLE_BYTES, Case, Group
from speedtransfer.benchmark.methods import all_cases
from speedtransfer.benchmark.report import show_rate
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.workload import Tables, default_table_bytes, workload
from speedtransfer.engines import DIRECTIONS, Direction
from speedtransfer.errors import check_size, format_bytes

NOTE = """\
The roof is one cudaMemcpy of page-locked memory; without CUDA it is the faster of torch's copy_ on all cores and a copy that \
writes past the cache. Batches with repeated ids (Zipf) can beat it: their rows are read once and sent often. Distinct ids \
exceed it only by noise or by what a cache still holds. "speedtransfer" is the call as anyone makes it, with all checks; \
check=False is what training uses, which knows that its ids are distinct and in range."""


BY = ("row_bytes", "bytes of a row")
COLUMNS = {"GB/s and share of a plain copy": show_rate}
VALUE = (lambda case: case.gb_per_s, "GB/s of rows")

ROWS, ROW_BYTES = 131_072, 512  # of the headline: SpeedTorch's own batch
_CALL_BYTES = 1 << 28  # limit of one call: a million rows of 256 bytes
_SECOND_TABLE_BYTES = 1 << 30  # limit of tables in other memories than the main one
_OVERHEAD_ROWS = 1000


def series(group: GroupResult) -> str:
    """Return the direction; the first group of each row size is put side by side."""
    return str(group.params["direction"]) if group.params["kind"] == "ways" else ""


def groups(
    device: torch.device,
    quick: bool,
    rows: int | None = None,
    table_bytes: int | None = None,
    seed: int = 0,
    **others: Any,
) -> list[Group]:
    """Make all groups of the suite; `rows` are those of a batch."""
    cuda = device.type == "cuda"
    main, tables = "pinned" if cuda else "pageable", Tables(device)
    batch = check_size((ROWS if cuda or not quick else ROWS // 2) if rows is None else rows, "rows", 1)
    most_bytes = default_table_bytes(device, quick) if table_bytes is None else table_bytes
    check_size(most_bytes, "table_bytes", MIN_TABLE_BYTES)

    def compare(wanted: int = batch, row_bytes: int = ROW_BYTES, ids: str = "uniform", **others: Any) -> list[Group]:
        memory, overhead = others.get("memory", main), others.get("overhead", False)
        num_bytes = most_bytes if memory == main else min(most_bytes, _SECOND_TABLE_BYTES)
        count = max(1, min(wanted, num_bytes // row_bytes // 2, _CALL_BYTES // row_bytes))

        def cases(direction: Direction) -> list[Case]:
            table = tables.table(memory, num_bytes, row_bytes // 4)
            return all_cases(workload(table, count, ids, repeats=direction == "gather", seed=seed), direction)

        found = []
        for direction in DIRECTIONS:
            draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
            title = f"{'overhead: ' * overhead}{direction} {count:,} rows of {row_bytes:,} B"
            title += f"{draw.get((ids, direction), '')}, {memory} table of {format_bytes(num_bytes)}"
            params = {
                "kind": "overhead" if overhead else "ways", "direction": direction, "memory": memory, "rows": count,
                "row_bytes": row_bytes, "ids": ids, "headline": overhead, "table_bytes": num_bytes,
            }  # fmt: skip
            found.append(Group(title, functools.partial(cases, direction), params))
        return found

    found = compare()
    for size in (64, 4096) if quick else (4, 16, 64, 256, 1024, 4096, 16384):
        found += compare(row_bytes=size)
    for number in () if quick else (1000, 10_000, 1_000_000):
        found += compare(number, 256)
    found += compare(ids="zipf") + compare(min(_OVERHEAD_ROWS, batch), overhead=True)
    for memory in ("pageable", "mmap", "device") if cuda else () if quick else ("mmap",):
        found += compare(memory=memory)
    # In a small table several sizes lead to the same number of rows; the first one keeps its place.
    return list({group.title: group for group in reversed(found)}.values())[::-1]
