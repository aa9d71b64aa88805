"""A gather and a scatter at the same time, on two streams: a bus carries both directions at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from speedtransfer.benchmark import rival_ways, ways
from speedtransfer.benchmark.measure import Case, cycle
from speedtransfer.benchmark.ways import Way
from speedtransfer.benchmark.workload import Ids, Workload
from speedtransfer.engines import Direction


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
