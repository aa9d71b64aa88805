"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Where nothing is recorded the pages stay as they are. Only complete runs are shown,
no quick ones (see store.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiment import save_picture
from store import (
    DRIFT,
    EXPERIMENTS,
    IDLE,
    LOOP,
    NGRAM_EXAMPLE,
    PARALLEL_EXAMPLE,
    PLAN,
    ROOT,
    SCALE,
    SUITES,
    WORD2VEC,
    read,
    recorded,
)

BEGIN = "<!-- figures: made by `python bench/readme.py` from bench/results; do not edit -->"
END = "<!-- end of figures -->"
FIGURES = "docs/benchmarks.md"  # the page of all suites, in short
_SHORT = 5  # line breaks of a table that is short


class Section(NamedTuple):
    """A section of README.md, or of another page, that shows chosen results, between two marks.

    Attributes
    ----------
    name : str
    parts : tuple of (str, str)
        The parts whose newest results are shown, each with the module of its `markdown` and, for a picture of its own, `draw`.
    page : str
        The file, from the root on. Where it or its marks are not there, nothing is shown.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    page: str = "README.md"

    @property
    def begin(self) -> str:
        """The mark before it."""
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        """The mark behind it."""
        return f"<!-- end of {self.name} -->"


IN_NUMBERS = Section(
    "in numbers", tuple((part, "in_numbers") for part in ("step", EXPERIMENTS, IDLE, NGRAM_EXAMPLE, WORD2VEC))
)
ON_A_GPU = Section("experiments", ((EXPERIMENTS, "experiments_report"),), "docs/gpu.md")
IDLE_ROWS = Section("idle rows", ((IDLE, "idle"),), "docs/optimizers.md")
WORD2VEC_SECTION = Section("word2vec", ((WORD2VEC, "word2vec_report"), (SCALE, "word2vec_scale")), "docs/word2vec.md")
SPEEDTORCH_LOOP = Section("speedtorch loop", ((LOOP, "speedtorch_loop"),), "docs/migration.md")
EXAMPLE = Section("ngram example", ((NGRAM_EXAMPLE, "ngram_example"),), "docs/ngrams.md")
PARALLEL = Section("parallel example", ((PARALLEL_EXAMPLE, "parallel_example"),), "docs/parallel.md")
EXCHANGE = Section("exchange", (("exchange", "suite_pages"),), "docs/compressed-exchange.md")
DRIFTING = Section("vocabulary drift", ((DRIFT, "vocabulary_drift"),), "docs/vocabulary.md")
MIXED = Section("mixed precision", (("mixed", "suite_pages"),), "docs/mixed-precision.md")
PLAN_ACCURACY = Section("plan accuracy", ((PLAN, "plan_accuracy"),), "docs/plan.md")
SECTIONS = (
    IN_NUMBERS,
    ON_A_GPU,
    IDLE_ROWS,
    WORD2VEC_SECTION,
    SPEEDTORCH_LOOP,
    EXAMPLE,
    DRIFTING,
    MIXED,
    PARALLEL,
    EXCHANGE,
    PLAN_ACCURACY,
)


class Recorded(NamedTuple):
    """A recorded result: its path, its contents, and these as markdown."""

    path: Path
    result: dict[str, Any]
    text: str


def suites(root: Path) -> list[Recorded]:
    """Return every recorded suite, GPUs first. What cannot be shown is left out, with a warning."""
    from speedtransfer.benchmark.report import markdown

    found = []
    for part, path in recorded(root):
        try:
            if part in SUITES:
                result = read(path)
                found.append((not result["environment"]["cuda"], Recorded(path, result, markdown(result))))
        except Exception as error:  # of another version or another program
            _warn(f"{path} is unreadable ({type(error).__name__}: {error}) and left out; record it again")
    return [suite for _, suite in sorted(found, key=lambda item: item[0])]


def newest(root: Path, part: str, module: str, page: str = "README.md") -> Recorded | None:
    """Return the newest result of `part`, as `module` shows it on `page`; None without one. What cannot be is left out."""
    markdown, found = importlib.import_module(module).markdown, []
    for other, path in recorded(root):
        try:
            if other == part:
                result, picture = read(path), path.with_suffix(".png")
                text = markdown(result, _address(picture, root / page) if picture.exists() else "")
                found.append((result["environment"]["date"], Recorded(path, result, text)))
        except Exception as error:
            _warn(f"{path} is unreadable ({type(error).__name__}: {error}) and left out; record it again")
    return max(found, key=lambda item: item[0])[1] if found else None


def in_sections(root: Path) -> dict[Section, list[tuple[str, Recorded]]]:
    """Return modules and newest results for each section whose marks are on its page."""
    there = [section for section in SECTIONS if section.begin in _read(root / section.page)]
    return {
        section: [
            (module, found) for part, module in section.parts if (found := newest(root, part, module, section.page))
        ]
        for section in there
    }


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def _draw_sections(root: Path) -> None:
    for shown in in_sections(root).values():
        for module, recorded_one in shown:
            if draw_one := getattr(importlib.import_module(module), "draw", None):
                _draw(draw_one, recorded_one)


def _draw(draw_one: Callable[[dict[str, Any]], Any], recorded_one: Recorded) -> None:
    """Draw a result into a file beside it; warn where it cannot be drawn."""
    path, result, _ = recorded_one
    try:
        problem = save_picture(draw_one, result, path.with_suffix(".png"))
    except Exception as error:
        problem = f"no plot of {path} ({type(error).__name__}: {error})"
    if problem:
        _warn(problem)


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def draw(found: list[Recorded]) -> None:
    """Draw the plot of every recorded suite beside it."""
    from speedtransfer.benchmark.report import plot

    for one in found:
        _draw(plot, one)


def shorten(text: str) -> str:
    """Return the title of a suite, its headlines and its first table, unless that is long."""
    title, *rest = text.split("\n\n")
    lines = [part for part in rest if part.startswith("- ") and not part.startswith("- not run")]
    tables = [part for part in rest if part.startswith("|") and part.count("\n") <= _SHORT]
    return "\n\n".join([title, *lines, *tables[:1]])


def documents(root: Path, found: list[Recorded]) -> dict[Path, str]:
    """Return the text of each page: one for every device with all results, and those that show some."""
    pages: dict[Path, list[str]] = {}
    short: list[str] = []
    figures = root / FIGURES
    for path, result, text in found:
        device, picture, page = result["environment"]["device"], path.with_suffix(".png"), path.with_name("README.md")
        image = f"![{result['suite']} on {device}]({{}})" if picture.exists() else ""
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, figures)}).")
        pages[page] += [text, image.format(picture.name)]
        short += [shorten(text), image.format(_address(picture, figures))]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    if found and figures.exists():
        texts[figures] = _between(figures.read_text(encoding="utf-8"), BEGIN, END, [*filter(None, short)])
    for section, shown in in_sections(root).items():
        page = root / section.page
        if shown:
            parts = [recorded.text for _, recorded in shown]
            texts[page] = _between(texts.get(page) or _read(page), section.begin, section.end, parts)
    return texts


def _address(file: Path, page: Path) -> str:
    """Return the link to `file` from `page`."""
    return Path(os.path.relpath(file, page.parent)).as_posix()


def _between(text: str, begin: str, end: str, parts: list[str]) -> str:
    """Return `text` with `parts` between two of its lines."""
    before, _, rest = text.partition(begin)
    return "\n\n".join([before + begin, *parts, end]) + rest.partition(end)[2]


def main(check: bool, root: Path = ROOT) -> int:
    """Write the pages and a page for each device; or compare them and return 1 where they differ."""
    found = suites(root)
    if not found and not any(in_sections(root).values()):
        if check and _read(root / FIGURES).partition(BEGIN)[2].partition(END)[0].strip():
            _warn(f"{FIGURES} shows figures, but no suite is recorded in bench/results")
            return 1
        print("no suite is recorded: the pages stay as they are")
        return 0
    if not check:
        draw(found)
        _draw_sections(root)
    wanted = documents(root, found)
    stale = [path for path, text in wanted.items() if _read(path) != text]
    if check:
        for path in stale:
            _warn(f"{path.relative_to(root)} does not show the figures in bench/results; run `python bench/readme.py`")
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
