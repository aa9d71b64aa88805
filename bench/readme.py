"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Only complete runs are shown, no quick ones (see store.py).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import in_numbers
from store import EXPERIMENTS, MEASURED, ROOT, read, recorded, suites

from speedtransfer.benchmark import report

RESULTS = "docs/results.md"


class Section(NamedTuple):
    """A section of docs/results.md, or of README.md, that shows the newest results of `parts`; the first has a picture."""

    name: str
    parts: tuple[str, ...]
    title: str = ""  # of the picture
    page: str = RESULTS
    make: Callable[[dict[str, Any]], str] = report.markdown

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"


STEPS = "Time of a training step by the rows of the table: ours stays level, dense training grows with the table"
FIGURES = Section("figures", ())  # of the suites without a section of their own, in short
NAMES = {
    **{"gpu": "experiments", "idle": "idle rows", "word2vec": "word2vec", "ngram_example": "ngram example"},
    **{
        "parallel_example": "parallel example",
        "exchange": "exchange",
        "mixed": "mixed precision",
        "peers": "beside others",
    },
    **{"plan_accuracy": "plan accuracy", "hosts": "two hosts", "saves": "checkpoints"},
}
SECTIONS = (
    FIGURES,
    Section("in numbers", tuple(in_numbers.SENTENCES), STEPS, "README.md", in_numbers.markdown),
    Section("roofs", ("gpu",), make=in_numbers.roofs),
    *(Section(name, (part,), EXPERIMENTS[part]) for part, name in NAMES.items()),
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
    found = [one for part, path in recorded(root) if part in MEASURED for one in _try(path, report.markdown)]
    return sorted(found, key=lambda one: not one.result["environment"]["cuda"])


def in_section(root: Path, section: Section) -> list[Recorded]:
    """Return the newest results of a section."""
    page, shown = root / section.page, list[Recorded]()
    for part in section.parts:
        found = [one for other, path in recorded(root) if other == part for one in _try(path, section.make)]
        if found:
            newest = max(found, key=lambda one: one.result["environment"]["date"])
            image = _image(newest.path, section.title, page) if part == section.parts[0] else ""
            shown.append(newest._replace(text="\n\n".join(filter(None, [image, newest.text]))))
    return shown


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw a result beside it, where there is something to show."""
    from PIL import Image  # matplotlib brings it

    target = path.with_suffix(".png")
    try:
        picture = report.plot(result)
        if picture is None:
            target.unlink(missing_ok=True)
            return
        with Image.open(
            io.BytesIO(picture)
        ) as image:  # few colours are enough for bars and lines, and a third of the bytes
            image.convert("RGB").quantize(64).save(target, optimize=True)
    except Exception as error:
        _warn(f"no plot of {path} ({type(error).__name__}: {error})")


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
        if not any(section.parts[:1] == (result["suite"],) for section in SECTIONS if section.make is report.markdown):
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
    suites()
    found = every_suite(root)
    for path, result, _ in () if check else found:
        draw(path, result)
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
