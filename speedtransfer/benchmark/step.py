"""Suite `step`: a whole training step (forward, backward, step, zero_grad). Its cost must not grow with the table."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch

from speedtransfer.benchmark import step_idle, step_models
from speedtransfer.benchmark.contenders import (
    DIM,
    PLANES,
    ROW_BYTES,
    Batches,
    Contender,
    Step,
    contenders,
    fitting,
)
from speedtransfer.benchmark.environment import HOST_SHARE, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.step_idle import HISTORY, QUICK_HISTORY
from speedtransfer.errors import check_size

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that. Steps with new ids are timed after many others, so that idle rows "
    "have missed as many as in training."
)
_ROWS, _LOOKUPS = 1_000_000, 98_304  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
BY = ("rows", "rows of the table")


def series(group: GroupResult) -> str:
    """Return the title of groups that differ by the size of the table."""
    return "A training step: the cost must not grow with the table" if group.params["experiment"] == "size" else ""


def groups(
    device: torch.device,
    quick: bool,
    rows: int | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    history: int | None = None,
    **others: Any,
) -> list[Group]:
    """Make all groups of the suite.

    `rows` are those of the smallest table, `max_bytes` limits the tables of a group on host and device, `history` is the
    number of untimed steps that let rows become idle.
    """
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most = max_bytes or (_QUICK_BYTES if quick else float("inf"))
    batches = Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), seed)
    room = {"host": min(most, host_room())}
    if device.type == "cuda":
        room["device"] = min(most, HOST_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def group(size: int, chosen: list[Contender], experiment: str, title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        params = {"experiment": experiment, "rows": size, "dim": DIM}
        return Group(title, functools.partial(_compare, chosen, device, size, batches, room), params)

    every = contenders(device)
    in_memory, in_file = ([k for k in every if (k.memory == "mmap") == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: a small one is compared, a large one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [group(size, every if size == rows else in_memory, "size") for size in sizes]
    history = check_size(history or (QUICK_HISTORY if quick else HISTORY), "history", 1)
    found += step_models.groups(device, rows, batches.seed, history, quick)
    found += step_idle.groups(device, batches, room, history, quick)
    if not quick:
        found.append(group(4 * rows, in_file, "file", ", in a file"))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and multiples of it up to `last`: times four if that gives at least three sizes, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


def _compare(
    chosen: list[Contender], device: torch.device, rows: int, batches: Batches, room: dict[str, float]
) -> list[Case]:
    # Reference cycles may hold tables of the previous group.
    gc.collect()
    return [
        Case.of(contender.name, Step(contender, rows, device, batches), contender.role, error=error)
        for contender, error in fitting(chosen, rows, room)
    ]
