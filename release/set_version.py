"""Set the version in speedtransfer/version.py, CITATION.cff and CHANGELOG.md: ``make set-version VERSION=0.2.0``.

VERSION=0.2.0 gives the unreleased changes that number and today's date. VERSION=0.2.0.dev0 begins the changes after a release.
Commit then, have ``make release-check`` pass, and push the tag ``v0.2.0``.
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("speedtransfer/version.py", "CITATION.cff", "CHANGELOG.md")
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?(\.dev\d+)?")
HEADING = re.compile(r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$", re.MULTILINE)


def set_version(root: Path, version: str, today: str) -> None:
    """Write the version, or raise ValueError before anything is written."""
    if not VERSION.fullmatch(version):
        raise ValueError(f"a version is 1.2.3, 1.2.3rc1 or 1.2.3.dev0; got {version!r}")
    released, _, development = version.partition(".dev")
    texts = {name: (root / name).read_text(encoding="utf-8") for name in FILES}
    top = HEADING.search(texts["CHANGELOG.md"])
    if top is None:
        raise ValueError("CHANGELOG.md has no heading '## 1.2.3, unreleased'")
    heading = f"## {released}, {'unreleased' if development else today}"
    if development and top[2] != "unreleased":
        heading += f"\n\nNothing yet.\n\n{top[0]}"
    elif top[2] != "unreleased":
        raise ValueError(f"the first heading of CHANGELOG.md is '{top[0][3:]}': no changes are waiting for a release")
    texts["CHANGELOG.md"] = HEADING.sub(lambda _: heading, texts["CHANGELOG.md"], count=1)
    texts["speedtransfer/version.py"] = re.sub(
        r'(?<=__version__ = ").+(?=")', version, texts["speedtransfer/version.py"]
    )
    cited = re.sub(r"^(version: ).*\n(date-released: .*\n)?", rf"\g<1>{version}\n", texts["CITATION.cff"], flags=re.M)
    texts["CITATION.cff"] = cited if development else f"{cited}date-released: {today}\n"
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Run the command."""
    try:
        set_version(ROOT, sys.argv[1], date.today().isoformat())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"version {sys.argv[1]} in {', '.join(FILES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
