"""Writes the figures of README.md, and the plots they show, from ``bench/results``: ``python bench/readme.py``.

With ``--check`` it only compares the text. Where nothing is recorded the README stays as it is. Only complete runs are shown,
no quick ones (see store.py).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

from store import ROOT, SUITES, read, recorded

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.errors import SpeedtransferError

BEGIN = "<!-- figures: made by `python bench/readme.py` from bench/results; do not edit -->"
END = "<!-- end of figures -->"
PLOT_BYTES = 150_000  # at most: a repository keeps every one for ever


class Recorded(NamedTuple):
    """A recorded suite: where it lies, what it says, and that as markdown."""

    path: Path
    result: dict[str, Any]
    text: str


def suites(root: Path) -> list[Recorded]:
    """Return every recorded suite, GPUs first. What cannot be shown is left out, with a line that says so."""
    from speedtransfer.benchmark.report import markdown

    found = []
    for part, path in recorded(root):
        try:
            if part in SUITES:
                result = read(path)
                found.append((not result["environment"]["cuda"], Recorded(path, result, markdown(result))))
        except Exception as error:  # of another version or another program: whatever it lacks
            _warn(f"{path} is unreadable ({type(error).__name__}: {error}) and left out; record it again")
    return [suite for _, suite in sorted(found, key=lambda item: item[0])]


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def draw(found: list[Recorded]) -> None:
    """Draw the plot of every recorded suite beside it."""
    try:
        from PIL import Image  # matplotlib brings it

        from speedtransfer.benchmark.drawing import require_matplotlib
        from speedtransfer.benchmark.plots import plot

        require_matplotlib()
    except (ImportError, SpeedtransferError) as error:
        _warn(f"no plots: {error}")
        return
    for path, result, _ in found:
        file = path.with_suffix(".png")
        try:
            picture = plot(result)
        except Exception as error:
            _warn(f"no plot of {path} ({type(error).__name__}: {error})")
            continue
        if picture is None:
            file.unlink(missing_ok=True)
            continue
        with Image.open(io.BytesIO(picture)) as image:  # few colours are enough for lines, and a third of the bytes
            image.convert("RGB").quantize(64).save(file, optimize=True)
        if file.stat().st_size > PLOT_BYTES:
            _warn(f"{file} has {file.stat().st_size} bytes, more than {PLOT_BYTES}: think twice before it is committed")


def figures(root: Path, found: list[Recorded]) -> str:
    """Return the markdown of every recorded suite, device by device."""
    parts: list[str] = []
    last = None
    for path, result, text in found:
        device, picture = result["environment"]["device"], path.with_suffix(".png")
        if device != last:
            parts.append(f"### {device}")
            last = device
        parts.append(text)
        if picture.exists():
            parts.append(f"![{result['suite']} on {device}]({picture.relative_to(root).as_posix()})")
    return "\n\n".join(parts)


def main(check: bool, root: Path = ROOT) -> int:
    """Write README.md; or compare it and return 1 where it differs."""
    path = root / "README.md"
    found = suites(root)
    if not check:
        draw(found)
    new = figures(root, found)
    old = path.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if not new:
        if check and shown.strip():
            _warn("README.md shows figures, but no suite is recorded in bench/results")
            return 1
        print("no suite is recorded: README.md stays as it is")
        return 0
    text = f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"
    if check:
        if text != old:
            print("README.md does not show the figures in bench/results; run `python bench/readme.py`", file=sys.stderr)
        return int(text != old)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
