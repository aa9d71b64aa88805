"""What a training step takes of a GPU: ``python bench/record.py here --only gpu``, some five minutes.

Steps of one table, small and large, by optimizer, idle rows and layout, with the step in one kernel and without, beside dense
training; of ten tables, of the sizes that FBGEMM publishes; the host's time of ten small tables; words a second of word2vec;
the device's time by kernel; and what rows alone take. Without a GPU what needs none runs on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from warm_steps import Form, Sizes, Step, Words

from speedtransfer.benchmark.environment import host_room
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult
from speedtransfer.cuda import pinned_empty, resolve_device, synchronize
from speedtransfer.engines import MappedEngine
from speedtransfer.errors import DeviceError
from speedtransfer.optim.fused_step import SWITCH

NOTE = "Rows have 512 bytes and are in page-locked memory; `nn.Embedding` is on the GPU, its AdamW with `fused=True`."
VALUE = None

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
# The fastest of torch's for a dense table.
DENSE = OPTIMIZERS | {"AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)}
# Ways to train: optimizer, idle rows, layout. SGD has no state, so nothing that could lie beside the weights.
SGD, LAZY, LAZY_ROWS, EXACT, EXACT_ROWS = WAYS = (
    ("SGD", "lazy", "planes"),
    ("AdamW", "lazy", "planes"),
    ("AdamW", "lazy", "rows"),
    ("AdamW", "exact", "planes"),
    ("AdamW", "exact", "rows"),
)
KERNELS = 8  # of the profile, the longest
NEED_CUDA = ("both_ways", "few_blocks", "pages")
DIM = 128
MANY_DISTINCT = 0.4136  # the share of distinct rows among the lookups of `many`
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
        return [gb for gb in self.gb if gb * 2**30 < host_room(HOST_SHARE)]


TINY = Scale(2_000, 4_000, 512, 2, (1 / 256,), 64)


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each experiment, in the order of what they tell; a profiler makes later launches slower."""
    scale = TINY if quick else Scale()
    if device.type == "cuda":
        # Another engine would be another experiment. Memory that is registered serves rows as fast as what CUDA allocates,
        # and is there in a fraction of the time (see `pages`).
        os.environ.setdefault("SPEEDTRANSFER_ENGINE", "mapped")
        os.environ.setdefault("SPEEDTRANSFER_PINNED", "register")
    small, large = (scale.rows(wanted, 3) for wanted in (scale.small, scale.large))
    rows = [small, scale.rows(8 * scale.small, 2)]
    sizes = scale.sizes or (0,)
    found = [
        *(_group(f"step of {scale.lookups:,} lookups in {n:,} rows, ms", step, scale, n) for n in (small, large)),
        _group(f"step of ten tables of {small:,} rows, {many(scale):,} lookups in all, ms", fbgemm, scale),
        *(_group(f"rows read beside rows written, {n:,} rows, GB/s", both_ways, scale, n) for n in rows),
        _group(f"rows read beside a product of matrices, {rows[1]:,} rows, GB/s", few_blocks, scale),
        _group("step of ten small tables, 2,000 lookups each, ms", host, scale),
        _group("word2vec, 100 dimensions, window 5", words, scale),
        _group(f"the device's time of a step of AdamW, {small:,} rows, us by kernel", profile, scale),
        *(_group(f"rows anywhere in a table of {gb:g} GB, GB/s", pages, scale, gb) for gb in sizes),
    ]
    return list({group.title: group for group in found}.values())


def _group(title: str, cases: Callable[..., Cases], scale: Scale, *size: float) -> Group:
    params = {"experiment": cases.__name__, "headline": False, **({"size": size[0]} if size else {})}
    return Group(title, functools.partial(_measured, cases, scale, *size), params)


def _measured(cases: Callable[..., Cases], *about: Any) -> list[CaseResult]:
    """Return what an experiment finds; one that fails costs no other."""
    if cases.__name__ in NEED_CUDA and resolve_device(None).type != "cuda":
        raise DeviceError("needs CUDA")
    found: list[CaseResult] = []
    for name, measure in cases(*about):
        found.append(CaseResult(name, "other" if name.startswith("nn.") else "ours", 0))
        try:
            found[-1].figures = measure()
        except Exception as error:
            found[-1].error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


