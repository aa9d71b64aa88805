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
HEADING = ("part", "files", "lines", f"over {LONG} lines")


def part_of(name: str) -> str:
    """Return the part that a file is of: a room of the package, else the first folder."""
    first, *rest = name.split("/")
    if first == PACKAGE:
        return f"{first}/{rest[0]}" if len(rest) > 1 else f"{first}/*.py"
    return first if rest else "*.py"


def count(commit: str | None = None) -> dict[str, list[int]]:
    """Return for each part the lines of its files; empty files are none to git."""
    where = ["--untracked", "-e", ""] if commit is None else ["-e", "", commit]
    command = ["git", "-C", str(ROOT), "grep", "-c", *where, "--", "*.py"]
    found: dict[str, list[int]] = defaultdict(list)
    for line in subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines():
        name, _, lines = line.removeprefix(f"{commit}:").rpartition(":")
        found[part_of(name)].append(int(lines))
    return dict(sorted(found.items()))


def table(found: dict[str, list[int]]) -> str:
    """Return the table; the package and everything have lines of their own."""
    package = [n for part, lines in found.items() if part.startswith(PACKAGE) for n in lines]
    parts = {**found, f"{PACKAGE}, all": package, "all": [n for lines in found.values() for n in lines]}
    rows = [HEADING]
    for part, lines in parts.items():
        rows.append((part, f"{len(lines):,}", f"{sum(lines):,}", f"{sum(n > LONG for n in lines):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(text) for text in texts)


def main(commit: str | None = None) -> int:
    """Print the table; return the exit code."""
    try:
        print(table(count(commit)))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: git cannot read commit {commit!r} ({error}); is it one of this repository?", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
