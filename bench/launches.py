"""Counts what a warm training step of each form asks of a GPU: kernels, waits of the host and the lines that they come from,
copies, allocations, and the CPU time of the host. It needs no GPU but the emulated one, ``cuda-emulator`` beside the checkout:

    ../shared/cuda-emulator/run python bench/launches.py                    # every form, some minutes
    ../shared/cuda-emulator/run python bench/launches.py --only lazy -v     # forms with "lazy" in their name; -v: every kernel
    ../shared/cuda-emulator/run python bench/launches.py --write            # into bench/launches.json

The table says "before > now" beside the figures that the file has.

Each form has a process of its own. It takes steps with values first, one of them watched: what torch does, and what makes the
host wait. Then torch's operations and our kernels do nothing when they are launched, so that all launches are seen, those
within an operation too, and the time is that of the host. Free memory of the device is zero then, so that where the host
fetches a number of rows there is one row. Products of matrices are counted as one launch each. The time is the CPU time of
all threads in the shortest of the steps (others may use the machine), without a driver: add 2 to 3 us a launch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from store import ROOT, read, write

LIMIT_S = 600
PATH = ROOT / "bench" / "launches.json"  # of an emulated device, so that it is no result of one
COLUMNS = {
    "launches": lambda r: sum(r["launches"].values()),
    "ours": lambda r: sum(n for name, n in r["launches"].items() if name.partition("_")[0] in ("gather", "scatter")),
    "torch ops": lambda r: sum(r["operations"].values()),
    "waits": lambda r: sum(r["waits"].values()),
    "copies": lambda r: sum(r["copies"].values()),
    "allocs": lambda r: sum(r["allocations"].values()),
    "host us": lambda r: round(r["host_us"]),
}


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench/launches.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="forms with that in their name")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=98_304)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--write", action="store_true", help="write the result; of --only into what is there")
    parser.add_argument("-v", "--verbose", action="store_true", help="also list kernels, copies and allocations")
    parser.add_argument("--form", help=argparse.SUPPRESS)  # count that one here and print JSON
    args = parser.parse_args()
    try:
        import fakegpu  # noqa: F401
    except ImportError:
        print("error: this counts on the emulated GPU; run it by cuda-emulator/run (see --help)", file=sys.stderr)
        return 2
    from warm_steps import FORMS, Sizes

    sizes = Sizes(args.rows, args.lookups, args.dim)
    if args.form:
        return _count_here(FORMS[args.form].build, sizes)
    from store import header

    about = header(ROOT, "launches")
    stored = read(PATH) if PATH.exists() else {}
    before = stored.get("forms", {}) if stored.get("sizes") == sizes._asdict() else {}
    names = [name for name in FORMS if not args.only or any(text in name for text in args.only)]
    forms: dict[str, Any] = {}
    print(_line(["form", *COLUMNS]), flush=True)
    for name in names:
        forms[name] = result = _count(name, sizes)
        _show(name, result, before.get(name), args.verbose)
    if args.write:
        complete = set(forms) >= set(FORMS)
        write(PATH, {**about, "sizes": sizes._asdict(), "forms": {**before, **forms}, "complete": complete})
        print(f"wrote {PATH.relative_to(ROOT)}")
    return int(any("error" in result for result in forms.values()))


def _count_here(build: Any, sizes: Any) -> int:
    from launches_counted import count

    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(count(build, sizes, Path(folder))))
    return 0


def _count(name: str, sizes: Any) -> dict[str, Any]:
    """Return what a form does, counted in a process of its own, or its error."""
    options = [f"--{option}={value}" for option, value in sizes._asdict().items()]
    command = [sys.executable, __file__, "--form", name, *options]
    environment = {"FAKE_DEVICE_BYTES": str(8 << 30), **os.environ}
    try:
        # Without a calibration that an emulated run has left: it would choose the engine.
        with tempfile.TemporaryDirectory() as cache:
            environment["SPEEDTRANSFER_CACHE"] = cache
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _show(name: str, result: dict[str, Any], before: dict[str, Any] | None, verbose: bool) -> None:
    if "error" in result:
        print(f"{name:40} {result['error']}", flush=True)
        return
    cells = []
    for value in COLUMNS.values():
        old = f"{value(before):,} > " if before and "error" not in before else ""
        cells.append(f"{old}{value(result):,}")
    print(_line([name, *cells]))
    for where, times in result["waits"].items():
        print(f"    waits {times}x  {where}")
    if result["waits_without_values"] != sum(result["waits"].values()):
        print(
            f"    waits with torch's own kernels, which may know more or less of them: {result['waits_without_values']}x"
        )
    for what in ("launches", "operations", "copies", "allocations") if verbose else ():
        for text, times in Counter(result[what]).most_common():
            print(f"    {what} {times}x  {text}")
    sys.stdout.flush()


def _line(cells: list[str]) -> str:
    return f"{cells[0]:40}" + "".join(f"{cell:>16}" for cell in cells[1:])


if __name__ == "__main__":
    sys.exit(main())
