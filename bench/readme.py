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
from store import IDLE, MEASURED, NGRAM_EXAMPLE, PARALLEL_EXAMPLE, ROOT, WORD2VEC, read, recorded, suites

from speedtransfer.benchmark import report


class Section(NamedTuple):
    """A section of a page that shows the newest results of `parts`, between two marks, by `markdown` of a module."""

    name: str
    parts: tuple[str, ...]
    module: str = "readme"
    page: str = "docs/results.md"

    @property
    def begin(self) -> str:
        """The mark before it."""
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        """The mark behind it."""
        return f"<!-- end of {self.name} -->"


FIGURES = Section("figures", ())  # of all suites, in short
SECTIONS = (
    FIGURES,
    Section("in numbers", ("step", "gpu", IDLE, NGRAM_EXAMPLE, WORD2VEC), "in_numbers", "README.md"),
    Section("experiments", ("gpu",)),
    Section("idle rows", (IDLE,), "idle"),
    Section("word2vec", (WORD2VEC,), "word2vec_report"),
    Section("ngram example", (NGRAM_EXAMPLE,), "record_examples"),
    Section("parallel example", (PARALLEL_EXAMPLE,), "record_examples"),
    Section("exchange", ("exchange",)),
    Section("mixed precision", ("mixed",)),
    Section("plan accuracy", ("plan_accuracy",)),
)


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of a page on an experiment."""
    return blocks_of(picture, suites()[result["suite"]].title, report.markdown(result))


def draw(result: dict[str, Any]) -> Any:
    """Return the picture of a suite."""
    return report.plot(result)


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
    suites()
    found = [one for part, path in recorded(root) if part in MEASURED for one in _try(path, report.markdown)]
    return sorted(found, key=lambda one: not one.result["environment"]["cuda"])


def in_section(root: Path, section: Section) -> list[Recorded]:
    """Return the newest results of a section; none where its marks are not on its page."""
    shown: list[Recorded] = []
    if section.begin not in _read(root / section.page):
        return shown
    make = importlib.import_module(section.module).markdown
    for part in section.parts:
        found = []
        for path in (path for other, path in recorded(root) if other == part):
            picture = path.with_suffix(".png")
            address = _address(picture, root / section.page) if picture.exists() else ""
            found += _try(path, lambda result, address=address: make(result, address))  # type: ignore[misc]
        shown += [max(found, key=lambda one: one.result["environment"]["date"])] if found else []
    return shown


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def draw_all(root: Path, found: list[Recorded]) -> None:
    """Draw every result beside it, but those of which modules have no `draw`."""
    drawn = [(draw, one) for one in found]
    for section in SECTIONS:
        own = getattr(importlib.import_module(section.module), "draw", None) if section.module != "readme" else None
        drawn += [(own, one) for one in in_section(root, section)] if own else []
    for make, (path, result, _) in drawn:
        try:
            problem = save_picture(make, result, path.with_suffix(".png"))
        except Exception as error:
            problem = f"no plot of {path} ({type(error).__name__}: {error})"
        if problem:
            _warn(problem)


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def documents(root: Path, found: list[Recorded]) -> dict[Path, str]:
    """Return the text of each page: one for every device with all results, and those that show some."""
    pages: dict[Path, list[str]] = {}
    short: list[str] = []
    for path, result, text in found:
        device, picture, page = result["environment"]["device"], path.with_suffix(".png"), path.with_name("README.md")
        image = f"![{result['suite']} on {device}]({{}})" if picture.exists() else ""
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, root / FIGURES.page)}).")
        pages[page] += [text, image.format(picture.name)]
        short += [report.markdown(result, short=True), image.format(_address(picture, root / FIGURES.page))]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    for section in SECTIONS:
        page = root / section.page
        parts = [*filter(None, short)] if section is FIGURES else [one.text for one in in_section(root, section)]
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
