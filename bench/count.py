"""Counts the Python of this repository by part: ``python bench/count.py [COMMIT]``, to compare one state with another.

Without a commit it counts the files as they lie here, where git knows them or would. A line is a line, empty or not.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "speedtransfer"
LONG = 250  # lines: files should have fewer


def part_of(name: str) -> str:
    """Return the part that a file is of: a room of the package, else the first folder."""
    first, *rest = name.split("/")
    if first == PACKAGE:
        return f"{first}/{rest[0]}" if len(rest) > 1 else f"{first}/*.py"
    return first if rest else "*.py"


def main(commit: str | None = None) -> int:
    """Print for each part, for the package and for everything how many files and lines it has; return the exit code."""
    where = ["--untracked", "-e", ""] if commit is None else ["-e", "", commit]
    command = ["git", "-C", str(ROOT), "grep", "-c", *where, "--", "*.py"]
    try:
        counted = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: git cannot read commit {commit!r} ({error}); is it one of this repository?", file=sys.stderr)
        return 2
    found: dict[str, list[int]] = defaultdict(list)
    for line in counted.splitlines():  # empty files are none to git
        name, _, lines = line.removeprefix(f"{commit}:").rpartition(":")
        found[part_of(name)].append(int(lines))
    package = [n for part, lines in found.items() if part.startswith(PACKAGE) for n in lines]
    every = [n for lines in found.values() for n in lines]
    print(f"{'part':32}{'files':>8}{'lines':>10}{f'over {LONG} lines':>16}")
    for part, some in [*sorted(found.items()), (f"{PACKAGE}, all", package), ("all", every)]:
        print(f"{part:32}{len(some):8,}{sum(some):10,}{sum(n > LONG for n in some):16,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
