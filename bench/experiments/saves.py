"""Checkpoints: how fast they are saved and loaded beside the disk, and what steps take while one is saved.

``python bench/record.py here --only saves``.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedtransfer as st
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.cuda import synchronize
from speedtransfer.ranks.zipf import draw_ids

NOTE = (
    "One table of 64 float32 columns with AdamW, so three planes, in ordinary memory; 4,096 Zipf ids a step (exponent 1.05). "
    "The disk: as many bytes written by large writes and synced, and read; from memory where the system keeps them. On two "
    "cores the thread that saves takes one of those that a step has. A delta is of ten steps."
)
BY = ("rows", "rows")
DIM, IDS, PLANES, EXPONENT = 64, 4096, 3, 1.05
STEP, MEANWHILE, SAVE, LOAD = "a step", "a step while it is saved", "saved, training stopped", "loaded"
DELTA, APPLIED = "a delta saved", "a delta applied"
BACKGROUND, WRITTEN, READ = "saved in the background", "as many bytes written and synced", "as many bytes read"
COLUMNS = {
    "median, ms": lambda group, case: f"{1e3 * case.median_s:,.4g}",
    "worst, ms": lambda group, case: f"{1e3 * max(case.samples_s):,.4g}",
    "written, MB": lambda group, case: f"{case.figures['MB']:,.4g}" if case.figures else "",
    "GB/s": lambda group, case: f"{case.payload_bytes / case.median_s / 1e9:.3g}" if case.payload_bytes else "",
}
VALUE = (lambda case: 1e3 * case.median_s, "milliseconds, median")
_REPEATS, _STEPS, _STEPS_A_DELTA, _KEPT, _PIECE = 3, 40, 10, 400, 1 << 24


def series(group: GroupResult) -> str:
    return f"idle={group.params['idle']!r}"


def about(groups: list[GroupResult]) -> list[str]:
    """Return what a step takes while a checkpoint is saved, as multiples of one alone."""
    found = []
    for group in groups:
        alone, meanwhile = group.by_name[STEP], group.by_name[MEANWHILE]
        found.append(
            f"{group.params['rows']:,} rows, {series(group)}: a step takes {meanwhile.median_s / alone.median_s:.2f} times as "
            f"long while a checkpoint is saved, and at worst {max(meanwhile.samples_s) / alone.median_s:,.0f} times"
        )
    return found


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    sizes = (100_000,) if quick else (500_000, 4_000_000)
    return [
        Group(
            f"{rows:,} rows of {DIM}, idle={idle!r}",
            functools.partial(_measure, rows, idle, device, seed),
            {"rows": rows, "idle": idle},
        )
        for rows in sizes
        for idle in ("lazy", "exact")
    ]


def _measure(rows: int, idle: Any, device: torch.device, seed: int) -> list[CaseResult]:
    torch.manual_seed(seed)
    emb = st.Embedding(rows, DIM, idle=idle, device=device)
    opt, head = torch.optim.AdamW(emb.parameters()), torch.randn(DIM, device=device)
    draw = np.random.default_rng(seed)

    def step() -> float:
        ids = torch.from_numpy(draw_ids(rows, EXPONENT, IDS, draw)).to(device)
        start = time.perf_counter()
        take_step((emb(ids) @ head).square().mean(), opt)
        synchronize(device)
        return time.perf_counter() - start

    for _ in range(5):
        step()
    alone = [step() for _ in range(_STEPS)]
    num_bytes = PLANES * rows * DIM * 4
    with tempfile.TemporaryDirectory() as name:
        folder, meanwhile, background = Path(name), list[float](), list[float]()
        saved = [_seconds(lambda: st.save_checkpoint(folder / "run", emb, opt)) for _ in range(_REPEATS)]
        for _ in range(_REPEATS):
            step()
            start = time.perf_counter()
            save = st.save_checkpoint(folder / "run", emb, opt, background=True)
            meanwhile.append(time.perf_counter() - start + step())  # the first waits for the call as well
            while save is not None and not save.done():
                meanwhile.append(step())
            assert save is not None
            save.wait()
            background.append(time.perf_counter() - start)
        loaded = [_seconds(lambda: st.load_checkpoint(folder / "run", emb, opt)) for _ in range(_REPEATS)]
        written, read = [], []
        for _ in range(_REPEATS):
            written.append(_seconds(lambda: _write(folder / "bytes", num_bytes)))
            read.append(_seconds(lambda: _read(folder / "bytes")))
            (folder / "bytes").unlink()
    deltas = _deltas(emb, step) if idle == "lazy" else []
    return [
        CaseResult(STEP, "other", 0, alone),
        CaseResult(MEANWHILE, "ours", 0, _fewer(meanwhile)),
        CaseResult(SAVE, "ours", num_bytes, saved),
        CaseResult(BACKGROUND, "ours", num_bytes, background),
        CaseResult(LOAD, "ours", num_bytes, loaded),
        *deltas,
        CaseResult(WRITTEN, "roof", num_bytes, written),
        CaseResult(READ, "roof", num_bytes, read),
    ]


def _deltas(emb: st.Embedding, step: Callable[[], object]) -> list[CaseResult]:
    """Let a copy follow by files of the rows that a few steps have changed: the payload is the table, which is read."""
    copied, mark, known = copy.deepcopy(emb), st.mark(emb), None
    with tempfile.TemporaryDirectory() as name:
        path, saved, applied, size = Path(name, "delta.safetensors"), list[float](), list[float](), 0
        for _ in range(_REPEATS):
            for _ in range(_STEPS_A_DELTA):
                step()
            start = time.perf_counter()
            mark = st.save_delta(path, emb, mark)
            between = time.perf_counter()
            known = st.apply_delta(path, copied, known)
            saved.append(between - start)
            applied.append(time.perf_counter() - between)
            size = path.stat().st_size
    if known is None or known.fingerprints != mark.fingerprints:
        raise AssertionError("the copy has other rows")
    figures = {"MB": size / 1e6}
    payload = emb.table.dim * emb.table.num_rows * 4
    return [CaseResult(DELTA, "ours", payload, saved, figures=figures), CaseResult(APPLIED, "ours", 0, applied)]


def _fewer(samples: list[float]) -> list[float]:
    """Return some of many samples, in their order by size: the same quantiles, and the largest."""
    ordered = sorted(samples)
    return [*ordered[:: max(len(ordered) // _KEPT, 1)], ordered[-1]]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write(path: Path, num_bytes: int) -> None:
    piece = os.urandom(_PIECE)
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, _PIECE):
            file.write(piece[: num_bytes - start])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    piece = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass
