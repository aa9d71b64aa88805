"""Plans ten configurations by ``st.plan``, then trains each at its full size in a process of its own, and compares.

``make plan-accuracy``, or ``python bench/record.py here --only plan_accuracy --limit 1800``. Wants a quiet machine with 8 GB
of memory and of disk.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import speedtransfer as st
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.memory import in_process
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.cuda import resolve_device
from speedtransfer.planning.footprint import Form, bytes_of
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.timed_trial import time_tables
from speedtransfer.planning.workload import make_workload

NOTE = "Memory is that of weights and state; times are of a step, measured after every row has been trained once."
RATIO, PLANNED, MEASURED = "planned / measured", "planned, ms", "measured, ms"
VALUE = (lambda case: case.figures[RATIO], RATIO)
GOAL = 1.5
_QUICK = 200  # so many times fewer rows
_NO_CUT = 1 << 60  # bytes


@dataclass(frozen=True)
class Case:
    """One configuration: rows and columns of each table, samples, and ids of a sample in each table, and how it is stored."""

    name: str
    tables: tuple[tuple[int, int], ...]
    optimizer: str = "AdamW"
    batch: int = 4096
    lookups: int = 4
    zipf: float = 1.05
    memory: str = "pageable"
    idle: str = "exact"
    storage: str = "float32"
    state: str = "float32"


# Of 1 to 3 GB with state.
CASES = (
    Case("AdamW exact, dim 64", ((3_000_000, 64),)),
    Case("AdamW lazy, dim 64", ((3_000_000, 64),), idle="lazy"),
    Case("AdamW exact, dim 16, uniform ids", ((6_000_000, 16),), zipf=0.0),
    Case("SGD, dim 256, uniform ids", ((2_000_000, 256),), optimizer="SGD", zipf=0.0, idle="auto"),
    Case("SGD momentum, dim 128", ((2_000_000, 128),), optimizer="SGD(momentum=0.9)"),
    Case("Adagrad, dim 128, small batch", ((2_000_000, 128),), optimizer="Adagrad", batch=256, idle="auto"),
    Case("AdamW, int8 rows, uint8 state", ((4_000_000, 128),), storage="int8", state="uint8"),
    Case("AdamW, bfloat16 rows, uint8 state", ((4_000_000, 64),), storage="bfloat16", state="uint8", idle="lazy"),
    Case(
        "AdamW exact, 8 tables, dim 32",
        tuple((rows, 32) for rows in (2_000_000, 1_000_000, 500_000, 300_000, 100_000, 30_000, 5_000, 300)),
        lookups=1,
    ),
    Case("AdamW exact, mmap, dim 64", ((2_000_000, 64),), memory="mmap"),
)


def describe(group: GroupResult, case: CaseResult) -> str:
    return f"{case.figures[PLANNED]:.2f} ms planned, {case.figures[MEASURED]:.2f} ms measured"


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    fewer = _QUICK if quick else 1
    cases = [replace(c, tables=tuple((max(100, rows // fewer), dim) for rows, dim in c.tables)) for c in CASES]
    return [Group("configurations", functools.partial(_compare, cases), {"headline": False})]


def _compare(cases: Any) -> list[CaseResult]:
    found = []
    for case in cases:
        one = CaseResult(case.name, "ours", 0)
        plan, full = (in_process(what, case) for what in (planned, measured))
        times = {PLANNED: 1e3 * plan["step_s"], MEASURED: 1e3 * full["step_s"]}
        one.figures = {**times, RATIO: round(times[PLANNED] / times[MEASURED], 3)}
        one.memory = {"host_bytes": int(full["bytes"])}
        found.append(one)
    return found


def about(groups: list[GroupResult]) -> list[str]:
    ratios = [case.figures[RATIO] for group in groups for case in group.ran]
    off = [max(ratio, 1 / ratio) for ratio in ratios]
    within = sum(factor <= GOAL for factor in off)
    return [
        f"{within} of {len(off)} planned times are within a factor of {GOAL:g} of the measured ones, the median within "
        f"{statistics.median(off):.4g}"
    ]


# --- in a process of its own --------------------------------------------------------------------------------------------


def planned(case: Case) -> dict[str, float]:
    how: Any = {"idle": case.idle, "storage_dtype": case.storage, "state_dtype": case.state}
    plan = st.plan(list(case.tables), case.optimizer, case.batch, case.lookups, zipf=case.zipf, **how)
    (option,) = [option for option in plan.options if option.memory == case.memory]
    assert option.step_s is not None
    return {"step_s": option.step_s}


def measured(case: Case) -> dict[str, float]:
    """Return the time of a step of tables of full size, all rows of which have been trained once, and their bytes."""
    trainer = optimizer_given(case.optimizer)
    workload = make_workload(list(case.tables), trainer, case.batch, case.lookups, case.zipf, None, case.idle)
    form = Form(case.storage, case.state)
    step_s = time_tables(workload, form, case.memory, resolve_device(None), Path.cwd(), budget=_NO_CUT)
    return {"step_s": step_s, "bytes": bytes_of(workload, form).total}
