"""Suite `step`: a whole training step (forward, backward, step, zero_grad). Its cost must not grow with the table.

Groups by the size of the table, of small models, which show what a table costs apart from its rows, and with new ids in every
step: where idle rows are trained, a row catches up when it is looked up again, which costs more the longer it was idle.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.contenders import DIM, PLANES, ROW_BYTES, Contender, by_hand, contenders, fitting
from speedtransfer.benchmark.environment import HOST_SHARE, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.training_step import BATCHES, Batches, Lookup, SmallTables, Task, TrainingStep, WholeTable
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import check_size

NOTE = (
    "Every size sees the same accesses, spread over the whole table. Tables that are compared are in memory at the same time; "
    "those that do not fit beside the others are left out. Of a large table in a file, changed pages go to the disk as "
    "training goes on, and steps wait for that. Steps with new ids are timed after many others, so that idle rows "
    "have missed as many as in training."
)
BY = ("rows", "rows of the table")
IDLE, SMALL, MANY, WHOLE = "idle rows", "small step", "many tables", "whole table"
HISTORY, QUICK_HISTORY = 300, 20  # steps before any is timed

_ROWS, _LOOKUPS = 1_000_000, 98_304  # of the smallest table
_QUICK_ROWS, _QUICK_LOOKUPS, _QUICK_BYTES = 20_000, 8_192, 600e6
_SMALL_ROWS, _SMALL_WIDTH, _SMALL_IDS = 10_000, 32, 64
_MODEL_ROWS, _TABLES, _WIDTH, _IDS = 100_000, 26, 16, 256
_WHOLE_WIDTH, _WHOLE_IDS = 64, 64
_POOL = 64  # timed batches with new ids: about as many as steps are timed, so that none is repeated
_CHECKED_IDLE = (0, *[1] * 12, *range(2, BATCHES))  # rows of the first batch stay idle for long
_CHECKED = 9  # steps of small models that are compared with dense training


def series(group: GroupResult) -> str:
    """Return the title of groups that differ by the size of the table."""
    return "A training step: the cost must not grow with the table" if group.params["experiment"] == "size" else ""


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make all groups of the suite; `rows` are those of the smallest table."""
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    most, history = (_QUICK_BYTES, QUICK_HISTORY) if quick else (float("inf"), HISTORY)
    batches = Batches(rows, min(rows, _QUICK_LOOKUPS if quick else _LOOKUPS), seed)
    room = {"host": min(most, host_room())}
    if device.type == "cuda":
        room["device"] = min(most, HOST_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def group(size: int, chosen: list[Contender], experiment: str, title: str = "") -> Group:
        title = f"AdamW step, {batches.lookups:,} lookups in {size:,} x {DIM} float32{title}"
        ids = batches.ids(size)
        # The other batches are taken once: rows get memory when they are first touched, which must not be timed.
        task = _of_batches(batches, size, device, [ids[0]], ids, lambda contender: ids[1:])
        params = {"experiment": experiment, "rows": size, "dim": DIM}
        return Group(title, functools.partial(_compare, chosen, task, room), params)

    every = contenders(device)
    in_memory, in_file = ([k for k in every if (k.memory == "mmap") == file] for file in (False, True))
    # The system writes a large file to the disk while others are measured: a small one is compared, a large one comes last.
    sizes = _sizes(rows, int(room["host"] // (PLANES["AdamW"] * ROW_BYTES)))
    found = [group(size, every if size == rows else in_memory, "size") for size in sizes]
    found += _model_groups(device, rows, seed, history, quick)
    found.append(_idle_group(device, batches, room, history))
    if not quick:
        found.append(group(4 * rows, in_file, "file", ", in a file"))
    return found


def _sizes(first: int, last: int) -> Iterator[int]:
    """Yield `first` and multiples of it up to `last`: times four if that gives at least three sizes, else doubled."""
    rows, factor = first, 4 if last >= 16 * first else 2
    while rows <= max(first, last):
        yield rows
        rows *= factor if factor * rows <= last else 2


def _compare(chosen: Sequence[Contender], task: Task, room: dict[str, float] | None = None) -> list[Case]:
    """Return a case for each contender; where `room` is given, those that do not fit in it have an error."""
    # Reference cycles may hold tables of the previous group.
    gc.collect()
    pairs = [(contender, None) for contender in chosen] if room is None else fitting(chosen, task.rows, room)
    return [Case.of(one.name, TrainingStep(one, task), one.role, error=error) for one, error in pairs]


def _of_batches(
    batches: Batches,
    rows: int,
    device: torch.device,
    checked: Sequence[Tensor],
    timed: Sequence[Tensor],
    history: Callable[[Contender], Iterable[Tensor]],
) -> Task:
    model = functools.partial(Lookup, batches=batches, device=device)
    return Task(model, rows, checked, timed, device, history, batches.touched(rows), batches.seed)


# --- small models -------------------------------------------------------------------------------------------------------


def _model_groups(device: torch.device, rows: int, seed: int, history: int, quick: bool) -> Iterator[Group]:
    """Yield a group for a small step and, unless `quick`, for many tables and for a whole table, of at most `rows` rows.

    Ours take `history` steps before any is timed, so that idle rows have missed some. Ids are uniform, so that rows stay idle
    for long.
    """
    (lazy, sparse, dense, *_), (exact, *_) = contenders(device), contenders(device, idle="exact")
    few, rows = min(rows, _SMALL_ROWS), min(rows, _MODEL_ROWS)

    def group(experiment: str, what: str, model: Any, shape: tuple[int, ...], chosen: Any, **params: int) -> Group:
        steps = params["history"]
        title = f"AdamW step, {what}" + (f", after {steps:,} steps" if steps else "")
        make = functools.partial(_model_cases, model, params, shape, chosen, device, seed)
        return Group(title, make, {"experiment": experiment, **params})

    what = f"{_SMALL_IDS} uniform ids in {few:,} x {_SMALL_WIDTH} float32"
    chosen = [lazy, exact, sparse, by_hand(device)]
    yield group(SMALL, what, SmallTables, (1, _SMALL_IDS), chosen, rows=few, dim=_SMALL_WIDTH, history=history)
    if quick:
        return
    what = f"{_TABLES} tables of {rows:,} x {_WIDTH} float32, {_IDS} uniform ids each"
    sizes = {"rows": rows, "dim": _WIDTH, "tables": _TABLES, "history": history}
    yield group(MANY, what, SmallTables, (_TABLES, _IDS), [lazy, exact, sparse, dense], **sizes)
    what = f"softmax over all of {rows:,} x {_WHOLE_WIDTH} float32, and {2 * _WHOLE_IDS} lookups"
    chosen = [replace(lazy, exact=True), exact, dense]  # every step touches all rows
    yield group(WHOLE, what, WholeTable, (2, _WHOLE_IDS), chosen, rows=rows, dim=_WHOLE_WIDTH, history=0)


def _model_cases(
    model: Any, params: dict[str, int], shape: tuple[int, ...], chosen: list[Contender], device: torch.device, seed: int
) -> list[Case]:
    rows, history = params["rows"], params["history"]
    draw = torch.Generator().manual_seed(seed)
    pool = list(torch.randint(0, rows, (_POOL, *shape), generator=draw).to(device))

    def between(contender: Contender) -> Iterator[Tensor]:
        return islice(cycle(pool), _CHECKED, _CHECKED + (history if contender.role == "ours" else 0))

    made = functools.partial(model, width=params["dim"], tables=params.get("tables", 1))
    return _compare(chosen, Task(made, rows, pool[:_CHECKED], pool, device, between, seed=seed))


# --- new ids in every step ----------------------------------------------------------------------------------------------


def _idle_group(device: torch.device, batches: Batches, room: dict[str, float], history: int) -> Group:
    """Return the group of exact rows against lazy ones and torch."""
    title = f"AdamW step with new ids, {batches.lookups:,} lookups in {batches.rows:,} x {DIM} float32"
    params = {"experiment": IDLE, "optimizer": "AdamW", "rows": batches.rows, "dim": DIM, "history": history}
    make = functools.partial(_idle_cases, device, batches, room, history)
    return Group(f"{title}, after {history:,} steps", make, params)


def _idle_cases(device: torch.device, batches: Batches, room: dict[str, float], history: int) -> list[Case]:
    (lazy, *others), (exact, *_) = contenders(device), contenders(device, idle="exact")
    rivals = [one for one in others if one.role == "other"]

    def draw(count: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(batches.seed + seed)
        return (zipf_ids(batches.rows, batches.lookups, generator) for _ in range(count))

    def between(contender: Contender) -> Iterator[Tensor]:
        return draw(history if contender is exact else 0, seed=2)

    ids = batches.ids(batches.rows)
    checked = [ids[number] for number in _CHECKED_IDLE]
    task = _of_batches(batches, batches.rows, device, checked, list(draw(_POOL, seed=1)), between)
    return _compare([lazy, exact, *rivals], replace(task, all_rows=True), room)
