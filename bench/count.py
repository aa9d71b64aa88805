"""Counts the Python of this repository by part: ``python bench/count.py [COMMIT]``, to compare one state with another.

Without a commit it counts the files as they lie here, where git knows them or would. A line is a line, empty or not.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping
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


def count(files: Mapping[str, str]) -> dict[str, tuple[int, int, int]]:
    """Return for each part its files, its lines and its files of more than `LONG` lines."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, text in sorted(files.items()):
        lines = len(text.splitlines())
        so_far = found.get(part_of(name), (0, 0, 0))
        found[part_of(name)] = (so_far[0] + 1, so_far[1] + lines, so_far[2] + (lines > LONG))
    return found


def table(found: Mapping[str, tuple[int, int, int]]) -> str:
    """Return the table; the package and everything have lines of their own."""
    totals = {
        f"{PACKAGE}, all": [numbers for part, numbers in found.items() if part.startswith(PACKAGE)],
        "all": [*found.values()],
    }
    summed = {what: tuple(map(sum, zip(*numbers, strict=True))) for what, numbers in totals.items() if numbers}
    rows = [HEADING, *((part, *(f"{n:,}" for n in numbers)) for part, numbers in {**found, **summed}.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def here(root: Path) -> dict[str, str]:
    """Return the Python files of the working tree by name, those git would ignore left out."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    return {name: (root / name).read_text(encoding="utf-8") for name in names if name and (root / name).is_file()}


def in_commit(root: Path, commit: str) -> dict[str, str]:
    """Return the Python files of a commit by name.

    Raises
    ------
    LookupError
        git is not there, or does not know the commit.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", "--end-of-options", commit]
    if not (root / ".git").exists():  # git would find whatever repository is around it
        raise LookupError(f"{root} is no git repository")
    try:
        packed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError(f"git cannot read commit {commit!r} ({error}); is it one of this repository?") from error
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                found[member.name] = file.read().decode("utf-8", "replace")
    return found


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/count.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", help="by default the files as they lie here", metavar="COMMIT")
    args = parser.parse_args(arguments)
    try:
        files = here(root) if args.commit is None else in_commit(root, args.commit)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(count(files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
