"""Writes the figures of README.md, and the plots they show, from ``bench/results``: ``python bench/readme.py``.

With ``--check`` it only compares the text. Where nothing is recorded the README stays as it is.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from store import ROOT, SUITES, read, recorded

sys.path.insert(0, str(ROOT))  # also where the package is not installed

BEGIN = "<!-- figures: made by `python bench/readme.py` from bench/results; do not edit -->"
END = "<!-- end of figures -->"
PLOT_BYTES = 150_000  # at most: a repository keeps every one for ever


def suites(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return every recorded suite with where it lies, GPUs first."""
    found = [(path, read(path)) for part, path in recorded(root) if part in SUITES]
    return sorted(found, key=lambda item: not item[1]["environment"]["cuda"])


def draw(root: Path) -> None:
    """Draw the plot of every recorded suite beside it."""
    from PIL import Image  # matplotlib brings it

    from speedtransfer.benchmark.plots import plot

    for path, result in suites(root):
        picture, file = plot(result), path.with_suffix(".png")
        if picture is None:
            file.unlink(missing_ok=True)
            continue
        with Image.open(io.BytesIO(picture)) as image:  # few colours are enough for lines, and a third of the bytes
            image.convert("RGB").quantize(64).save(file, optimize=True)
        if file.stat().st_size > PLOT_BYTES:
            raise SystemExit(f"{file} has {file.stat().st_size} bytes, more than {PLOT_BYTES}")


def figures(root: Path) -> str:
    """Return the markdown of every recorded suite, device by device."""
    from speedtransfer.benchmark.report import markdown

    parts, last = [], None
    for path, result in suites(root):
        device, picture = result["environment"]["device"], path.with_suffix(".png")
        if device != last:
            parts.append(f"### {device}")
            last = device
        parts.append(markdown(result))
        if picture.exists():
            parts.append(f"![{result['suite']} on {device}]({picture.relative_to(root).as_posix()})")
    return "\n\n".join(parts)


def main(check: bool, root: Path = ROOT) -> int:
    """Write README.md; or compare it and return 1 where it differs."""
    path = root / "README.md"
    if not check:
        draw(root)
    new = figures(root)
    if not new:
        print("no suite is recorded: README.md stays as it is")
        return 0
    old = path.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"
    if check:
        if text != old:
            print("README.md does not show the figures in bench/results; run `python bench/readme.py`", file=sys.stderr)
        return int(text != old)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
