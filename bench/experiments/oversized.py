"""Training steps of tables in a file, up to 37 times as large as the memory that the process may use.

A control group holds the process to 1 GB, pages of files included, while it trains; the same steps on just the rows in use,
in ordinary memory and without a limit, are the reference. Needs Linux, root for control groups, and 38 GB of disk:
``python bench/record.py here --only oversized --limit 3600``, with SPEEDTRANSFER_BENCH_DIR=FOLDER for another disk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.cold_tables import fill
from speedtransfer.benchmark.contenders import UnfilledEmbedding
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.memory import in_process
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.benchmark.workload import spread
from speedtransfer.errors import SpeedtransferError, StorageError
from speedtransfer.ranks.zipf import draw_ids

NOTE = (
    "Float32 rows of 64 with AdamW's state, with idle='exact' and layout='rows' in a file without a name, so that a row is in "
    "one record, all written before the first step; 512 "
    "examples of 8 Zipf ids a step (exponent 1.05), spread over the file. The process may use 1 GB, with the system's pages "
    "of its files, and has trained the 400,000 rows used most once before. These are in the cache where there is one "
    "(cache_rows, cache_counts). Beside it the same steps on the rows in use alone, in ordinary memory and without a limit. "
    "The losses of all steps are the same to the bit."
)
BY = ("gigabytes", "table with its state, GB")
DIM, FIELDS, EXAMPLES, EXPONENT, LIMIT_GB = 64, 8, 512, 1.05, 1
IN_MEMORY, IN_FILE, AHEAD = "rows in use, in memory", "in a file", "in a file, st.prefetch"
CACHED = "in a file, cache_rows, st.prefetch"
DEPTHS = {IN_FILE: 0, AHEAD: 2, CACHED: 2}
_PROCESSES = ((IN_MEMORY, IN_MEMORY), (IN_FILE, AHEAD), (CACHED, CACHED))  # each with the cases that take turns in it
COLUMNS = {
    "median, ms": lambda group, case: f"{1e3 * case.median_s:,.3g}",
    "read, MB a step": lambda group, case: f"{case.figures['read_MB']:.3g}" if case.figures else "",
    "written, MB a step": lambda group, case: f"{case.figures['written_MB']:.3g}" if case.figures else "",
}
_WIDTHS = {0: "the rows alone", 1024: "a network of width 1,024 on the rows"}
_STATES = 2  # of AdamW
_TURNS, _UNTIMED, _TIMED = 4, 5, 20  # steps of a stretch
_WARM_STRETCHES = 4  # after the rows used most
_HOT, _HOT_STEP = 400_000, 8192  # rows used most, which are trained first, so many a step; a cache has as many


def series(group: GroupResult) -> str:
    return _WIDTHS[group.params["width"]]


def about(groups: list[GroupResult]) -> list[str]:
    """Return what training takes of a table in a file, as multiples of the time in memory."""
    found = []
    for group in groups:
        alone = group.by_name[IN_MEMORY].median_s
        times = {name: group.by_name[name].median_s / alone for name in DEPTHS}
        found.append(
            f"{group.params['gigabytes']} GB, {series(group)}: a step takes {times[CACHED]:.2f} times as long as in memory "
            f"with st.prefetch and a cache, {times[AHEAD]:.2f} with st.prefetch alone, {times[IN_FILE]:.2f} without"
        )
    return found


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    sizes = (0.05,) if quick else (2, 10, 37)
    return [
        Group(
            f"{size} GB, {about}",
            functools.partial(_cases_of, width, size, quick, seed),
            {"gigabytes": size, "width": width},
        )
        for size in sizes
        for width, about in _WIDTHS.items()
    ]


def _cases_of(width: int, *given: Any) -> list[CaseResult]:
    found = _outcome(*given)
    if isinstance(found, SpeedtransferError):
        raise found
    return found[width]


@functools.lru_cache(maxsize=1)
def _outcome(*given: Any) -> dict[int, list[CaseResult]] | SpeedtransferError:
    """Return what `_measure` does, or the error: all groups of a size have one table, which takes minutes to write."""
    try:
        return _measure(*given)
    except SpeedtransferError as error:
        return error


def _measure(gigabytes: float, quick: bool, seed: int) -> dict[int, list[CaseResult]]:
    """Return the cases of each width, by processes that take the same steps."""
    turns, limit = (1, 0.5) if quick else (_TURNS, LIMIT_GB)
    runs = []
    for cases in _PROCESSES:
        with tempfile.TemporaryDirectory(dir=os.environ.get("SPEEDTRANSFER_BENCH_DIR"), prefix="oversized-") as name:
            free = shutil.disk_usage(name).free
            if free < 1.03e9 * gigabytes:
                raise StorageError(
                    f"the disk of {name!r} has {free / 1e9:.0f} GB free, less than the {gigabytes} GB of the table; "
                    "set SPEEDTRANSFER_BENCH_DIR to a folder on another"
                )
            runs.append(in_process(train_in, cases, Path(name), gigabytes, turns, seed, limit))
    if any(run["losses"] != runs[0]["losses"] for run in runs):
        raise AssertionError(f"{gigabytes} GB: losses in a file are not those in memory")
    return {
        width: [
            CaseResult(
                case, "other" if case == IN_MEMORY else "ours", 0, run["seconds"][key], figures=run["moved"][key]
            )
            for cases, run in zip(_PROCESSES, runs, strict=True)
            for case in dict.fromkeys(cases)
            for key in [f"{width} {case}"]
        ]
        for width in _WIDTHS
    }


# --- in a process of its own ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _held_to(gigabytes: float) -> Iterator[None]:
    """Hold this process to so much memory, pages of files included, by a control group of version 1 or 2."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first, second = own.get("memory"), own.get("")
    root, name, file = (
        ("/sys/fs/cgroup/memory", first, "memory.limit_in_bytes")
        if first is not None
        else ("/sys/fs/cgroup", second, "memory.max")
    )
    around = Path(f"{root}{name}")
    group = around / f"speedtransfer-{os.getpid()}"
    try:
        group.mkdir()
        try:
            (group / file).write_text(str(round(gigabytes * 2**30)))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            yield
        finally:
            (around / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
    except OSError as error:
        raise StorageError(
            f"no control group that limits memory can be made in {around} ({error.strerror}); this needs Linux and root"
        ) from error


def _ids(rows: int, hot: int, stretches: int, seed: int) -> list[Tensor]:
    """Return the ids of steps, by stretch: at first the rows used most, the first of them last."""
    steps = stretches * (_UNTIMED + _TIMED)
    drawn = draw_ids(rows, EXPONENT, steps * EXAMPLES * FIELDS, np.random.default_rng(seed))
    begun = spread(torch.arange(hot - hot % _HOT_STEP).flip(0), rows).view(-1, _HOT_STEP // FIELDS, FIELDS)
    return [begun, *spread(torch.from_numpy(drawn), rows).view(stretches, -1, EXAMPLES, FIELDS)]


def _made(rows: int, used: Tensor | None = None, **options: Any) -> tuple[st.Embedding, torch.optim.Optimizer]:
    """Return a table with its optimizer, all rows written, or the rows `used` of a larger one."""
    emb = UnfilledEmbedding(rows, DIM, device="cpu", layout="rows", **options)
    optimizer = torch.optim.AdamW(emb.parameters())
    fill(emb, optimizer, used)
    return emb, optimizer


def _moved() -> tuple[int, int]:
    """Return the bytes that this process had the disk read and write."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["read_bytes"]), int(counted["write_bytes"])


def _train(
    emb: st.Embedding, optimizer: torch.optim.Optimizer, stretches: list[Tensor], cases: tuple[str, str]
) -> dict[str, Any]:
    """Take steps with and without a network, in one case and in the other, in turns."""
    torch.manual_seed(0)
    sizes = (FIELDS * DIM, 1024, 1024, 1)
    layers = [each for pair in itertools.pairwise(sizes) for each in (nn.Linear(*pair), nn.ReLU())]
    network = nn.Sequential(*layers[:-1])
    other = torch.optim.AdamW(network.parameters(), fused=True)
    losses, seconds, moved = list[float](), dict[str, list[float]](), dict[str, list[Any]]()
    first = 1 + _WARM_STRETCHES
    turns = itertools.chain(itertools.repeat((0, cases[1]), first), itertools.cycle(itertools.product(_WIDTHS, cases)))
    for number, (stretch, (width, case)) in enumerate(zip(stretches, turns, strict=False)):
        batches: Any = stretch
        if DEPTHS.get(case):
            batches = st.prefetch(stretch, lambda ids: {emb: ids}, DEPTHS[case])
        taken, before = list[float](), _moved()
        start = time.perf_counter()
        for each in batches:
            rows = emb(each).flatten(1)
            loss = (network(rows) if width else rows).square().mean()
            take_step(loss, *((optimizer, other) if width else (optimizer,)))
            losses.append(loss.item())
            start, began = time.perf_counter(), start
            taken.append(start - began)
        if number >= first:
            seconds.setdefault(f"{width} {case}", []).extend(taken[_UNTIMED:])
            parts = [(now - then) / len(taken) / 1e6 for now, then in zip(_moved(), before, strict=True)]
            moved.setdefault(f"{width} {case}", []).append(parts)
    means = {
        key: dict(zip(("read_MB", "written_MB"), np.mean(parts, axis=0).round(2).tolist(), strict=True))
        for key, parts in moved.items()
    }
    return {"losses": losses, "seconds": seconds, "moved": means}


def train_in(
    cases: tuple[str, str], folder: Path, gigabytes: float, turns: int, seed: int, limit_gb: float
) -> dict[str, Any]:
    """Train a table in a file, held to so much memory, or its rows in use in memory; return what came of it."""
    rows = round(gigabytes * 1e9 / (4 * DIM * (1 + _STATES)))
    hot = min(_HOT, rows // 4)
    ids = _ids(rows, hot, _WARM_STRETCHES + turns * len(_WIDTHS) * len(cases), seed)
    if IN_MEMORY in cases:
        used, inverse = torch.cat([stretch.flatten() for stretch in ids]).unique(return_inverse=True)
        parts = inverse.split([stretch.numel() for stretch in ids])
        ids = [part.view_as(stretch) for part, stretch in zip(parts, ids, strict=True)]
        return _train(*_made(len(used), used, memory="pageable"), ids, cases)
    cache: dict[str, Any] = {}
    if CACHED in cases:
        counts = torch.zeros(rows, dtype=torch.uint8)
        counts[spread(torch.arange(hot), rows)] = 1
        cache = {"cache_rows": hot, "cache_counts": counts}
    with _held_to(limit_gb):
        return _train(*_made(rows, memory="mmap", path=folder, **cache), ids, cases)
