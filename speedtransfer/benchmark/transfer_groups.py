"""The groups of suite `transfer`: ways to move rows by direction, size, memory and ids, and both directions at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from speedtransfer.benchmark import rival_ways, ways
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.ways import Way
from speedtransfer.benchmark.workload import Ids, Tables, Workload, workload
from speedtransfer.engines import Direction, MappedEngine
from speedtransfer.errors import format_bytes

ROWS, ROW_BYTES = 131_072, 512  # of the headline: SpeedTorch's own batch
_CALL_BYTES = 1 << 28  # the most that one call moves: a million rows of 256 bytes
_SECOND_TABLE_BYTES = 1 << 30  # of other memories than the main one
_OVERHEAD_ROWS = 1000
FEW_BLOCKS = 16  # that should do: a launch so small leaves the device to training
_LAUNCH_S = 8.0  # that a run with little time keeps for each of the groups which tell


class Plan:
    """Makes groups over tables that share their memory."""

    def __init__(self, device: torch.device, rows: int, table_bytes: int, seed: int) -> None:
        self.device, self.rows, self.table_bytes, self.seed = device, rows, table_bytes, seed
        self.main = "pinned" if device.type == "cuda" else "pageable"
        self.tables = Tables(device)

    def ways(self, direction: Direction, all_of_them: bool = False, **params: Any) -> Group:
        """Return the ways to move rows; `params` are those of `_params`."""

        def make(work: Workload) -> list[Way]:
            found = ways.our_ways(work, direction) + rival_ways.other_ways(work, direction, all_of_them)
            both = all_of_them and work.table.memory == "pinned" and direction == "gather"
            return [*found, ways.both_engines_way(work)] if both else found

        return self._group("ways", direction, make, **params)

    def overhead(self, direction: Direction) -> Group:
        """Return what a call costs that moves next to nothing."""

        def make(work: Workload) -> list[Way]:
            found = ways.our_ways(work, direction) + rival_ways.other_ways(work, direction, all_of_them=False)
            if self.device.type == "cuda":
                found.append(Way("empty launch", lambda ids: torch.cuda._sleep(0), queues=True, kind="empty"))
            return found

        return self._group("overhead", direction, make, rows=min(_OVERHEAD_ROWS, self.rows), headline=True)

    def launch(self, direction: Direction) -> Group:
        """Return how many blocks a kernel needs: those it leaves are free for training."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def make(work: Workload) -> list[Way]:
            sizes = sorted(
                {4, FEW_BLOCKS // 2, FEW_BLOCKS, *(int(processors * share) for share in (1 / 4, 1 / 2, 1, 2, 4, 8))}
            )
            engines = [(f"{size} blocks", MappedEngine(self.device, max_blocks=size)) for size in sizes]
            return [ways.engine_way(name, engine, work, direction, unsorted=False) for name, engine in engines]

        return self._group("launch", direction, make)

    def bulk(self, direction: Direction, row_bytes: int) -> Group:
        """Return whether the bulk copies of Hopper cross the bus faster than the loads of every kernel."""

        def make(work: Workload) -> list[Way]:
            kernels = [(kernel, MappedEngine(self.device, kernel=kernel)) for kernel in ("lanes", "bulk")]
            return [
                ways.engine_way(f"mapped ({name})", engine, work, direction, unsorted=False) for name, engine in kernels
            ]

        return self._group("bulk", direction, make, row_bytes=row_bytes)

    def _group(self, kind: str, direction: Direction, make: Callable[[Workload], list[Way]], **params: Any) -> Group:
        params = self._params(kind, direction, **params)
        memory, count, row_bytes, ids = (params[name] for name in ("memory", "rows", "row_bytes", "ids"))

        def cases() -> list[Case]:
            table = self.tables.table(memory, self._bytes(memory), row_bytes // 4)
            work = workload(table, count, ids, repeats=direction == "gather", seed=self.seed)
            if kind in ("launch", "bulk"):  # as training gives ids to an engine
                work.sort()
            return [ways.as_case(way, work, direction) for way in [*make(work), *ways.roofs(work, direction)]]

        reserved_s = _LAUNCH_S if kind == "launch" else 0.0
        what = {"overhead": "overhead: ", "launch": "launch size: ", "bulk": "bulk copies: "}.get(kind, "")
        draw = {("zipf", "gather"): ", Zipf", ("zipf", "scatter"): ", the distinct ones of a Zipf draw"}
        title = f"{what}{direction} {count:,} rows of {row_bytes:,} B{draw.get((ids, direction), '')}"
        title += f", {memory} table of {format_bytes(self._bytes(memory))}"
        return Group(title, cases, params, reserved_s)

    def stride(self, direction: Direction) -> Group:
        """Return whether it pays to pad rows of 400 bytes to 512, a multiple of what memory and bus move at once."""
        dim, padded = 100, 128
        params = self._params("stride", direction, row_bytes=4 * padded)
        count = params["rows"]

        def cases() -> list[Case]:
            found = []
            for stride, how in ((dim, "dense rows"), (padded, "padded rows")):
                table = self.tables.table(self.main, self.table_bytes, dim, stride)
                work = workload(table, count, seed=self.seed)
                name, engine = ways.engines(self.main, self.device)[0]
                way = ways.engine_way(f"{name}, {how}", engine, work, direction)
                found.append(ways.as_case(way, work, direction))
            return found + [ways.as_case(way, work, direction) for way in ways.roofs(work, direction)]

        title = (
            f"row stride: {direction} {count:,} rows of {4 * dim} B, padded to {4 * padded} B or not, {self.main} table"
        )
        return Group(title, cases, params | {"row_bytes": 4 * dim})

    def both(self) -> Group:
        """Return a gather and a scatter at once, against two plain copies at once."""
        params = self._params("both", "both", "pinned", headline=True)
        count = params["rows"]

        def cases() -> list[Case]:
            plane = self.tables.table("pinned", self.table_bytes, ROW_BYTES // 4).torch()
            half = len(plane) // 2
            parts = [self.tables.over(part) for part in (plane[:half], plane[half:])]
            return together_cases(*(workload(part, count, seed=self.seed + i) for i, part in enumerate(parts)))

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
        """Return what a group is about; `rows` is the most it moves, where half of the table is more, and one call may."""
        memory = memory or self.main
        have = self._bytes(memory) // row_bytes
        rows = max(1, min(rows or self.rows, have // 2, _CALL_BYTES // row_bytes))
        return {
            "kind": kind, "direction": direction, "memory": memory, "rows": rows, "row_bytes": row_bytes, "ids": ids,
            "headline": headline, "table_bytes": self._bytes(memory),
        }  # fmt: skip


# --- a gather and a scatter at the same time --------------------------------------------------------------------------


def together_cases(to: Workload, back: Workload) -> list[Case]:
    """Return every way to gather from one table while rows are scattered into another one."""
    streams = [torch.cuda.Stream(to.device) for _ in range(2)]
    threads = ThreadPoolExecutor(2)
    pairs = zip(_ways(to, "gather"), _ways(back, "scatter"), strict=True)
    return [_case(gather, scatter, to, back, streams, threads) for gather, scatter in pairs]


def _ways(work: Workload, direction: Direction) -> list[Way]:
    found = ways.our_ways(work, direction) + rival_ways.other_ways(work, direction, all_of_them=False)
    return [way for way in found if way.kind != "plain"] + ways.roofs(work, direction)


def _case(
    gather: Way,
    scatter: Way,
    to: Workload,
    back: Workload,
    streams: list[torch.cuda.Stream],
    threads: ThreadPoolExecutor,
) -> Case:
    def on_stream(number: int, way: Way, ids: Ids) -> Any:
        with torch.cuda.stream(streams[number]):
            return way.move(ids)

    def both(first: Ids, second: Ids) -> Any:
        if gather.queues and scatter.queues:
            rows = on_stream(0, gather, first)
            on_stream(1, scatter, second)
            return rows
        # A way that waits on the host needs a thread, or the two would run one after the other.
        moves = [threads.submit(on_stream, *move) for move in ((0, gather, first), (1, scatter, second))]
        rows, _ = (move.result() for move in moves)
        return rows

    def check() -> None:
        if roof:
            ways.check_copy(gather, to)
            ways.check_copy(scatter, back)
            return
        ways.check_gather(Way(gather.name, lambda ids: both(ids, back.sets[0])), to)
        ways.check_scatter(Way(scatter.name, lambda ids: both(to.sets[0], ids)), back)

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
