"""Groups of suite `transfer`: methods to move rows by direction, size, memory and ids, and both directions at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.methods import (
    Method,
    as_case,
    our_methods,
    roofs,
)
from speedtransfer.benchmark.rival_methods import other_methods
from speedtransfer.benchmark.workload import Tables, Workload, workload
from speedtransfer.engines import Direction
from speedtransfer.errors import format_bytes

ROWS, ROW_BYTES = 131_072, 512  # of the headline: SpeedTorch's own batch
_CALL_BYTES = 1 << 28  # limit of one call: a million rows of 256 bytes
_SECOND_TABLE_BYTES = 1 << 30  # limit of tables in other memories than the main one
_OVERHEAD_ROWS = 1000


class Plan:
    """Makes groups over tables that share their memory."""

    def __init__(self, device: torch.device, rows: int, table_bytes: int, seed: int) -> None:
        self.device, self.rows, self.table_bytes, self.seed = device, rows, table_bytes, seed
        self.main = "pinned" if device.type == "cuda" else "pageable"
        self.tables = Tables(device)

    def moves(self, direction: Direction, all_of_them: bool = False, **params: Any) -> Group:
        """Compare methods to move rows; `params` are those of `_params`."""

        def make(work: Workload) -> list[Method]:
            return our_methods(work, direction) + other_methods(work, direction, all_of_them)

        # The kind that recorded results have.
        return self._group("ways", direction, make, **params)

    def overhead(self, direction: Direction) -> Group:
        """Compare the overhead of calls that move few rows."""

        def make(work: Workload) -> list[Method]:
            found = our_methods(work, direction) + other_methods(work, direction, all_of_them=False)
            if self.device.type == "cuda":
                found.append(Method("empty launch", lambda ids: torch.cuda._sleep(0), queues=True, kind="empty"))
            return found

        return self._group("overhead", direction, make, rows=min(_OVERHEAD_ROWS, self.rows), headline=True)

    def _group(self, kind: str, direction: Direction, make: Callable[[Workload], list[Method]], **params: Any) -> Group:
        params = self._params(kind, direction, **params)
        memory, count, row_bytes, ids = (params[name] for name in ("memory", "rows", "row_bytes", "ids"))

        def cases() -> list[Case]:
            table = self.tables.table(memory, self._bytes(memory), row_bytes // 4)
            work = workload(table, count, ids, repeats=direction == "gather", seed=self.seed)
            return [as_case(method, work, direction) for method in [*make(work), *roofs(work, direction)]]

        what = "overhead: " if kind == "overhead" else ""
        draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
        title = f"{what}{direction} {count:,} rows of {row_bytes:,} B{draw.get((ids, direction), '')}"
        title += f", {memory} table of {format_bytes(self._bytes(memory))}"
        return Group(title, cases, params)

    def _bytes(self, memory: str) -> int:
        return self.table_bytes if memory == self.main else min(self.table_bytes, _SECOND_TABLE_BYTES)

    def _params(
        self,
        kind: str,
        direction: str,
        memory: str = "",
        rows: int = 0,
        row_bytes: int = ROW_BYTES,
        ids: str = "uniform",
        headline: bool = False,
    ) -> dict[str, Any]:
        """Return the parameters of a group; `rows` is limited by half of the table and by the bytes of a call."""
        memory = memory or self.main
        have = self._bytes(memory) // row_bytes
        rows = max(1, min(rows or self.rows, have // 2, _CALL_BYTES // row_bytes))
        return {
            "kind": kind, "direction": direction, "memory": memory, "rows": rows, "row_bytes": row_bytes, "ids": ids,
            "headline": headline, "table_bytes": self._bytes(memory),
        }  # fmt: skip
