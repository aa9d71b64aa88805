"""Groups of suite `transfer`: methods to move rows by direction, size, memory and ids, and both directions at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.methods import (
    Method,
    as_case,
    both_engines_method,
    check_copy,
    check_gather,
    check_scatter,
    engine_method,
    engines,
    our_methods,
    roofs,
)
from speedtransfer.benchmark.rival_methods import other_methods
from speedtransfer.benchmark.workload import Ids, Tables, Workload, workload
from speedtransfer.engines import Direction, MappedEngine
from speedtransfer.errors import format_bytes

ROWS, ROW_BYTES = 131_072, 512  # of the headline: SpeedTorch's own batch
_CALL_BYTES = 1 << 28  # limit of one call: a million rows of 256 bytes
_SECOND_TABLE_BYTES = 1 << 30  # limit of tables in other memories than the main one
_OVERHEAD_ROWS = 1000
FEW_BLOCKS = 16  # should be enough: so small a launch leaves the device to training
_LAUNCH_S = 8.0  # reserved for each group about the size of a launch


class Plan:
    """Makes groups over tables that share their memory."""

    def __init__(self, device: torch.device, rows: int, table_bytes: int, seed: int) -> None:
        self.device, self.rows, self.table_bytes, self.seed = device, rows, table_bytes, seed
        self.main = "pinned" if device.type == "cuda" else "pageable"
        self.tables = Tables(device)

    def moves(self, direction: Direction, all_of_them: bool = False, **params: Any) -> Group:
        """Compare methods to move rows; `params` are those of `_params`."""

        def make(work: Workload) -> list[Method]:
            found = our_methods(work, direction) + other_methods(work, direction, all_of_them)
            both = all_of_them and work.table.memory == "pinned" and direction == "gather"
            return [*found, both_engines_method(work)] if both else found

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

    def launch(self, direction: Direction) -> Group:
        """Compare numbers of blocks of a kernel: unused ones are free for training."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        sizes = {4, FEW_BLOCKS // 2, FEW_BLOCKS, *(int(processors * share) for share in (1 / 4, 1 / 2, 1, 2, 4, 8))}

        def make(work: Workload) -> list[Method]:
            found = [(f"{size} blocks", MappedEngine(self.device, max_blocks=size)) for size in sorted(sizes)]
            return [engine_method(name, engine, work, direction, unsorted=False) for name, engine in found]

        return self._group("launch", direction, make)

    def bulk(self, direction: Direction, row_bytes: int) -> Group:
        """Compare the bulk copies of Hopper with ordinary loads across the bus."""

        def make(work: Workload) -> list[Method]:
            found = [(f"mapped ({name})", MappedEngine(self.device, kernel=name)) for name in ("lanes", "bulk")]
            return [engine_method(name, engine, work, direction, unsorted=False) for name, engine in found]

        return self._group("bulk", direction, make, row_bytes=row_bytes)

    def _group(self, kind: str, direction: Direction, make: Callable[[Workload], list[Method]], **params: Any) -> Group:
        params = self._params(kind, direction, **params)
        memory, count, row_bytes, ids = (params[name] for name in ("memory", "rows", "row_bytes", "ids"))

        def cases() -> list[Case]:
            table = self.tables.table(memory, self._bytes(memory), row_bytes // 4)
            work = workload(table, count, ids, repeats=direction == "gather", seed=self.seed)
            if kind in ("launch", "bulk"):  # training passes sorted ids to an engine
                work.sort()
            return [as_case(method, work, direction) for method in [*make(work), *roofs(work, direction)]]

        reserved_s = _LAUNCH_S if kind == "launch" else 0.0
        what = {"overhead": "overhead: ", "launch": "launch size: ", "bulk": "bulk copies: "}.get(kind, "")
        draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
        title = f"{what}{direction} {count:,} rows of {row_bytes:,} B{draw.get((ids, direction), '')}"
        title += f", {memory} table of {format_bytes(self._bytes(memory))}"
        return Group(title, cases, params, reserved_s)

    def stride(self, direction: Direction) -> Group:
        """Compare rows of 400 bytes with rows padded to 512, a multiple of what memory and bus move at once."""
        dim, padded = 100, 128
        params = self._params("stride", direction, row_bytes=4 * padded)
        count = params["rows"]

        def cases() -> list[Case]:
            found = []
            for stride, how in ((dim, "dense rows"), (padded, "padded rows")):
                table = self.tables.table(self.main, self.table_bytes, dim, stride)
                work = workload(table, count, seed=self.seed)
                name, engine = engines(self.main, self.device)[0]
                found.append(as_case(engine_method(f"{name}, {how}", engine, work, direction), work, direction))
            return found + [as_case(roof, work, direction) for roof in roofs(work, direction)]

        title = (
            f"row stride: {direction} {count:,} rows of {4 * dim} B, padded to {4 * padded} B or not, {self.main} table"
        )
        return Group(title, cases, params | {"row_bytes": 4 * dim})

    def both(self) -> Group:
        """Compare a gather and a scatter at once with two plain copies at once."""
        params = self._params("both", "both", "pinned", headline=True)
        count = params["rows"]

        def cases() -> list[Case]:
            plane = self.tables.table("pinned", self.table_bytes, ROW_BYTES // 4).torch()
            half = len(plane) // 2
            parts = [self.tables.over(part) for part in (plane[:half], plane[half:])]
            return _together(*(workload(part, count, seed=self.seed + i) for i, part in enumerate(parts)))

        title = f"both at once: gather and scatter {count:,} rows of {ROW_BYTES} B each, pinned tables"
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


# --- a gather and a scatter at the same time ----------------------------------------------------------------------------


def _together(to: Workload, back: Workload) -> list[Case]:
    """Make a case of each method that gathers from one table while it scatters to another."""
    streams = [torch.cuda.Stream(to.device) for _ in range(2)]
    threads = ThreadPoolExecutor(2)
    pairs = zip(_methods(to, "gather"), _methods(back, "scatter"), strict=True)
    return [_case(gather, scatter, to, back, streams, threads) for gather, scatter in pairs]


def _methods(work: Workload, direction: Direction) -> list[Method]:
    found = our_methods(work, direction) + other_methods(work, direction, all_of_them=False)
    return [method for method in found if method.kind != "plain"] + roofs(work, direction)


def _case(
    gather: Method,
    scatter: Method,
    to: Workload,
    back: Workload,
    streams: list[torch.cuda.Stream],
    threads: ThreadPoolExecutor,
) -> Case:
    def on_stream(number: int, method: Method, ids: Ids) -> Any:
        with torch.cuda.stream(streams[number]):
            return method.move(ids)

    def both(first: Ids, second: Ids) -> Any:
        if gather.queues and scatter.queues:
            rows = on_stream(0, gather, first)
            on_stream(1, scatter, second)
            return rows
        # A method that waits on the host needs a thread, or the two would run one after the other.
        moves = [threads.submit(on_stream, *move) for move in ((0, gather, first), (1, scatter, second))]
        rows, _ = (move.result() for move in moves)
        return rows

    def check() -> None:
        if roof:
            check_copy(gather, to)
            check_copy(scatter, back)
            return
        check_gather(Method(gather.name, lambda ids: both(ids, back.sets[0])), to)
        check_scatter(Method(scatter.name, lambda ids: both(to.sets[0], ids)), back)

    turns = cycle(to.sets), cycle(back.sets)
    roof = gather.role == "roof"
    name = gather.name if gather.name == scatter.name else f"{gather.name}; {scatter.name}"
    return Case(
        "two cudaMemcpy at once" if roof else name,
        lambda: both(turns[0](), turns[1]()),
        check,
        to.payload_bytes + back.payload_bytes,
        gather.role,
        kind=gather.kind,
    )
