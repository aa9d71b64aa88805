"""Writes the figures of README.md and docs, a page for each device, and the plots, from bench/results; run it as it is.

With ``--check`` it only compares the text. Only complete runs are shown, no quick ones (see store.py). README.md has a
sentence from each of six results and one from a notebook.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import store
from experiments import word2vec
from experiments.idle import DENSE, DISTANCE, EXACT, LAZY, RECALL

from examples.ngram_lm import WAYS
from speedtransfer.benchmark import report
from speedtransfer.benchmark.report import commit_and_date, groups_of
from speedtransfer.units import format_count

OVERSIZED = "notebooks/oversized.ipynb"
_OURS, _DENSE, _SPARSE = "speedtransfer, pageable", "nn.Embedding + AdamW", "nn.Embedding(sparse=True) + SparseAdam"


# --- the sentences of README.md -----------------------------------------------------------------------------------------


def in_numbers(result: dict[str, Any]) -> str:
    """Return the sentence that `result` gives README.md; after the one on steps comes that on a table in a file."""
    line = f"- {SENTENCES[result['part']](result)} ({result['environment']['device']}, {commit_and_date(result)})"
    return f"{line}\n\n{_oversized()}" if result["part"] == "step" else line


def _steps(result: dict[str, Any]) -> str:
    sizes = [group for group in groups_of(result) if group.params["experiment"] == "size"]
    times = {group.params["rows"]: {case.name: 1e3 * case.median_s for case in group.ran} for group in sizes}
    rows = max(rows for rows, found in times.items() if {_OURS, _DENSE, _SPARSE} <= found.keys())
    most = max(rows for rows, found in times.items() if _OURS in found)
    found, what = times[rows], sizes[0].title.split(" in ")[0]
    return (
        f"**Speed.** {what} in {format_count(rows)} x {sizes[0].params['dim']}: {found[_OURS]:.0f} ms; dense training "
        f"{found[_DENSE]:.0f} ms, SparseAdam {found[_SPARSE]:.0f} ms. In {format_count(most)} rows "
        f"{times[most][_OURS]:.0f} ms."
    )


def _oversized() -> str:
    """Return what the notebook on a table larger than the machine printed when it was executed."""
    cells = json.loads((store.ROOT / OVERSIZED).read_text(encoding="utf-8"))["cells"]
    text = "".join(line for cell in cells for out in cell.get("outputs", []) for line in out.get("text", []))
    machine, memory = re.findall(r"^(.+); (\d+) GB of memory$", text, re.MULTILINE)[0]
    sizes = re.findall(r"^([\d,]+) rows, +([\d.]+) GB: +(\S+) ms at first, +(\S+) ms", text, re.MULTILINE)
    rows, size, first, again = sizes[-1]
    return (
        f"- **Larger than the machine.** {format_count(int(rows.replace(',', '')))} rows, {float(size):.0f} GB with AdamW's "
        f"state, in a file on a machine with {memory} GB: {again} ms a step, {first} ms where rows are touched for the first "
        f"time ([notebook]({OVERSIZED}), {machine})"
    )


def _beside_others(result: dict[str, Any]) -> str:
    """Return times on the large table, and on many small ones the optimizer with which others are fastest."""
    keys = ("tables", "dim", "bags", "optimizer")
    found = {tuple(group.params[key] for key in keys): group for group in groups_of(result)}

    def ms(tables: int, dim: int, optimizer: str, name: str) -> str:
        case = found[tables, dim, 0, optimizer].by_name[name]
        return f"{1e3 * case.median_s:.{0 if tables == 1 else 1}f} ms"

    adagrad, adamw = (functools.partial(ms, 1, 128, optimizer) for optimizer in ("Adagrad", "AdamW"))
    exact, large = adamw('Embedding, idle="exact"'), found[1, 128, 0, "AdamW"].params
    return (
        f"**Beside others, on a CPU.** Adagrad step, {large['ids']:,} lookups in {format_count(large['rows'])} x 128: "
        f"{adagrad('Embedding')}, FBGEMM {adagrad('FBGEMM')}; AdamW: {exact}, SparseAdam {adamw('torch SparseAdam')}, "
        f"DeepSpeed {adamw('DeepSpeed CPUAdam')}. SGD step of 26 small tables: {ms(26, 16, 'SGD', 'MultiEmbedding')}, "
        f"FBGEMM {ms(26, 16, 'SGD', 'FBGEMM')}. [More](docs/results.md#beside-others)."
    )


def _on_a_gpu(result: dict[str, Any]) -> str:
    groups = [group for group in groups_of(result) if group.params["experiment"] == "step"]
    group = max(groups, key=lambda group: group.params["size"])
    (lookups,) = re.findall(r"step of ([\d,]+) lookups", group.title)
    several, one = "several kernels", "one kernel"
    lazy, exact = (group.by_name[f"AdamW, {idle}, rows"].figures for idle in ("lazy", "exact"))
    dense = group.by_name["nn.Embedding, AdamW"].figures[several]
    return (
        f"**On a GPU.** AdamW step, {lookups} lookups in {format_count(group.params['size'])} x 128 in host memory, with "
        f'`layout="rows"`: idle rows lazy {lazy[one]:.1f} ms, exact {exact[several]:.1f} ms; dense '
        f"training in the memory of the GPU {dense:.1f} ms. [More](docs/results.md#on-a-gpu)."
    )


def _same_numbers(result: dict[str, Any]) -> str:
    (group,) = groups_of(result)
    dense, exact, lazy = (group.by_name[way].figures for way in (DENSE, EXACT, LAZY))
    return (
        f"**The numbers of dense training.** {group.title.partition(',')[0].capitalize()}, {RECALL} after "
        f"{group.params['steps']:,} steps of AdamW: dense {dense[RECALL]:.3f}, ours {exact[RECALL]:.3f}, lazy "
        f"{lazy[RECALL]:.3f}; weights differ by at most {exact[DISTANCE]:.0e} of the farthest that any moved."
    )


def _language_model(result: dict[str, Any]) -> str:
    (group,) = groups_of(result)
    none, dense, sparse, exact = (group.by_name[WAYS[way].title] for way in ("none", "dense", "sparse", "exact"))
    loss = {case.name: f"{case.figures['validation']:.3f}" for case in (none, dense, sparse, exact)}
    tokens = [group.params["batch"] * group.params["context"] / case.median_s for case in (exact, dense)]
    return (
        f"**N-gram tables of a language model.** A small GPT's validation loss with {group.params['heads']} rows a token: "
        f"{loss[exact.name]}, dense AdamW {loss[dense.name]}, SparseAdam {loss[sparse.name]}, without tables "
        f"{loss[none.name]}; {tokens[0]:,.0f} tokens a second, dense {tokens[1]:,.0f}."
    )


def _words(result: dict[str, Any]) -> str:
    group = next(group for group in groups_of(result) if group.params["model"] == "skipgram")
    case = next(case for case in group.ran if case.role == "ours")
    found = [verdict for _, verdict in word2vec.verdicts(case)]
    worse = found.count(word2vec.WORSE)
    quality = f"worse on {worse} of {len(found)} sets" if worse else f"not worse on any of {len(found)} sets"
    return (
        f"**word2vec.** Skip-gram of {group.params['dim']} dimensions by {case.name.rpartition(', ')[2]} on two cores: "
        f"{word2vec.ratio(group, case):.1f} times gensim's words a second, {quality} beyond the confidence interval."
    )


SENTENCES = {
    **{"step": _steps, "peers": _beside_others, "gpu": _on_a_gpu},
    **{"idle": _same_numbers, "ngram_example": _language_model, "word2vec": _words},
}

# --- pages --------------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of docs/results.md, or of README.md, that shows the newest results of `parts`; the first has a picture."""

    name: str
    parts: tuple[str, ...]
    title: str = ""  # of the picture
    page: str = "docs/results.md"
    make: Callable[[dict[str, Any]], str] = report.markdown

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: made by `python bench/readme.py` from bench/results; do not edit -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"

    def of(self, found: Sequence[Recorded]) -> list[str]:
        """Return the newest result of each part as text."""
        texts = list[str]()
        for part in self.parts:
            some = [one for one in found if one.result["suite"] == part]
            for path, result in sorted(some, key=lambda one: one.result["environment"]["date"])[-1:]:
                texts += [_image(path, self.title, store.ROOT / self.page)] if part == self.parts[0] else []
                texts.append(self.make(result))
        return [*filter(None, texts)]


