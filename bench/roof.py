"""The least that steps of tables in page-locked memory can take on several machines, beside what a GPU was measured to take.

The steps are those of the suite `gpu`; times are planned (docs/plan.md) from the bytes that cross the bus. readme.py writes
the table into docs/results.md; ``python bench/roof.py`` prints it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.gpu import DIM, MANY_DISTINCT, Scale, Uniform, many
from store import ROOT, read, recorded

from speedtransfer.benchmark.report import groups_of
from speedtransfer.planning.estimate import HOST, estimate_step
from speedtransfer.planning.footprint import DEVICE, PINNED, Form, moved
from speedtransfer.planning.machine import load_machines
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import Workload, make_workload
from speedtransfer.ranks.zipf import expected_unique

MACHINES = ("h200", "gh200", "gb200")


def workload(optimizer: str, idle: str, rows: int, tables: int, lookups: int, distinct: float) -> Workload:
    sizes = [(rows, DIM)] * tables
    # As `Uniform` draws them: so many anywhere, and the rest of the lookups again of these.
    unique = expected_unique(rows, 0.0, round(distinct * lookups / tables))
    found = make_workload(sizes, optimizer_given(optimizer), lookups // tables, 1, 0.0, None, idle)
    return replace(found, tables=tuple(replace(table, unique=unique) for table in found.tables))


def markdown(result: dict[str, Any]) -> str:
    """Return a table of the steps that `result`, of the suite `gpu`, has timed."""
    machines = [load_machines(name)[0] for name in MACHINES]
    heads = [
        "AdamW and SGD",
        "MB up",
        "MB down",
        "launches",
        *(f"{name}, ms" for name in MACHINES),
        "h200's memory, ms",
    ]
    lines = ["| " + " | ".join([*heads, "measured, ms"]) + " |", "| --- |" + " ---: |" * len(heads)]
    for group in groups_of(result):
        if group.params["experiment"] not in ("step", "fbgemm"):
            continue
        ten = group.params["experiment"] == "fbgemm"
        rows = group.params.get("size", Scale().small)
        for case in group.cases:
            optimizer, idle, *layout = case.name.removeprefix("MultiEmbedding, ").split(", ")
            if case.name.startswith(("nn.", "10 ")) or layout == ["rows"] or not case.figures:
                continue
            tables, lookups, distinct = (
                (10, many(Scale()), MANY_DISTINCT) if ten else (1, Scale().lookups, Uniform.distinct)
            )
            work = workload(optimizer, idle, rows, tables, lookups, distinct)
            bytes_each_way = moved(work, Form())
            times = [estimate_step(work, Form(), PINNED, machine) for machine in machines]
            times.append(estimate_step(work, Form(), DEVICE, machines[0]))
            cost = HOST[idle]
            cells = [
                f"**{optimizer}, {idle}, {tables} x {rows:,}**",
                *(f"{count / 1e6:,.0f}" for count in bytes_each_way[:2]),
                f"{cost.first_launches:.0f}",
                *(f"{1e3 * (one.seconds if one else 0):.3g}" for one in times),
                f"{min(case.figures['several kernels'], case.figures['one kernel']):.3g}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    names = ", ".join(f"`{name}`" for name in MACHINES)
    about = (
        f"**The least that a step can take**, by rates of the bus and counted calls ({names} of `speedtransfer plan`), and "
        f"what it took on {result['environment']['device']}. One table, or a MultiEmbedding of ten, in page-locked memory; "
        "beside them tables in the GPU's memory."
    )
    return "\n".join([about, "", *lines])


if __name__ == "__main__":
    for part, path in recorded(ROOT):
        if part == "gpu":
            print(markdown(read(path)))
