"""The example of one process and several (examples/parallel.py): ``python bench/record.py here --only parallel_example``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from store import run_example

from examples import parallel
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.report import show_figure, show_time
from speedtransfer.benchmark.results import CaseResult, GroupResult

NOTE = "The loss of several processes is the mean of theirs; differences are those from one process, the largest of all steps."
COLUMNS = {
    "examples of a process": show_figure("examples"),
    "rows of a process": show_figure("rows", "{:,.0f}"),
    "a step": show_time,
    "largest loss difference": show_figure("difference", "{:.2g}"),
}
SETTINGS = list(parallel.SETTINGS)
_QUICK = {"steps": 30, "rows": 100}
CURVES = {"loss": ("loss of the batch", "linear")}


def groups(device: torch.device, quick: bool, **given: Any) -> list[Group]:
    flags = (_QUICK if quick else {}) | {name: value for name, value in given.items() if name in SETTINGS}
    params: dict[str, Any] = {"headline": False}
    return [Group("the same batches in one process and in several", functools.partial(_measure, flags, params), params)]


def _measure(flags: dict[str, Any], params: dict[str, Any]) -> list[CaseResult]:
    result = run_example(parallel.main, flags)
    params |= result["settings"]
    cases = []
    for kind, found in result["runs"].items():
        (_, (examples, _), _), *_ = found["sizes"][0]
        case = CaseResult(kind, "other" if kind == parallel.ONE else "ours", 0, [found["step_s"]])
        case.figures = {"examples": examples, "rows": found["rows"][0], "difference": found["difference"]}
        case.values = {"loss": [round(loss, 5) for loss in found["losses"]]}
        cases.append(case)
    return cases


def about(groups: list[GroupResult]) -> list[str]:
    return [
        f"{found['steps']:,} steps of {found['batch']} examples, {found['processes']} processes of DistributedDataParallel, "
        f"table of {found['rows']:,} x {found['dim']}"
        for found in (group.params for group in groups)
    ]