STEPS = "Time of a training step by the rows of the table: ours stays level, dense training grows with the table"
FIGURES = Section("figures", ())  # of the suites without a section of their own, in short
_OF_THEIR_OWN = {part: Section(name, (part,), title) for part, (title, name) in store.EXPERIMENTS.items() if name}
SECTIONS = (FIGURES, Section("in numbers", tuple(SENTENCES), STEPS, "README.md", in_numbers), *_OF_THEIR_OWN.values())


class Recorded(NamedTuple):
    """A recorded result: its path and its contents."""

    path: Path
    result: dict[str, Any]

    def draw(self) -> None:
        """Draw the result beside it, where there is something to show."""
        from PIL import Image  # matplotlib brings it

        target, picture = self.path.with_suffix(".png"), report.plot(self.result)
        if picture is None:
            target.unlink(missing_ok=True)
            return
        with Image.open(io.BytesIO(picture)) as image:
            # Few colours are enough for bars and lines, and a third of the bytes.
            image.convert("RGB").quantize(64).save(target, optimize=True)


def _image(result: Path, title: str, page: Path) -> str:
    picture = result.with_suffix(".png")
    return f"![{title}]({_address(picture, page)})" if picture.exists() else ""


def _address(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file, page.parent)).as_posix()


def documents(found: Sequence[Recorded]) -> dict[Path, str]:
    """Return the text of each page: one for every device with all results, and those that show some."""
    pages: dict[Path, list[str]] = {}
    short: list[str] = []
    for path, result in found:
        device, page, figures = result["environment"]["device"], path.with_name("README.md"), store.ROOT / FIGURES.page
        title = f"{result['suite']} on {device}"
        if page not in pages:
            pages[page] = [f"# {device}", "Made by `python bench/readme.py` from the files beside it."]
            short.append(f"### {device}\n\nAll figures: [{device}]({_address(page, figures)}).")
        pages[page] += [report.markdown(result), _image(path, title, page)]
        if result["suite"] not in _OF_THEIR_OWN:
            short += [report.markdown(result, short=True), _image(path, title, figures)]
    texts = {page: "\n\n".join(filter(None, parts)) + "\n" for page, parts in pages.items()}
    for section in SECTIONS:
        page = store.ROOT / section.page
        parts = [*filter(None, short)] if section is FIGURES else section.of(found)
        text = texts.get(page) or _read(page)
        if parts and section.begin in text:
            before, _, rest = text.partition(section.begin)
            texts[page] = "\n\n".join([before + section.begin, *parts, section.end]) + rest.partition(section.end)[2]
    return texts


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def main(check: bool) -> int:
    """Write the pages and a page for each device; or compare them and return 1 where they differ."""
    store.suites()
    found = [Recorded(path, store.read(path)) for part, path in store.recorded() if part in store.MEASURED]
    found.sort(key=lambda one: not one.result["environment"]["cuda"])  # those of GPUs first
    for one in () if check else found:
        one.draw()
    wanted = documents(found)
    others = [path for path, text in wanted.items() if _read(path) != text]
    for path in others:
        if check:
            print(
                f"{path.relative_to(store.ROOT)} is not of bench/results; run `python bench/readme.py`", file=sys.stderr
            )
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(others))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
