"""Words and turns that the field would not write, in the pages, and in comments, docstrings and messages: ``make lint``.

A turn with a number may stand so often in the package, and no more often: what is written anew does without.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is found, what to write, and how often it stands in the Python files of the package so far; in the pages never.
TURNS = [
    (r"\bis said (to|not to)\b", "say who says it, or what is the case", 0),
    (r"\bstand-ins?\b", "placeholder", 0),
    (r"\blags? behind\b|\bowes?\b|\bsettles? its debts?\b", "the steps it has missed; catch up", 0),
    (r"\bup to date\b(?! after)", "current; catch up", 4),
    (r"\bnone of ours\b|\banybody's guess\b|\bnobody wants to know\b|\btaken upon itself\b", "say the rule", 0),
    (r"\bas shells have it\b|\bwho presses Ctrl-C\b", "the convention; on Ctrl-C", 0),
    (r"\bwhich there is not\b|\bof no machine\b", "must be one of ...; placeholders", 1),
    (r"\bNumbers in a vector\b|\bNegatives a pair\b", "dimension; negative samples per pair", 0),
    (r"\bthe first so many\b|\bonly so many\b", "the first N", 1),
    (r"\bmend (it|them)\b", "fix", 0),
    (r"(?<![a-z,;:] )\bOf (?!course)[a-z]+ (?!of )", "a sentence with a verb, or 'in', 'with'", 162),
]


def found_in(path: Path, turn: str) -> list[str]:
    """Return the places of a turn in a file, as ``path:line: text``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    name = path.relative_to(ROOT)
    return [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if re.search(turn, line)]


def main() -> int:
    """Print what is found, and tell whether anything is."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    modules = sorted((ROOT / "speedtransfer").rglob("*.py"))
    failed = False
    for turn, instead, most in TURNS:
        in_pages = [place for path in pages for place in found_in(path, turn)]
        in_modules = [place for path in modules for place in found_in(path, turn)]
        if in_pages or len(in_modules) > most:
            failed = True
            shown = in_pages + (in_modules if len(in_modules) > most else [])
            print(
                f"{turn!r} ({len(in_modules)} in the package, at most {most}; none in pages): write {instead}",
                *shown,
                sep="\n  ",
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
