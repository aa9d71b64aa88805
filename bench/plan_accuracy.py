"""Plans ten configurations by ``st.plan``, then trains each at its full size in a process of its own, and compares.

``python bench/plan_accuracy.py`` writes ``bench/results/<device>/plan_accuracy.json``, with a picture beside it;
bench/readme.py puts both into docs/plan.md. Wants a quiet machine with 8 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from running import run
from store import PLAN, QUICK, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from plan_accuracy_cases import CASES, Case, measured, planned
from plan_accuracy_figure import save, sentences

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


if __name__ == "__main__":
    sys.exit(main())
