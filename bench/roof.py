"""Prints what a training step must move, and the least time that links allow for that, beside what was measured.

``python bench/roof.py`` shows the steps of bench/experiments/gpu.py; ``python bench/roof.py --rows 50000000 --tables 26``
others. "in turn": rows are read, then written. "at once": both directions of the link are busy all the time, which a step can
come near to where tables, or parts of one, overlap. Launches are those that bench/launches.py counts on an emulated GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiment import positive_int, text_table
from store import EXPERIMENTS, ROOT, read

STATES = {"SGD": 0, "SGD with momentum": 1, "AdamW": 2}  # planes of state
LAST_BYTES, SECTOR = 4, 32  # an idle row's last step; what the bus moves for less
SHARE = {1: 0.92, 10: 0.4136}  # of lookups that are distinct, in the experiments with so many tables


class Link(NamedTuple):
    """GB/s at which kernels read rows, write them, and do both."""

    read: float
    written: float
    both: float

    def ms(self, num_bytes: float) -> tuple[float, float]:
        """Return the least milliseconds for so many bytes each way, in turn and at once."""
        one, two = num_bytes / self.read, num_bytes / self.written
        return (one + two) / 1e6, max(one, two, 2 * num_bytes / self.both) / 1e6


LINKS = {
    "PCIe 5 x16": Link(51.5, 52.5, 77),  # as kernels have reached it beside an H200
    "C2C": Link(450, 450, 900),  # NVLink-C2C of GH200 and GB200, by their data sheets
    "HBM3e": Link(4800, 4800, 4800),  # of an H200, by its data sheet
}


class Step(NamedTuple):
    """A step of `tables` alike; `lookups` and `distinct` rows are those of each."""

    rows: int
    dim: int
    lookups: int
    distinct: int
    optimizer: str
    idle: str
    layout: str
    tables: int = 1

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights, state and, with exact idle rows, the last step; they are read and written."""
        # In a plane of its own it takes a request of the bus; beside its row it does not.
        last = (LAST_BYTES if self.layout == "rows" else SECTOR) if self.idle == "exact" else 0
        return self.tables * self.distinct * (4 * self.dim * (1 + STATES[self.optimizer]) + last)

    @property
    def name(self) -> str:
        """Return what it is, in a line."""
        many = f"{self.tables} x " if self.tables > 1 else ""
        return (
            f"{many}{self.rows:,} x {self.dim}, {self.lookups:,} lookups, {self.optimizer}, {self.idle}, {self.layout}"
        )


def distinct_rows(rows: int, draws: float) -> int:
    """Return how many different rows are expected of `draws` rows anywhere in a table."""
    return round(rows * -math.expm1(-draws / rows))


def steps_of_experiments() -> Iterator[Step]:
    """Yield the steps that bench/experiments/gpu.py times in host memory."""
    adam = [("AdamW", idle, layout) for idle in ("lazy", "exact") for layout in ("planes", "rows")]
    for rows, lookups, tables in ((1_000_000, 131_072, 1), (16_000_000, 131_072, 1), (1_000_000, 104_857, 10)):
        distinct = distinct_rows(rows, SHARE[tables] * lookups)
        for optimizer, idle, layout in [("SGD", "lazy", "planes"), *adam]:
            if tables == 1 or layout == "planes":
                yield Step(rows, 128, lookups, distinct, optimizer, idle, layout, tables)


def launches_of(step: Step, results: Path) -> str:
    """Return the launches of a step, as counted for one table or for 26; "-" where they were not."""
    form = step.idle if step.optimizer == "AdamW" else f"{step.idle}, {step.optimizer}"
    form, counted = (f"{form}, 26 tables", 26) if step.tables > 1 else (form, 1)
    with contextlib.suppress(KeyError, OSError):
        found = read(results.parent / "launches.json")["forms"][form]["launches"]
        return str(round(sum(found.values()) * step.tables / counted))
    return "-"


def measured(step: Step, results: Path) -> tuple[str, str, str]:
    """Return the device of the newest measurement of a step, its milliseconds, and those of a step in one kernel."""
    found = [result for path in results.glob(f"*/{EXPERIMENTS}.json") if (result := read(path))["environment"]["cuda"]]
    for result in sorted(found, key=lambda result: result["environment"]["date"], reverse=True):
        for case in result["experiments"].get("step" if step.tables == 1 else "fbgemm", ()):
            same = {"rows": step.rows, "optimizer": step.optimizer, "idle": step.idle}
            same |= {"lookups": step.tables * step.lookups, **({"layout": step.layout} if step.tables == 1 else {})}
            if same.items() <= case.items() and case.get("tables", 1) == step.tables and not case.get("together"):
                times = (f"{case[key]:.2f}" if key in case else "-" for key in ("ms", "fused_ms"))
                return (result["environment"]["device"], *times)
    return "-", "-", "-"


def table(steps: list[Step], results: Path) -> list[list[str]]:
    """Return a heading and a line for each step."""
    links = [f"{name}, {way}" for name in LINKS for way in ("in turn", "at once")]
    rows = [["step (times in ms)", "MB each way", "launches", *links, "measured on", "ms", "in one kernel"]]
    for step in steps:
        times = [f"{ms:.2f}" for link in LINKS.values() for ms in link.ms(step.num_bytes)]
        rows.append(
            [step.name, f"{step.num_bytes / 1e6:.1f}", launches_of(step, results), *times, *measured(step, results)]
        )
    return rows


def main(arguments: list[str] | None = None, results: Path = ROOT / "bench" / "results") -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench/roof.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive_int, help="of a table; without it, the steps of the experiments")
    parser.add_argument("--dim", type=positive_int, default=128)
    parser.add_argument("--lookups", type=positive_int, default=131_072, help="of a table")
    parser.add_argument("--distinct", type=positive_int, help="rows among them, by default those of uniform draws")
    parser.add_argument("--optimizer", choices=STATES, default="AdamW")
    parser.add_argument("--idle", choices=("lazy", "exact"), default="exact")
    parser.add_argument("--layout", choices=("planes", "rows"), default="planes")
    parser.add_argument("--tables", type=positive_int, default=1, help="so many, all alike")
    args = parser.parse_args(arguments)
    steps = list(steps_of_experiments())
    if args.rows:
        distinct = min(args.distinct or distinct_rows(args.rows, args.lookups), args.rows, args.lookups)
        steps = [Step(**{**vars(args), "distinct": distinct})]
    print(text_table(table(steps, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
