"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Only complete runs are shown, no quick ones (see store.py).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from store import EXPERIMENTS, IDLE, MEASURED, NGRAM_EXAMPLE, PARALLEL_EXAMPLE, ROOT, WORD2VEC, read, recorded, suites

from speedtransfer.benchmark import report

SUITES = "speedtransfer.benchmark.report"  # the module that shows them


class Section(NamedTuple):
    """A section of a page that shows the newest results of `parts`, between two marks, and the picture of the first.

    A `module` has its `markdown` and `draw`; that of suites is the report of the package.
    """

    name: str
    parts: tuple[str, ...]
    module: str = SUITES
    title: str = ""  # of the picture
    page: str = "docs/results.md"

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"


STEPS = "Time of a training step by the rows of the table: ours stays level, dense training grows with the table"
IDLE_ROWS = "Training with dense, exact, lazy and SparseAdam's idle rows"
FIGURES = Section("figures", ())  # of the suites without a section of their own, in short
SECTIONS = (
    FIGURES,
    Section("in numbers", ("step", "peers", "gpu", IDLE, NGRAM_EXAMPLE, WORD2VEC), "in_numbers", STEPS, "README.md"),
    Section("idle rows", (IDLE,), "idle", IDLE_ROWS),
    Section("word2vec", (WORD2VEC,), "word2vec_report", "word2vec beside gensim: words/s and quality"),
    Section("ngram example", (NGRAM_EXAMPLE,), "record_examples", "Losses of ways to hold n-gram tables"),
    Section("parallel example", (PARALLEL_EXAMPLE,), "record_examples", "Losses of one process and of several"),
    Section("experiments", ("gpu",), title=EXPERIMENTS["gpu"]),
    Section("exchange", ("exchange",), title=EXPERIMENTS["exchange"]),
    Section("mixed precision", ("mixed",), title=EXPERIMENTS["mixed"]),
    Section("beside others", ("peers",), title=EXPERIMENTS["peers"]),
    Section("plan accuracy", ("plan_accuracy",), title=EXPERIMENTS["plan_accuracy"]),
    Section("two hosts", ("hosts",), title=EXPERIMENTS["hosts"]),
    Section("checkpoints", ("saves",), title=EXPERIMENTS["saves"]),
)


class Recorded(NamedTuple):
    """A recorded result: its path, its contents, and these as markdown."""

    path: Path
    result: dict[str, Any]
    text: str


def _try(path: Path, show: Callable[[dict[str, Any]], str]) -> list[Recorded]:
    """Return a result; nothing, with a warning, where it cannot be shown."""
    try:
        result = read(path)
        return [Recorded(path, result, show(result))]
    except Exception as error:  # of another version or another program
        _warn(f"{path} is unreadable ({type(error).__name__}: {error}) and left out; record it again")
        return []


def every_suite(root: Path) -> list[Recorded]:
    suites()
    found = [one for part, path in recorded(root) if part in MEASURED for one in _try(path, report.markdown)]
    return sorted(found, key=lambda one: not one.result["environment"]["cuda"])


def in_section(root: Path, section: Section) -> list[Recorded]:
    """Return the newest results of a section."""
    page, shown = root / section.page, list[Recorded]()
    make = importlib.import_module(section.module).markdown
    for part in section.parts:
        found = [one for other, path in recorded(root) if other == part for one in _try(path, make)]
        if found:
            newest = max(found, key=lambda one: one.result["environment"]["date"])
            image = _image(newest.path, section.title, page) if part == section.parts[0] else ""
            shown.append(newest._replace(text="\n\n".join(filter(None, [image, newest.text]))))
    return shown


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def draw_all(root: Path, found: list[Recorded]) -> None:
    """Draw every result beside it, but those of which modules have no `draw`."""
    drawn = [(report.plot, one) for one in found]
    for section in SECTIONS:
        own = getattr(importlib.import_module(section.module), "draw", None)
        drawn += [(own, one) for one in in_section(root, section)] if own else []
    for make, (path, result, _) in drawn:
        try:
            _draw(make, result, path.with_suffix(".png"))
        except Exception as error:
            _warn(f"no plot of {path} ({type(error).__name__}: {error})")


def _draw(make: Callable[[dict[str, Any]], Any], result: dict[str, Any], path: Path) -> None:
    """Write what `make` returns for a result, a figure or the bytes of a PNG, to `path`."""
    from PIL import Image  # matplotlib brings it

    picture = make(result)
    if picture is None:
        path.unlink(missing_ok=True)
        return
    file = io.BytesIO(picture if isinstance(picture, bytes) else b"")
    if not isinstance(picture, bytes):
        picture.savefig(file, format="png")
    with Image.open(file) as image:  # few colours are enough for bars and lines, and a third of the bytes
        image.convert("RGB").quantize(64).save(path, optimize=True)


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def documents(root: Path, found: list[Recorded]) -> dict[Path, str]:
    """Return the text of each page: one for every device with all results, and those that show some."""
    pages: dict[Path, list[str]] = {}
    short: list[str] = []
    for path, result, text in found:
        device, page, figures = result["environment"]["device"], path.with_name("README.md"), root / FIGURES.page
        title = f"{result['suite']} on {device}"
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, figures)}).")
        pages[page] += [text, _image(path, title, page)]
        if not any(section.parts[:1] == (result["suite"],) for section in SECTIONS if section.page == FIGURES.page):
            short += [report.markdown(result, short=True), _image(path, title, figures)]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    for section in SECTIONS:
        page = root / section.page
        parts = [*filter(None, short)] if section is FIGURES else [one.text for one in in_section(root, section)]
        text = texts.get(page) or _read(page)
        if parts and section.begin in text:
            before, _, rest = text.partition(section.begin)
            texts[page] = "\n\n".join([before + section.begin, *parts, section.end]) + rest.partition(section.end)[2]
    return texts


def _image(result: Path, title: str, page: Path) -> str:
    picture = result.with_suffix(".png")
    return f"![{title}]({_address(picture, page)})" if picture.exists() else ""


def _address(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file, page.parent)).as_posix()


def main(check: bool, root: Path = ROOT) -> int:
    """Write the pages and a page for each device; or compare them and return 1 where they differ."""
    found = every_suite(root)
    if not check:
        draw_all(root, found)
    wanted = documents(root, found)
    others = [path for path, text in wanted.items() if _read(path) != text]
    for path in others:
        if check:
            _warn(f"{path.relative_to(root)} does not show the figures in bench/results; run `python bench/readme.py`")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(others))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
