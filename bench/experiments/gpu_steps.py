"""The experiments of gpu.py that take training steps."""

from __future__ import annotations

import cProfile
import itertools
import pstats
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from warm_steps import Form, Sizes, Step, Words

from experiments.gpu_rows import DIM, Cases, Scale
from speedtransfer.benchmark.environment import set_variable
from speedtransfer.cuda import resolve_device
from speedtransfer.optim.fused_step import SWITCH

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
# The fastest of torch's for a dense table.
DENSE = OPTIMIZERS | {"AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)}
# Ways to train: optimizer, idle rows, layout. SGD has no state, so nothing that could lie beside the weights.
WAYS = (
    ("SGD", "lazy", "planes"),
    ("AdamW", "lazy", "planes"),
    ("AdamW", "lazy", "rows"),
    ("AdamW", "exact", "planes"),
    ("AdamW", "exact", "rows"),
)


@dataclass(frozen=True)
class Uniform(Form):
    """A form whose lookups are of a given share of distinct rows, anywhere in the table."""

    distinct: float = 0.92

    def _ids(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        count = max(1, round(self.distinct * sizes.lookups))
        rows = torch.randint(sizes.rows, (count,), generator=generator)
        again = rows[torch.randint(count, (sizes.lookups - count,), generator=generator)]
        return torch.cat([rows, again])[torch.randperm(sizes.lookups, generator=generator)]


def profile(scale: Scale) -> Cases:
    """Yield the device's time of a step by kernel."""
    for _, idle, layout in (WAYS[1], WAYS[3]):
        form = _form("AdamW", idle, layout)

        def measure(form: Form = form) -> dict[str, Any]:
            step = _built(form, Sizes(scale.small, scale.lookups, DIM))
            return {f"{name}us": _by_kernel(step, scale.steps) for name in _switched()}

        yield {"rows": scale.small, "lookups": scale.lookups, "optimizer": "AdamW", "idle": idle}, measure


def step(scale: Scale) -> Cases:
    """Yield the time of steps of one table, in host memory and as torch has it."""
    for wanted in (scale.small, scale.large):
        rows = scale.rows(wanted, 3)
        for optimizer, idle, layout in WAYS:
            facts = {"rows": rows, "optimizer": optimizer, "idle": idle, "layout": layout}
            yield _timed(facts, _form(optimizer, idle, layout), Sizes(rows, scale.lookups, DIM), scale.steps)
        for optimizer, make in DENSE.items():
            facts = {"rows": rows, "optimizer": optimizer, "dense": True}
            yield _timed(facts, Uniform("dense", optimizer=make), Sizes(rows, scale.lookups, DIM), scale.steps)


def fbgemm(scale: Scale) -> Cases:
    """Yield the time of steps of ten tables: 1,048,570 lookups of 433,720 rows of 512 bytes."""
    tables, rows = 10, scale.rows(scale.small, 30)
    sizes = Sizes(tables * rows, 8 * scale.lookups - 6, DIM)
    for (optimizer, idle, layout), together in itertools.product((*WAYS[:2], WAYS[3]), (False, True)):
        facts = {"rows": rows, "tables": tables, "optimizer": optimizer, "idle": idle, "together": together}
        form = replace(_form(optimizer, idle, layout), tables=tables, together=together, distinct=0.4136)
        yield _timed(facts, form, sizes, max(scale.steps // 2, 1))


def host(scale: Scale) -> Cases:
    """Yield the host's time of steps of ten small tables, and the functions that take most of it."""
    for optimizer, idle, layout in (*WAYS[:2], WAYS[3]):
        form = replace(_form(optimizer, idle, layout), tables=10)

        def measure(form: Form = form) -> dict[str, Any]:
            one = _built(form, Sizes(scale.small, 20_000, DIM))
            times, profiler = _time(one, 2 * scale.steps), cProfile.Profile()
            with profiler:
                _repeat(one, scale.steps)
            taken = {
                f"{name}, {Path(file).name}:{line}": 1e6 * own / scale.steps
                for (file, line, name), (_, _, own, *_) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
            }
            return {**times, "us": _longest(taken, 20)}

        yield {"tables": 10, "lookups": 2_000, "optimizer": optimizer, "idle": idle}, measure


def words(scale: Scale) -> Cases:
    """Yield words a second of word2vec's steps on the device and on the host."""
    for device, model in itertools.product(dict.fromkeys((resolve_device(None).type, "cpu")), ("skipgram", "cbow")):
        form = Words("device" if device == "cuda" else "pageable", model)

        def measure(form: Words = form, device: str = device) -> dict[str, Any]:
            sizes = Sizes(min(140_000, 70 * scale.small), scale.lookups // 2, 100)
            with tempfile.TemporaryDirectory() as folder:
                found = _time(form.build(sizes, torch.device(device), Path(folder)), scale.steps)
            return {**found, "words_per_s": round(1e3 * (sizes.lookups // 16) / found["ms"])}

        yield {"device": device, "model": model}, measure


def _form(optimizer: str, idle: str, layout: str) -> Uniform:
    memory = "pinned" if resolve_device(None).type == "cuda" else "pageable"
    return Uniform(memory, idle, OPTIMIZERS[optimizer], options={"layout": layout})


def _built(form: Form, sizes: Sizes) -> Step:
    return form.build(sizes, resolve_device(None), Path())


def _timed(
    facts: dict[str, Any], form: Form, sizes: Sizes, repeats: int
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    def measure() -> dict[str, Any]:
        one, found = _built(form, sizes), dict[str, float]()
        for name in _switched() if form.memory != "dense" else ("",):
            found |= {f"{name}{key}": value for key, value in _time(one, repeats).items()}
        return found

    return {**facts, "lookups": sizes.lookups}, measure


def _switched() -> Iterator[str]:
    """Yield "", the step in one kernel being off, and "fused_", with it on; on the CPU, which has none, the first."""
    for number, name in enumerate(("", "fused_") if resolve_device(None).type == "cuda" else ("",)):
        with set_variable(SWITCH, str(number)):
            yield name


def _repeat(one: Step, times: int) -> None:
    for _ in range(times):
        one()


def _time(one: Step, repeats: int) -> dict[str, float]:
    """Return milliseconds of a step: by the clock over many, so that host and device overlap, and of the host alone."""
    _repeat(one, 5)
    _synchronize()
    start = time.perf_counter()
    _repeat(one, repeats)
    queued = time.perf_counter()
    _synchronize()
    spans = {"ms": time.perf_counter() - start, "host_ms": queued - start}
    return {name: round(1e3 * span / repeats, 4) for name, span in spans.items()}


def _by_kernel(one: Step, repeats: int) -> dict[str, float]:
    """Return microseconds a step of each kernel, the longest first."""
    cuda = resolve_device(None).type == "cuda"
    _repeat(one, 5)
    _synchronize()
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as found:
        _repeat(one, repeats)
        _synchronize()
    times: dict[str, float] = {}
    for item in found.key_averages():
        name = (
            re.split(r"[<(]", re.sub(r"\(anonymous namespace\)::|^void ", "", item.key))[0].strip().rpartition("::")[2]
        )
        taken = item.self_device_time_total if cuda else item.self_cpu_time_total
        times[name] = times.get(name, 0.0) + taken / repeats
    return _longest(times, 30)


def _longest(times: dict[str, float], count: int) -> dict[str, float]:
    chosen = sorted(times.items(), key=lambda item: -item[1])[:count]
    return {name: round(taken, 1) for name, taken in chosen if taken >= 1}


def _synchronize() -> None:
    if resolve_device(None).type == "cuda":
        torch.cuda.synchronize()
