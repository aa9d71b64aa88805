"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Only complete runs are shown, no quick ones (see store.py).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import in_numbers
import store

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
SECTIONS = (
    FIGURES,
    Section("in numbers", tuple(in_numbers.SENTENCES), STEPS, "README.md", in_numbers.markdown),
    Section("roofs", ("gpu",), make=in_numbers.roofs),
    *(Section(section, (part,), title) for part, (title, section) in store.EXPERIMENTS.items() if section),
)
_OF_THEIR_OWN = {part for part, (_, section) in store.EXPERIMENTS.items() if section}


class Recorded(NamedTuple):
    """A recorded result: its path and its contents."""

    path: Path
    result: dict[str, Any]


def _shown(path: Path, show: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Return what is shown of a result; "", with a warning, where it cannot be shown."""
    try:
        return show(*given, **how)
    except Exception as error:  # of another version or another program
        _warn(f"{path} is unreadable ({type(error).__name__}: {error}) and left out; record it again")
        return ""


def every_result() -> list[Recorded]:
    """Return the results of all suites and experiments that can be read, those of GPUs first."""
    paths = (path for part, path in store.recorded() if part in store.MEASURED)
    found = [Recorded(path, result) for path in paths if (result := _shown(path, store.read, path))]
    return sorted(found, key=lambda one: not one.result["environment"]["cuda"])


def in_section(found: Sequence[Recorded], section: Section) -> list[str]:
    """Return the newest result of each part of a section as text."""
    texts = list[str]()
    for part in section.parts:
        some = [one for one in found if one.result["suite"] == part]
        for path, result in sorted(some, key=lambda one: one.result["environment"]["date"])[-1:]:
            text = _shown(path, section.make, result)
            image = _image(path, section.title, store.ROOT / section.page) if part == section.parts[0] else ""
            texts += filter(None, [image, text])
    return texts


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw a result beside it, where there is something to show."""
    from PIL import Image  # matplotlib brings it

    target, picture = path.with_suffix(".png"), report.plot(result)
    if picture is None:
        target.unlink(missing_ok=True)
        return
    with Image.open(io.BytesIO(picture)) as image:
        # Few colours are enough for bars and lines, and a third of the bytes.
        image.convert("RGB").quantize(64).save(target, optimize=True)


def _warn(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def documents(found: Sequence[Recorded]) -> dict[Path, str]:
    """Return the text of each page: one for every device with all results, and those that show some."""
    pages: dict[Path, list[str]] = {}
    short: list[str] = []
    for path, result in found:
        device, page, figures = result["environment"]["device"], path.with_name("README.md"), store.ROOT / FIGURES.page
        title, text = f"{result['suite']} on {device}", _shown(path, report.markdown, result)
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, figures)}).")
        pages[page] += [text, _image(path, title, page)]
        if text and result["suite"] not in _OF_THEIR_OWN:
            short += [report.markdown(result, short=True), _image(path, title, figures)]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    for section in SECTIONS:
        page = store.ROOT / section.page
        parts = [*filter(None, short)] if section is FIGURES else in_section(found, section)
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


def main(check: bool) -> int:
    """Write the pages and a page for each device; or compare them and return 1 where they differ."""
    store.suites()
    found = every_result()
    for path, result in () if check else found:
        _shown(path.with_suffix(".png"), draw, path, result)
    wanted = documents(found)
    others = [path for path, text in wanted.items() if _read(path) != text]
    for path in others:
        if check:
            _warn(
                f"{path.relative_to(store.ROOT)} does not show the figures in bench/results; run `python bench/readme.py`"
            )
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(others))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