# --- steps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniform(Form):
    """A form whose lookups are of a given share of distinct rows, anywhere in the table."""

    distinct: float = 0.92

    def _ids(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        count = max(1, round(self.distinct * sizes.lookups))
        rows = torch.randint(sizes.rows, (count,), generator=generator)
        again = rows[torch.randint(count, (sizes.lookups - count,), generator=generator)]
        return torch.cat([rows, again])[torch.randperm(sizes.lookups, generator=generator)]


def step(scale: Scale, rows: int) -> Cases:
    sizes = Sizes(rows, scale.lookups, DIM)
    for way in WAYS:
        yield ", ".join(way), functools.partial(_times, _form(*way), sizes, scale.steps)
    for name, make in DENSE.items():
        form = Uniform("dense", optimizer=make)
        yield f"nn.Embedding, {name}", functools.partial(_times, form, sizes, scale.steps, switched=False)


def many(scale: Scale) -> int:
    """Return the lookups of a step of ten tables."""
    return 8 * scale.lookups - 6


def fbgemm(scale: Scale) -> Cases:
    """Yield the time of steps of ten tables: 1,048,570 lookups of 433,720 rows of 512 bytes."""
    sizes = Sizes(10 * scale.rows(scale.small, 30), many(scale), DIM)
    for (optimizer, idle, layout), together in itertools.product((SGD, LAZY, EXACT), (False, True)):
        form = replace(_form(optimizer, idle, layout), tables=10, together=together, distinct=MANY_DISTINCT)
        modules = "MultiEmbedding" if together else "10 Embeddings"
        yield f"{modules}, {optimizer}, {idle}", functools.partial(_times, form, sizes, max(scale.steps // 2, 1))


def host(scale: Scale) -> Cases:
    for way in (SGD, LAZY, EXACT):
        form, sizes = replace(_form(*way), tables=10), Sizes(scale.small, 20_000, DIM)
        yield ", ".join(way[:2]), functools.partial(_times, form, sizes, 2 * scale.steps)


def words(scale: Scale) -> Cases:
    sizes = Sizes(min(140_000, 70 * scale.small), scale.lookups // 2, 100)

    def measure(device: str, model: str) -> dict[str, float]:
        form = Words("device" if device == "cuda" else "pageable", model)
        ms, _ = _time(form.build(sizes, torch.device(device), Path()), scale.steps)
        return {"words a second": round(1e3 * (sizes.lookups // 16) / ms)}

    for device, model in itertools.product(dict.fromkeys((resolve_device(None).type, "cpu")), ("skipgram", "cbow")):
        yield f"{model} on {device}", functools.partial(measure, device, model)


def profile(scale: Scale) -> Cases:
    """Yield for each kernel its time in a step, lazy and exact."""
    taken: dict[str, dict[str, float]] = {}
    for way in (LAZY, EXACT):
        one = _form(*way).build(Sizes(scale.small, scale.lookups, DIM), resolve_device(None), Path())
        for switch in _switches():
            taken[f"{way[1]}{', in one kernel' if switch == '1' else ''}"] = _by_kernel(one, scale.steps)
    most = {name: max(times.get(name, 0.0) for times in taken.values()) for times in taken.values() for name in times}
    for name in sorted(most, key=lambda name: -most[name])[:KERNELS]:
        yield name, lambda name=name: {how: round(times.get(name, 0.0), 1) for how, times in taken.items()}  # type: ignore[misc]


def _form(optimizer: str, idle: str, layout: str) -> Uniform:
    memory = "pinned" if resolve_device(None).type == "cuda" else "pageable"
    return Uniform(memory, idle, OPTIMIZERS[optimizer], options={"layout": layout})


def _times(form: Form, sizes: Sizes, repeats: int, switched: bool = True) -> dict[str, float]:
    """Return milliseconds of a step, of the clock and of the host, with the step in several kernels and in one."""
    one, found = form.build(sizes, resolve_device(None), Path()), dict[str, float]()
    for switch in _switches() if switched else ("0",):
        kernels = "one kernel" if switch == "1" else "several kernels"
        found[kernels], found[f"host, {kernels}"] = _time(one, repeats)
    return found


def _switches() -> Iterator[str]:
    """Yield "0", the step in one kernel being off, and "1", with it on; on the CPU, which has none, the first."""
    for switch in ("0", "1") if resolve_device(None).type == "cuda" else ("0",):
        with patch.dict(os.environ, {SWITCH: switch}):
            yield switch


def _repeat(one: Step, times: int) -> None:
    for _ in range(times):
        one()


def _time(one: Step, repeats: int) -> tuple[float, float]:
    """Return milliseconds of a step: by the clock over many, so that host and device overlap, and of the host alone."""
    device = resolve_device(None)
    _repeat(one, 5)
    synchronize(device)
    start = time.perf_counter()
    _repeat(one, repeats)
    queued = time.perf_counter()
    synchronize(device)
    return round(1e3 * (time.perf_counter() - start) / repeats, 4), round(1e3 * (queued - start) / repeats, 4)


def _by_kernel(one: Step, repeats: int) -> dict[str, float]:
    device = resolve_device(None)
    cuda = device.type == "cuda"
    _repeat(one, 5)
    synchronize(device)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as found:
        _repeat(one, repeats)
        synchronize(device)
    times: dict[str, float] = {}
    for item in found.key_averages():
        name = re.split(r"[<(]", re.sub(r"\(anonymous namespace\)::|^void ", "", item.key))[0]
        name = name.strip().rpartition("::")[2]
        taken = item.self_device_time_total if cuda else item.self_cpu_time_total
        times[name] = times.get(name, 0.0) + taken / repeats
    return times


# --- rows alone, on a GPU ------------------------------------------------------------------------------------------------

LAUNCHES = (16, 32, 264)  # blocks, of `pages` and `both_ways`
FEW = (4, 8, 16, 32, 66, 132, 264)

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

    def by_kernels(*engines: MappedEngine) -> dict[str, float]:
        queues: list[Queue] = []
        for side, (engine, way) in enumerate(zip(engines, ("gather", "scatter"), strict=True)):
            rows = there[side][: len(index[side])]
            move = functools.partial(getattr(engine, way), [planes[side]], index[side], [rows])
            queues.append((sides[side], rows.nbytes, move))
        return found(queues)

    # Two never share an engine, so that neither waits for the other.
    for (name, read), (_, written) in zip(_engines(LAUNCHES), _engines(LAUNCHES), strict=True):
        yield name, functools.partial(by_kernels, read, written)
    ends = [(one[: len(plane)], plane[: scale.lookups]) for one, plane in zip(there, planes, strict=True)]
    copies: list[Queue] = []
    for side, (to, of) in zip(sides, (ends[0], ends[1][::-1]), strict=True):
        copies.append((side, to.nbytes, functools.partial(to.copy_, of, non_blocking=True)))
    yield "plain copies", functools.partial(found, copies)


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

    def measure(engine: MappedEngine) -> dict[str, float]:
        move = side, rows.nbytes, lambda: engine.gather([plane], index, [rows])
        alone, (beside, speed) = _rates(move)[0], _rates(move, product)
        return {"alone": alone, "beside": beside, "product, TFLOP/s": speed}

    for name, engine in _engines(FEW):
        yield name, functools.partial(measure, engine)


def pages(scale: Scale, gb: float) -> Cases:
    rows = torch.zeros(scale.lookups, DIM, device="cuda")
    for allocator in ("alloc", "register"):
        start = time.perf_counter()
        with patch.dict(os.environ, SPEEDTRANSFER_PINNED=allocator):
            plane = _plane(int(gb * 2**30) // ROW_BYTES)
        seconds = (time.perf_counter() - start) / gb
        yield f"memory, {allocator}", lambda seconds=seconds: {"s a GB": round(seconds, 3)}  # type: ignore[misc]
        sets = itertools.cycle([_draw(len(plane), scale) for _ in range(6)])
        for name, engine in _engines(LAUNCHES):
            yield f"{name}, {allocator}", functools.partial(_moved, engine, plane, sets, rows)
        del plane


def _moved(engine: MappedEngine, plane: Tensor, sets: Iterator[Tensor], rows: Tensor) -> dict[str, float]:
    stream, num_bytes = torch.cuda.current_stream(), ROW_BYTES * len(next(sets))

    def move(way: str) -> None:
        ids = next(sets)
        getattr(engine, way)([plane], ids, [rows[: len(ids)]])

    return {way: _rates((stream, num_bytes, functools.partial(move, way)))[0] for way in ("gather", "scatter")}


def _engines(launches: Sequence[int]) -> Iterator[tuple[str, MappedEngine]]:
    for blocks in launches:
        yield f"lanes {blocks}", MappedEngine("cuda", max_blocks=blocks)


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
