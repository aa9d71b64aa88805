"""Plans ten configurations by ``st.plan``, then trains each at its full size in a process of its own, and compares.

``python bench/plan_accuracy.py`` writes ``bench/results/<device>/plan_accuracy.json``, with a picture beside it;
bench/readme.py puts both into docs/plan.md. Wants a quiet machine with 8 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import blocks_of, make_parser, markdown_table, provenance, write_result
from running import run
from store import PLAN, QUICK, ROOT, header, path_of

import speedtransfer as st
from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import format_bytes
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.ranks.zipf import draw_ids
from speedtransfer.units import format_seconds

LIMIT_S = 90.0  # of a process
GOAL = 1.5
_QUICK = 200  # so many times fewer rows
_CHUNK_VALUES = 1 << 22
_WARM, _STEPS, _LIMIT_S = 4, 15, 4.0
_MIX = 2_654_435_761  # a prime that divides no number of rows here: spreads frequent ids over the table


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes
    ----------
    name : str
    tables : tuple of (int, int)
        Rows and columns of each.
    optimizer : str
    batch, lookups : int
        Samples, and ids of a sample in each table.
    zipf : float
    memory, idle : str
    storage, state : str
    """

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


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("plan_accuracy", __doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="configurations with that in their name"
    )
    parser.add_argument("--quick", action="store_true", help="small tables, to see that it runs")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # do that one here, and print JSON
    parser.add_argument("--do", choices=("plan", "measure"), default="plan", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cases = [_smaller(case) if args.quick else case for case in CASES]
    if args.case:
        (case,) = [case for case in cases if case.name == args.case]
        print("RESULT", json.dumps(planned(case) if args.do == "plan" else measured(case)))
        return 0
    about = header(ROOT, PLAN)
    complete = not args.quick and not args.only
    out = args.out or path_of(root, about["environment"]["device"], PLAN, "" if complete else QUICK)
    start = time.perf_counter()
    found = []
    for case in cases:
        if args.only and not any(text in case.name for text in args.only):
            continue
        plan, full = (_in_process(case, what, args.quick) for what in ("plan", "measure"))
        if plan is None or full is None:
            print(f"error: {case.name} could not be {'planned' if plan is None else 'measured'}", file=sys.stderr)
            return 1
        ratio = plan["step_s"] / full["step_s"]
        found.append({**asdict(case), "planned": plan, "measured": full, "ratio": round(ratio, 3)})
        print(f"{case.name}: {ratio:.2f} of what it took", flush=True)
    ratios = [max(one["ratio"], 1 / one["ratio"]) for one in found]
    result = {
        **about,
        "cases": found,
        "goal": GOAL,
        "within": sum(ratio <= GOAL for ratio in ratios),
        "median": round(statistics.median(ratios), 3),
        "seconds": round(time.perf_counter() - start, 1),
        "complete": complete,
    }
    write_result(result, out, draw, [*sentences(result)])
    return 0


def _in_process(case: Case, what: str, quick: bool) -> dict[str, Any] | None:
    """Plan or measure a configuration in a process of its own; None where that failed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", case.name, "--do", what, *["--quick"] * quick]
    code, output = run(command, LIMIT_S)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix("RESULT ")) if code == 0 and lines else None
    return found


def _smaller(case: Case) -> Case:
    return replace(case, tables=tuple((max(100, rows // _QUICK), dim) for rows, dim in case.tables))


# --- what is measured, in a process of its own ---------------------------------------------------------------------------


def planned(case: Case) -> dict[str, Any]:
    """Return the time of a step by :func:`speedtransfer.plan`, its bytes, and how long planning took."""
    start = time.perf_counter()
    plan = st.plan(
        list(case.tables),
        case.optimizer,
        case.batch,
        case.lookups,
        zipf=case.zipf,
        idle=case.idle,
        storage_dtype=case.storage,
        state_dtype=case.state,
    )
    (option,) = [option for option in plan.options if option.memory == case.memory]
    seconds = round(time.perf_counter() - start, 1)
    return {"step_s": option.step_s, "bytes": sum(held.total for held in plan.bytes.values()), "seconds": seconds}


def measured(case: Case) -> dict[str, Any]:
    """Return the median time of a step of tables of full size, all rows of which have been trained once."""
    start = time.perf_counter()
    trainer = optimizer_given(case.optimizer)
    assert trainer.make is not None
    options: dict[str, Any] = {"memory": case.memory, "idle": case.idle}
    if case.storage != "float32":
        options["storage_dtype"] = getattr(torch, case.storage)
    if case.state != "float32":
        options["state_dtype"] = getattr(torch, case.state)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".plan-accuracy-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = []
        for number, (rows, dim) in enumerate(case.tables):
            path = Path(folder, f"{number}.npy") if case.memory == "mmap" else None
            zeros = torch.zeros(1, 1).expand(rows, dim)
            tables.append(st.Embedding(rows, dim, _weight=zeros, path=path, **options))
        optimizer = trainer.make([param for table in tables for param in table.parameters()])
        _train_all(tables, optimizer)
        times = _times(case, tables, optimizer)
        held = sum(table.table.nbytes for table in tables)
        del tables, optimizer
    seconds = round(time.perf_counter() - start, 1)
    return {"step_s": statistics.median(times), "steps": len(times), "bytes": held, "seconds": seconds}


def _train_all(tables: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """Touch every row once, so that its state and its pages exist."""
    parts = [torch.arange(len(table.table)).split(_CHUNK_VALUES // table.embedding_dim) for table in tables]
    for number in range(max(map(len, parts))):
        for table, own in zip(tables, parts, strict=True):
            table(own[number] if number < len(own) else own[0][:1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _times(case: Case, tables: list[Any], optimizer: torch.optim.Optimizer) -> list[float]:
    draw = np.random.default_rng(0)
    times: list[float] = []
    for number in range(_WARM + _STEPS):
        ids = [
            torch.from_numpy(draw_ids(rows, case.zipf, case.batch * case.lookups, draw) * _MIX % rows)
            for rows, _ in case.tables
        ]
        grads = [torch.full((len(own), dim), 1e-2) for own, (_, dim) in zip(ids, case.tables, strict=True)]
        start = time.perf_counter()
        torch.autograd.backward([table(own) for table, own in zip(tables, ids, strict=True)], grads)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if number > 2 * _WARM and sum(times) > _LIMIT_S:
            break
    return times[_WARM:]


# --- words and picture --------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: planned over measured, for a narrow screen."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    cases, goal = result["cases"], result["goal"]
    figure = require_matplotlib()(5, 1.1 + 0.36 * len(cases))
    axes = figure.subplots()
    ratios = [case["ratio"] for case in cases]
    places = list(range(len(cases)))[::-1]
    axes.axvspan(1 / goal, goal, color=COLOURS[0], alpha=0.1, lw=0)
    axes.axvline(1, color=QUIET, lw=1)
    axes.hlines(places, 1, ratios, color=COLOURS[0], lw=2)
    axes.plot(ratios, places, "o", color=COLOURS[0], ms=7)
    tidy(axes)
    axes.set_xscale("log")
    edge = 1.15 * max(goal, *(max(ratio, 1 / ratio) for ratio in ratios))
    axes.set_xlim(1 / edge, edge)
    ticks = [tick for tick in (0.25, 1 / 3, 0.5, 2 / 3, 1, 1.5, 2, 3, 4) if 1 / edge < tick < edge]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    axes.set_yticks(places, [case["name"] for case in cases], fontsize=9, color=INK)
    axes.set_xlabel(f"planned / measured; shaded: within {goal:g}", fontsize=9, color=QUIET)
    axes.set_title("time of a step", fontsize=10, color=INK, loc="left")
    return figure


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield how near the plans were, and where."""
    yield (
        f"{result['within']} of {len(result['cases'])} planned times are within a factor of {result['goal']:g} of the "
        f"measured ones, the median within {result['median']:g}. {provenance(result)}."
    )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/plan.md; `picture` is its path or nothing."""
    rows = [["", "weights and state", "planned", "measured", "planned / measured"]]
    for case in result["cases"]:
        times = [format_seconds(case[what]["step_s"]) for what in ("planned", "measured")]
        rows.append([case["name"], format_bytes(case["measured"]["bytes"]), *times, f"{case['ratio']:.2f}"])
    title = "Planned over measured time of a step of ten configurations"
    return blocks_of(picture, title, markdown_table(rows), *sentences(result))


if __name__ == "__main__":
    sys.exit(main())
