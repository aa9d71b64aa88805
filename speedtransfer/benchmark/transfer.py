"""Suite `transfer`: selected rows to the compute device and back, against PyTorch, CuPy and a plain copy.

Tables are much larger than the cache, and batches of ids are used in turn: this measures memory and the bus.
"""

from __future__ import annotations

from typing import Any

import torch

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.methods import as_case, other_methods, our_methods, roofs
from speedtransfer.benchmark.report import show_rate
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES
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
    plan = _Plan(
        device,
        check_size((ROWS if cuda or not quick else ROWS // 2) if rows is None else rows, "rows", 1),
        check_size(
            default_table_bytes(device, quick) if table_bytes is None else table_bytes, "table_bytes", MIN_TABLE_BYTES
        ),
        seed,
    )
    found = [plan.moves(d) for d in DIRECTIONS]
    sizes = (64, 4096) if quick else (4, 16, 64, 256, 1024, 4096, 16384)
    found += [plan.moves(d, row_bytes=size) for size in sizes for d in DIRECTIONS]
    if not quick:
        found += [plan.moves(d, rows=n, row_bytes=256) for n in (1000, 10_000, 1_000_000) for d in DIRECTIONS]
    found += [plan.moves(d, ids="zipf") for d in DIRECTIONS]
    found += [plan.moves(d, rows=min(_OVERHEAD_ROWS, plan.rows), overhead=True) for d in DIRECTIONS]
    memories = ("pageable", "mmap", "device") if cuda else () if quick else ("mmap",)
    found += [plan.moves(d, memory=memory) for memory in memories for d in DIRECTIONS]
    # In a small table several sizes lead to the same number of rows; the first one keeps its place.
    return list({group.title: group for group in reversed(found)}.values())[::-1]


class _Plan:
    """Makes groups over tables that share their memory."""

    def __init__(self, device: torch.device, rows: int, table_bytes: int, seed: int) -> None:
        self.device, self.rows, self.table_bytes, self.seed = device, rows, table_bytes, seed
        self.main = "pinned" if device.type == "cuda" else "pageable"
        self.tables = Tables(device)

    def moves(
        self,
        direction: Direction,
        memory: str = "",
        rows: int = 0,
        row_bytes: int = ROW_BYTES,
        ids: str = "uniform",
        overhead: bool = False,
    ) -> Group:
        """Compare methods to move rows; `rows` is limited by the table and the bytes of a call."""
        memory = memory or self.main
        table_bytes = self.table_bytes if memory == self.main else min(self.table_bytes, _SECOND_TABLE_BYTES)
        rows = max(1, min(rows or self.rows, table_bytes // row_bytes // 2, _CALL_BYTES // row_bytes))

        def cases() -> list[Case]:
            table = self.tables.table(memory, table_bytes, row_bytes // 4)
            work = workload(table, rows, ids, repeats=direction == "gather", seed=self.seed)
            methods = our_methods(work, direction) + other_methods(work, direction) + roofs(work, direction)
            return [as_case(method, work, direction) for method in methods]

        draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
        title = f"{'overhead: ' * overhead}{direction} {rows:,} rows of {row_bytes:,} B{draw.get((ids, direction), '')}"
        title += f", {memory} table of {format_bytes(table_bytes)}"
        params = {
            "kind": "overhead" if overhead else "ways", "direction": direction, "memory": memory, "rows": rows,
            "row_bytes": row_bytes, "ids": ids, "headline": overhead, "table_bytes": table_bytes,
        }  # fmt: skip
        return Group(title, cases, params)
