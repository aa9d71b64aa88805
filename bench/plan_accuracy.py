"""Plans ten configurations by ``st.plan``, then trains each at its full size in a process of its own, and compares.

``python bench/plan_accuracy.py`` writes ``bench/results/<device>/plan_accuracy.json``, with a picture beside it;
bench/readme.py puts both into docs/plan.md. Wants a quiet machine with 8 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pictures import save_picture
from running import run
from store import PLAN, QUICK, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from plan_accuracy_cases import CASES, Case, measured, planned

from speedtransfer.benchmark.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.benchmark.units import format_seconds
from speedtransfer.errors import format_bytes

LIMIT_S = 90.0  # of a process
GOAL = 1.5
_QUICK = 200  # so many times fewer rows


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit code."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench/plan_accuracy.py", description=lines[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="configurations with that in their name"
    )
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
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
    write(out, result)
    print("", *sentences(result), f"wrote {out}", sep="\n")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
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


# --- words and picture --------------------------------------------------------------------------------------------------


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none."""
    return save_picture(lambda: draw(result), path)


def draw(result: dict[str, Any]) -> bytes:
    """Return the picture as PNG: planned over measured, as wide as a telephone."""
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
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield how near the plans were, and where."""
    environment, count = result["environment"], len(result["cases"])
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    yield (
        f"{result['within']} of {count} planned times are within a factor of {result['goal']:g} of the measured ones, the "
        f"median within {result['median']:g}. {environment['device']}, torch {environment['versions']['torch']}, "
        f"commit {commit}, {environment['date'][:10]}."
    )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/plan.md; `picture` is its path or nothing."""
    rows = [["", "weights and state", "planned", "measured", "planned / measured"], ["---", *["--:"] * 4]]
    for case in result["cases"]:
        times = [format_seconds(case[what]["step_s"]) for what in ("planned", "measured")]
        rows.append([case["name"], format_bytes(case["measured"]["bytes"]), *times, f"{case['ratio']:.2f}"])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    title = "Planned over measured time of a step of ten configurations"
    return "\n\n".join([*([f"![{title}]({picture})"] if picture else []), table, *sentences(result)])


if __name__ == "__main__":
    sys.exit(main())
