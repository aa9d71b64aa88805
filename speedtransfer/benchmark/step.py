"""Suite `step`: a whole AdamW training step (forward, backward, step, zero_grad). Its cost must not grow with the table."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from speedtransfer.benchmark import step_idle, step_models
from speedtransfer.benchmark.kinds import DIM, OURS, PLANES, ROW_BYTES, Kind, kinds
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.step_idle import HISTORY, QUICK_HISTORY
from speedtransfer.benchmark.step_training import Batches, Step, fitting
from speedtransfer.errors import check_size, format_bytes
from speedtransfer.system import physical_bytes

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that. Steps with new ids are timed after many others, so that idle rows "
    "have missed as many as in training."
)
LARGE, SMALL = OURS.format("pinned"), OURS.format("pinned") + ", 1 GB table"  # the cases of experiment "gpu limit"
SMALL_BYTES, LARGE_BYTES, LIMIT_BYTES = 1e9, 50e9, 5e9  # their weights, and the GPU memory that they get
LARGE_S = 100.0  # that page-locking so much takes, and the steps

_ROWS, _LOOKUPS = 1_000_000, 98_304  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
_SHARE, _LARGE_SHARE = 0.6, 0.8  # of the memory of this machine or its device that tables may take


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        The compute device.
    quick : bool
        Small tables only.
    rows : int, optional
        Of the smallest table.
    max_bytes : int, optional
        The most that the tables of a group may take together, of the host and of the device.
    seed : int, optional
    history : int, optional
        Steps before any is timed, where that matters.
    """
    rows = check_size(options.get("rows") or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most = options.get("max_bytes") or (_QUICK_BYTES if quick else float("inf"))
    batches = Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), options.get("seed") or 0)
    room = {"host": min(most, _SHARE * (physical_bytes() or 8e9))}
    if device.type == "cuda":
        room["device"] = min(most, _SHARE * torch.cuda.get_device_properties(device).total_memory)

    def group(size: int, chosen: list[Kind], experiment: str, title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        params = {"experiment": experiment, "rows": size, "dim": DIM}
        return Group(title, functools.partial(_compare, chosen, device, size, batches, room), params)

    every = kinds(device)
    in_memory, in_file = ([k for k in every if (k.name == OURS.format("mmap")) == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: beside them it is a small one, and one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [group(size, every if size == rows else in_memory, "size") for size in sizes]
    history = check_size(options.get("history") or (QUICK_HISTORY if quick else HISTORY), "history", 1)
    found += step_models.groups(device, rows, batches.seed, history, quick)
    found += step_idle.groups(device, batches, room, history, quick)
    if not quick:
        found.append(group(4 * rows, in_file, "file", ", in a file"))
    if device.type == "cuda" and not quick:
        found.append(_under_gpu_limit(device, batches, min(most, _LARGE_SHARE * physical_bytes())))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and larger numbers of rows up to `last`: times four where that gives three or more, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


def _compare(
    chosen: list[Kind], device: torch.device, rows: int, batches: Batches, room: dict[str, float]
) -> list[Case]:
    """Return a step of each kind. Those that memory cannot hold beside the ones before them say so when they run."""
    gc.collect()  # tables of the group before may be left in cycles
    cases = []
    for kind, error in fitting(chosen, rows, room):
        step = Step(kind, rows, device, batches, error)
        cases.append(Case(kind.name, step.run, step.check, role=kind.role))
    return cases


# --- a table far larger than the GPU's memory ---------------------------------------------------------------------------


class _GpuLimit:
    """Limits what this process may take of the GPU's memory, until nobody holds this any more."""

    def __init__(self, device: torch.device, limit_bytes: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        weakref.finalize(self, torch.cuda.set_per_process_memory_fraction, 1.0, device)


class _LimitedStep(Step):
    limit: _GpuLimit


def _under_gpu_limit(device: torch.device, batches: Batches, room_bytes: float) -> Group:
    """Return steps on a small table and on the largest that memory holds beside it, both pinned."""
    planes, unit = PLANES["AdamW"], batches.rows  # sizes are multiples of the smallest table
    large_bytes = min(LARGE_BYTES, room_bytes / planes - SMALL_BYTES)
    small, large = (max(1, round(b / ROW_BYTES / unit)) * unit for b in (SMALL_BYTES, large_bytes))

    def make() -> list[Case]:
        limit, kind = _GpuLimit(device, LIMIT_BYTES), kinds(device)[0]
        cases = []
        for name, rows in ((LARGE, large), (SMALL, small)):
            step = _LimitedStep(kind, rows, device, batches)
            step.limit = limit
            cases.append(Case(name, step.run, step.check, role=kind.role))
        return cases

    taken = f"{format_bytes(large * ROW_BYTES)} ({format_bytes(planes * large * ROW_BYTES)} with its state)"
    title = f"AdamW step with {format_bytes(LIMIT_BYTES)} of GPU memory, pinned table of {taken} and one of 1 GB"
    params = {"experiment": "gpu limit", "rows": large, "dim": DIM, "limit_bytes": int(LIMIT_BYTES)}
    return Group(title, make, params, reserved_s=LARGE_S)
