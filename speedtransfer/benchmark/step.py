"""Suite `step`: a whole training step (forward, backward, step, zero_grad). Its cost must not grow with the table.

Groups by the size of the table, of small models, which show what a table costs apart from its rows, and with new ids in every
step: where idle rows are trained, a row catches up when it is looked up again, which costs more the longer it was idle.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.contenders import DIM, PLANES, ROW_BYTES, Contender, by_hand, contenders, fitting
from speedtransfer.benchmark.environment import HOST_SHARE, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.training_step import BATCHES, Batches, Lookup, SmallTables, Task, TrainingStep
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import check_size

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that. Steps with new ids are timed after many others, so that idle rows "
    "have missed as many as in training."
)
BY = ("rows", "rows of the table")
IDLE, SMALL, MANY = "idle rows", "small step", "many tables"
HISTORY, QUICK_HISTORY = 300, 20  # steps before any is timed

_ROWS, _LOOKUPS = 1_000_000, 98_304  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
_SMALL_ROWS, _SMALL_WIDTH, _SMALL_IDS = 10_000, 32, 64
_MODEL_ROWS, _TABLES, _WIDTH, _IDS = 100_000, 26, 16, 256
_POOL = 64  # timed batches with new ids: about as many as steps are timed, so that none is repeated
_CHECKED_IDLE = (0, *[1] * 12, *range(2, BATCHES))  # rows of the first batch stay idle for long
_CHECKED = 9  # steps of small models that are compared with dense training


def series(group: GroupResult) -> str:
    """Return the title of groups that differ by the size of the table."""
    return "A training step: the cost must not grow with the table" if group.params["experiment"] == "size" else ""


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make all groups of the suite; `rows` are those of the smallest table.

    In groups of small models ours take steps before any is timed, so that idle rows have missed some; ids are uniform there,
    so that rows stay idle for long.
    """
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most, history = (_QUICK_BYTES, QUICK_HISTORY) if quick else (float("inf"), HISTORY)
    batches = Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), seed)
    room = {"host": min(most, host_room())}
    if device.type == "cuda":
        room["device"] = min(most, HOST_SHARE * torch.cuda.get_device_properties(device).total_memory)
    every, (exact, *_) = contenders(device), contenders(device, idle="exact")
    lazy, sparse, dense, *_ = every

    def by_size(size: int, chosen: list[Contender], experiment: str = "size", title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        make = functools.partial(_compare, chosen, functools.partial(_of_batches, batches, size, device), room)
        return Group(title, make, {"experiment": experiment, "rows": size, "dim": DIM})

    def of_model(experiment: str, what: str, ids: tuple[int, int], chosen: list[Contender], **params: int) -> Group:
        params["history"] = history
        task = functools.partial(_of_model, params, ids, device, seed)
        make = functools.partial(_compare, chosen, task)
        return Group(f"AdamW step, {what}, after {history:,} steps", make, {"experiment": experiment, **params})

    in_memory, in_file = ([k for k in every if (k.memory == "mmap") == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: a small one is compared, a large one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [by_size(size, every if size == rows else in_memory) for size in sizes]

    few, some = min(rows, _SMALL_ROWS), min(rows, _MODEL_ROWS)
    what = f"{_SMALL_IDS} uniform ids in {few:,} x {_SMALL_WIDTH} float32"
    chosen = [lazy, exact, sparse, by_hand(device)]
    found.append(of_model(SMALL, what, (1, _SMALL_IDS), chosen, rows=few, dim=_SMALL_WIDTH))
    chosen = [lazy, exact, sparse, dense]
    if not quick:
        what = f"{_TABLES} tables of {some:,} x {_WIDTH} float32, {_IDS} uniform ids each"
        found.append(of_model(MANY, what, (_TABLES, _IDS), chosen, rows=some, dim=_WIDTH, tables=_TABLES))

    title = f"AdamW step with new ids, {batches.lookups:,} lookups in {rows:,} x {DIM} float32, after {history:,} steps"
    task = functools.partial(_with_new_ids, batches, device, history)
    about = {"experiment": IDLE, "optimizer": "AdamW", "rows": rows, "dim": DIM, "history": history}
    found.append(Group(title, functools.partial(_compare, chosen, task, room), about))
    if not quick:
        found.append(by_size(4 * rows, in_file, "file", ", in a file"))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and multiples of it up to `last`: times four if that gives at least three sizes, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


def _compare(chosen: Sequence[Contender], make: Callable[[], Task], room: dict[str, float] | None = None) -> list[Case]:
    """Return a case for each contender; where `room` is given, those that do not fit in it have an error."""
    # Reference cycles may hold tables of the previous group.
    gc.collect()
    task = make()
    pairs = [(contender, None) for contender in chosen] if room is None else fitting(chosen, task.rows, room)
    return [Case.of(one.name, TrainingStep(one, task), one.role, error=error) for one, error in pairs]


def _of_batches(batches: Batches, rows: int, device: torch.device) -> Task:
    ids, model = batches.ids(rows), functools.partial(Lookup, batches=batches, device=device)
    # The other batches are taken once: rows get memory when they are first touched, which must not be timed.
    return Task(model, rows, ids[:1], ids, device, lambda contender: ids[1:], batches.touched(rows), batches.seed)


def _of_model(params: dict[str, int], ids: tuple[int, int], device: torch.device, seed: int) -> Task:
    draw, history = torch.Generator().manual_seed(seed), params["history"]
    pool = list(torch.randint(0, params["rows"], (_POOL, *ids), generator=draw).to(device))

    def between(contender: Contender) -> Iterator[Tensor]:
        return islice(cycle(pool), _CHECKED, _CHECKED + (history if contender.role == "ours" else 0))

    made = functools.partial(SmallTables, width=params["dim"], tables=params.get("tables", 1))
    return Task(made, params["rows"], pool[:_CHECKED], pool, device, between, seed=seed)


def _with_new_ids(batches: Batches, device: torch.device, history: int) -> Task:
    """Return a task whose timed steps have ids that no step before had; for exact rows of ours they come after others."""

    def draw(count: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(batches.seed + seed)
        return (zipf_ids(batches.rows, batches.lookups, generator) for _ in range(count))

    def between(contender: Contender) -> Iterator[Tensor]:
        return draw(history if contender.role == "ours" and contender.exact else 0, seed=2)

    task = _of_batches(batches, batches.rows, device)
    checked = [task.timed[number] for number in _CHECKED_IDLE]
    return replace(task, checked=checked, timed=list(draw(_POOL, seed=1)), history=between, all_rows=True)
