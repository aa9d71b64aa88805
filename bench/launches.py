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
import os
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from experiment import OutOfTimeError, RunError, run_job
from store import ROOT, header, read, write

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
    args = parser.parse_args()
    try:
        import fakegpu  # noqa: F401
    except ImportError:
        print("error: this counts on the emulated GPU; run it by cuda-emulator/run (see --help)", file=sys.stderr)
        return 2
    from warm_steps import FORMS

    sizes = {"rows": args.rows, "lookups": args.lookups, "dim": args.dim}
    about = header(ROOT, "launches")
    stored = read(PATH) if PATH.exists() else {}
    before = stored.get("forms", {}) if stored.get("sizes") == sizes else {}
    names = [name for name in FORMS if not args.only or any(text in name for text in args.only)]
    forms: dict[str, Any] = {}
    print(_line(["form", *COLUMNS]), flush=True)
    for name in names:
        forms[name] = result = _count(name, sizes)
        _show(name, result, before.get(name), args.verbose)
    if args.write:
        complete = set(forms) >= set(FORMS)
        write(PATH, {**about, "sizes": sizes, "forms": {**before, **forms}, "complete": complete})
        print(f"wrote {PATH.relative_to(ROOT)}")
    return int(any("error" in result for result in forms.values()))


def _count(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what a form does, counted in a process of its own, or its error."""
    # Without a calibration that an emulated run has left: it would choose the engine.
    with tempfile.TemporaryDirectory() as cache:
        env = {"FAKE_DEVICE_BYTES": os.environ.get("FAKE_DEVICE_BYTES", str(8 << 30)), "SPEEDTRANSFER_CACHE": cache}
        try:
            return run_job("launches_counted.py", {"form": name, "sizes": sizes}, time.monotonic() + LIMIT_S, env)
        except (RunError, OutOfTimeError) as error:
            return {"error": str(error)}


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
