"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Only complete runs are shown, no quick ones (see store.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiment import blocks_of, save_picture
from store import (
    CLASSIC,
    EXPERIMENTS,
    IDLE,
    NGRAM_EXAMPLE,
    PARALLEL_EXAMPLE,
    PLAN,
    ROOT,
    SUITES,
    WORD2VEC,
    read,
    recorded,
    suites,
)

FIGURES = "figures"  # the section of the page of all suites, in short
_SHORT = 5  # line breaks of a table that is short


class Section(NamedTuple):
    """A section of a page that shows the newest results of `parts`, between two marks, each by `markdown` of a module."""

    name: str
    page: str
    parts: tuple[tuple[str, str], ...]

    @property
    def begin(self) -> str:
        """The mark before it."""
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        """The mark behind it."""
        return f"<!-- end of {self.name} -->"


_IN_NUMBERS = ("step", EXPERIMENTS, IDLE, NGRAM_EXAMPLE, WORD2VEC)
SECTIONS = (
    Section(FIGURES, "docs/benchmarks.md", ()),
    Section("in numbers", "README.md", tuple((part, "in_numbers") for part in _IN_NUMBERS)),
    Section("experiments", "docs/gpu.md", ((EXPERIMENTS, "experiments.gpu_report"),)),
    Section("idle rows", "docs/optimizers.md", ((IDLE, "idle"),)),
    Section("word2vec", "docs/word2vec.md", ((WORD2VEC, "word2vec_report"),)),
    Section("ngram example", "docs/ngrams.md", ((NGRAM_EXAMPLE, "record_examples"),)),
    Section("parallel example", "docs/parallel.md", ((PARALLEL_EXAMPLE, "record_examples"),)),
    Section("exchange", "docs/compressed-exchange.md", (("exchange", "readme"),)),
    Section("mixed precision", "docs/mixed-precision.md", (("mixed", "readme"),)),
    Section("plan accuracy", "docs/plan.md", ((PLAN, "plan_accuracy"),)),
)


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of a page on a classic experiment."""
    from speedtransfer.benchmark import report

    return blocks_of(picture, CLASSIC[result["suite"]], report.markdown(result))


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
    """Return every recorded suite, GPUs first."""
    from speedtransfer.benchmark import report

    suites()
    found = [one for part, path in recorded(root) if part in (*SUITES, *CLASSIC) for one in _try(path, report.markdown)]
    return sorted(found, key=lambda one: not one.result["environment"]["cuda"])


def in_section(root: Path, section: Section) -> list[tuple[str, Recorded]]:
    """Return modules and newest results of a section; none where its marks are not on its page."""
    shown = []
    for part, module in section.parts if section.begin in _read(root / section.page) else ():

        def show(result: dict[str, Any], path: Path, module: str = module) -> str:
            address = _address(path.with_suffix(".png"), root / section.page)
            text: str = importlib.import_module(module).markdown(
                result, address if path.with_suffix(".png").exists() else ""
            )
            return text

        paths = [path for other, path in recorded(root) if other == part]
        found = [one for path in paths for one in _try(path, lambda result, path=path: show(result, path))]
        shown += [(module, max(found, key=lambda one: one.result["environment"]["date"]))] if found else []
    return shown


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def draw(root: Path, found: list[Recorded]) -> None:
    """Draw every result beside it, but those of which modules have no `draw`."""
    from speedtransfer.benchmark.report import plot

    drawn = [(plot, one) for one in found]
    for section in SECTIONS:
        for module, one in in_section(root, section):
            own = getattr(importlib.import_module(module), "draw", None) if module != "readme" else None
            drawn += [(own, one)] if own else []
    for make, (path, result, _) in drawn:
        try:
            problem = save_picture(make, result, path.with_suffix(".png"))
        except Exception as error:
            problem = f"no plot of {path} ({type(error).__name__}: {error})"
        if problem:
            _warn(problem)


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


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
    figures = SECTIONS[0]
    for path, result, text in found:
        device, picture, page = result["environment"]["device"], path.with_suffix(".png"), path.with_name("README.md")
        image = f"![{result['suite']} on {device}]({{}})" if picture.exists() else ""
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, root / figures.page)}).")
        pages[page] += [text, image.format(picture.name)]
        short += [shorten(text), image.format(_address(picture, root / figures.page))]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    for section in SECTIONS:
        page = root / section.page
        parts = [*filter(None, short)] if section is figures else [one.text for _, one in in_section(root, section)]
        text = texts.get(page) or _read(page)
        if parts and section.begin in text:
            before, _, rest = text.partition(section.begin)
            texts[page] = "\n\n".join([before + section.begin, *parts, section.end]) + rest.partition(section.end)[2]
    return texts


def _address(file: Path, page: Path) -> str:
    """Return the link to `file` from `page`."""
    return Path(os.path.relpath(file, page.parent)).as_posix()


def main(check: bool, root: Path = ROOT) -> int:
    """Write the pages and a page for each device; or compare them and return 1 where they differ."""
    found = every_suite(root)
    if not check:
        draw(root, found)
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
