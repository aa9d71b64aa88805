"""What the pages show and do not hold: tables that the code decides, made anew at every build.

A page has a line ``<!-- table: NAME -->`` where the table of that name goes.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import typer

from speedtransfer.benchmark.measure import SUITES
from speedtransfer.cli import app as root
from speedtransfer.errors import format_bytes
from speedtransfer.nn.sizing import table_size
from speedtransfer.planning.hosts import LINKS
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.planner import plan
from speedtransfer.units import format_seconds
from speedtransfer.word2vec.commands import described
from speedtransfer.word2vec.optimizers import DEFAULT_LR, DEFAULT_OPTIONS, default_lr
from speedtransfer.word2vec.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
SWEEP = Path(__file__).with_name("optimizer_sweep.json")
MARK = re.compile(r"^<!-- table: (.+) -->$", re.MULTILINE)
# To the page of a device, as it is in the repository; docs/results is bench/results.
_DEVICE_PAGE = re.compile(r"(?<!!)\[(.+?)\]\(\.\./bench/(results/.+?)\.md\)")
# A row of a table, and the space between a figure and its unit, where a narrow column must not break.
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_UNIT = re.compile(r"(?<=\d) (?=(?:ns|us|ms|s|B|[kKMGT]B|GB/s)(?!\w))")


def fill(text: str) -> str:
    """Return the text of a page with every table in its place."""
    # A role, since Markdown's links are followed to where bench/results really is, outside the pages.
    text = _DEVICE_PAGE.sub(r"{doc}`\1 </\2>`", text)
    text = MARK.sub(lambda mark: TABLES[mark[1]](), text)
    return _ROW.sub(lambda row: _UNIT.sub("\u00a0", row[0]), text)


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _classed(name: str, table: str) -> str:
    """Return a table with a class of _static/site.css, which says how a phone shows it."""
    return f"::::{{table}}\n:class: {name}\n\n{table}\n::::"


def _flags(rows: Iterable[Iterable[str]]) -> str:
    return _classed("flags", _table(("flag", "default", "meaning"), rows))


def _options(*path: str) -> str:
    """Return the arguments and options of a command; settings have a table of their own."""
    command: Any = typer.main.get_command(root)
    for name in path:
        command = command.commands[name]
        command = getattr(command, "loaded", command)  # one that is imported when it is used
    rows = []
    for param in command.params:
        if param.name == "help" or getattr(param, "hidden", False) or (path[-1] == "train" and param.name in SETTINGS):
            continue
        if param.param_type_name == "argument":
            name, default = f"`{param.metavar or param.name.upper()}`", "required"
        else:
            name, default = ", ".join(f"`{opt}`" for opt in param.opts), _default(param)
        rows.append((name, default, param.help or ""))
    return _flags(rows)


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    return "" if param.default in (None, False, ()) or callable(param.default) else f"`{param.default}`"


def _settings() -> str:
    rows = []
    for name, setting in SETTINGS.items():
        choices = setting.metadata.get("choices", ())
        flag = "`--option NAME=VALUE`" if name == "options" else f"`--{name.replace('_', '-')}`"
        default = "" if setting.default is None else f"`{setting.default}`"
        meaning = described(name) + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")
        rows.append((flag, default, meaning))
    return _flags(rows)


def _rates() -> str:
    rows = []
    for name, lr in DEFAULT_LR.items():
        more = [f"{key}={value}" for key, value in DEFAULT_OPTIONS.get(name, {}).items()]
        rows.append((f"`{name}`", f"{lr:g}", f"{default_lr(name, 'cbow'):g}", ", ".join(f"`{it}`" for it in more)))
    return _table(("optimizer", "lr", "lr for CBOW", "also"), rows)


def _remarks(case: Any) -> str:
    """Return what to say of a case beside its code."""
    refused = f"**Raises**: {case.refused}." if case.refused else ""
    of_copies = f"**Raises where rows are copied**: {case.refused_of_copies}." if case.refused_of_copies else ""
    return ". ".join(part for part in (case.title, f"{refused} {of_copies}".strip()) if part)


def _weight(group: str) -> str:
    """Return the cases of tests/test_weight.py: those that need no word as lines of code, the others as a table."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    cases = [case for case in importlib.import_module("weight_cases_training").CASES if case.group == group]
    plain = [case.code for case in cases if not _remarks(case)]
    rows = [(_remarks(case), case.code) for case in cases if _remarks(case)]
    lines = ["```python", *("\n".join(plain).splitlines()), "```", ""] if plain else []
    lines += ["::::{list-table}", ":widths: 20 80", ":class: cases", ""]
    for title, code in rows:
        lines += [f"* - {title}", "  - ```python", *(f"    {line}" for line in code.splitlines()), "    ```"]
    return "\n".join([*lines, "::::"])


def _suites() -> str:
    return _table(("suite", "shows"), ((f"`{suite.name}`", suite.title) for suite in SUITES.values()))


# Rows, columns, how many tables: sizes of tables of published models.
_PUBLISHED = ((320_001_536, 160, 1), (384_000_000, 256, 2))
# How they are used: words, and arguments of `speedtransfer plan`.
_USES: tuple[tuple[str, dict[str, str]], ...] = (
    ("frozen, bfloat16", {"optimizer": "none", "storage": "bfloat16"}),
    ("frozen, float8", {"optimizer": "none", "storage": "float8_e4m3fn"}),
    ("AdamW, float32", {}),
    ("AdamW, bfloat16 rows, 8-bit state", {"storage": "bfloat16", "state": "uint8"}),
    ("AdamW, rows of 24 bits, 8-bit state", {"storage": "split24", "state": "uint8"}),
    ("AdamW, float8 rows, 8-bit state", {"storage": "float8_e4m3fn", "state": "uint8"}),
    ("AdamW, lazy, float8 rows, 8-bit state", {"storage": "float8_e4m3fn", "state": "uint8", "idle": "lazy"}),
    ("SGD, bfloat16 rows", {"optimizer": "SGD", "storage": "bfloat16"}),
)


def _ngram_sizes() -> str:
    """Return the host memory of published n-gram tables by how they are used, as `speedtransfer plan` computes it."""
    titles = [
        "",
        *(f"{count} x {rows:,} x {dim}".removeprefix("1 x ") for rows, dim, count in _PUBLISHED),
        "bytes a row",
    ]
    lines = []
    for words, given in _USES:
        sizes = [
            table_size(
                rows,
                dim,
                optimizer_given(given.get("optimizer", "AdamW")).make,
                storage_dtype=getattr(torch, given["storage"], given["storage"]) if "storage" in given else None,
                state_dtype=getattr(torch, given["state"]) if "state" in given else None,
                idle=given.get("idle", "auto"),
            )
            for rows, dim, _ in _PUBLISHED
        ]
        held = [format_bytes(count * size.total_bytes) for (*_, count), size in zip(_PUBLISHED, sizes, strict=True)]
        lines.append((words, *held, " and ".join(f"{size.row_bytes:,}" for size in sizes)))
    return _table(titles, lines)


# Of a step: words, an optimizer as `speedtransfer plan` names it, and arguments of `table_size`.
_STEPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("SGD", "SGD", {}),
    ("Adagrad", "Adagrad", {}),
    ("SGD with momentum", "SGD(momentum=0.9)", {}),
    ("RMSprop", "RMSprop", {}),
    ("Adam, AdamW", "AdamW", {}),
    ('AdamW, `idle="lazy"`', "AdamW", {"idle": "lazy"}),
    ("AdamW, bfloat16 rows and state", "AdamW", {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
    ("AdamW, int8 rows, 8-bit state", "AdamW", {"storage_dtype": torch.int8, "state_dtype": torch.uint8}),
    ("AMSGrad", "AdamW(amsgrad=True)", {}),
    ("none: a frozen table", "none", {}),
)
_STEP_DIM, _STEP_ROWS = 128, 100_000


def _step_bytes() -> str:
    """Return what a training step moves for a row, by optimizer: measured on a few rows, as `speedtransfer plan` does."""
    lines = []
    for words, optimizer, given in _STEPS:
        size = table_size(_STEP_ROWS, _STEP_DIM, optimizer_given(optimizer).make, **given)
        step = size.step(_STEP_ROWS)
        row = (f"{size.up_row_bytes:,.0f} B", f"{size.down_row_bytes:,.0f} B", format_bytes(round(step.up + step.down)))
        lines.append((words, *row, ", ".join(f"`{plane.name}`" for plane in size.planes)))
    return _table(("optimizer", "gather", "scatter", f"{_STEP_ROWS:,} rows", "planes"), lines)


# Words of a reason, and what to say of those with it; the last takes all others.
_REASONS = (
    ("depends on the other rows", "refused: the update of a row, or shared state, depends on the other rows"),
    ("not one entry a row", "refused: state of another shape than one entry a row"),
    ("wraps", "refused: a wrapper; give the table to the inner optimizer"),
    ("closure", "refused: takes a closure that evaluates the loss within the step"),
    ("changes the whole parameter", "refused: `train()` and `eval()` change the whole parameter"),
    ("grad_fn", "refused: needs the graph of the gradient (`create_graph=True`)"),
    ("", "refused: for another reason"),
)


def _third_party() -> str:
    """Return what the last sweep over other packages' optimizers found (tests/sweep_optimizers.py)."""
    sweep = json.loads(SWEEP.read_text(encoding="utf-8"))
    names: dict[str, dict[str, list[str]]] = {}
    for one in sweep["outcomes"]:
        kind = one["result"]
        if kind == "DIFFERS":
            kind = "differs: do not give it a table"
        elif kind == "refused":
            kind = next(say for words, say in _REASONS if words in one["detail"])
        names.setdefault(kind, {}).setdefault(one["package"], []).append(one["name"])
    order = ["works", *(say for _, say in _REASONS), *sorted(names)]
    kinds = [kind for kind in dict.fromkeys(order) if kind in names]
    rows = [
        (kind, ". ".join(f"**{package}**: {', '.join(of)}" for package, of in names[kind].items())) for kind in kinds
    ]
    packages = ", ".join(f"{package} {version}" for package, version in sweep["versions"].items())
    return _classed("cases", _table(("outcome", f"optimizers of {packages}"), rows))


# MLPerf's DLRM of 2023 on the click logs of Criteo, 1 TB: rows of its 26 tables, at most 40 million each; a batch is 65,536.
CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4,
    976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


def _plan(sizes: Any, **given: Any) -> str:
    """Return what a plan for a machine prints."""
    return f"```text\n{plan(sizes, **given)}\n```"


def _links() -> str:
    rows = (
        (f"`{each.name}`", f"{format_bytes(each.bytes_per_s)}/s", format_seconds(each.delay_s), each.source)
        for each in LINKS.values()
    )
    return _table(("link", "each way", "one way", "from"), rows)


def _hosts() -> str:
    """Return the numbers of the picture _static/hosts.png, which the command above it draws."""
    found = plan((10**9, 128), batch=65_536, hosts=16, link="25GbE", machine="h200", host_memory="2TB").hosts
    assert found is not None
    rows = (
        (f"{each.number:,}", format_bytes(each.cost.sent), f"{each.busiest:.2f}", format_seconds(each.seconds))
        for each in found.by_number()
    )
    titles = ("hosts", "sent by each", "the busiest over the mean", "exchange of a step, 25GbE")
    return _table(titles, rows)


_START = ("quickstart", "move-your-model", "how-it-works", "notebooks", "limits")


def _first_screen() -> str:
    """Return where to begin, beside the picture that README.md shows and the sentence below it."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- in numbers:")[2]
    picture, sentence = re.findall(r"^(?:!\[.+\]\(.+\)|- .+)$", section, re.MULTILINE)[:2]
    picture = picture.replace("](bench/", "](../bench/")
    links = "\n".join(f"- {{doc}}`{page}`" for page in _START)
    beside = f":::{{container}} start\n**Start here**\n\n{links}\n\n{sentence.removeprefix('- ')}\n:::"
    return f"::::{{container}} first-screen\n{picture}\n\n{beside}\n::::"


def _status() -> str:
    """Return what README.md says of the state of things."""
    (status,) = re.findall(
        r"^\*\*Status: .+?(?=\n\n)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return f"{status} See {{doc}}`gpu`."


TABLES: dict[str, Callable[[], str]] = {
    "settings": _settings,
    "rates": _rates,
    "suites": _suites,
    "third-party optimizers": _third_party,
    "bench": lambda: _options("bench"),
    "plan": lambda: _options("plan"),
    "links": _links,
    "plan hosts": _hosts,
    "ngram sizes": _ngram_sizes,
    "plan criteo": lambda: _plan(
        [(rows, 128) for rows in CRITEO_ROWS], optimizer="Adagrad", batch=65_536, machine="h200", host_memory="512GB"
    ),
    "plan n-grams": lambda: _plan(
        _PUBLISHED[0][:2], batch=65_536, lookups=16, machine="h200", host_memory="512GB", disk="4TB"
    ),
    "plan frozen": lambda: _plan(
        [(384_000_000, 256)] * 2,
        optimizer=None,
        batch=4096,
        lookups=12,
        machine="h200",
        host_memory="512GB",
        storage_dtype="float8_e4m3fn",
    ),
    "step bytes": _step_bytes,
    "first screen": _first_screen,
    "status": _status,
    **{f"weight {group}": lambda group=group: _weight(group) for group in ("read", "write", "grad", "swap", "train")},
    **{
        f"word2vec {name}": lambda name=name: _options("word2vec", name)
        for name in ("train", "evaluate", "nearest", "analogy", "plot", "convert")
    },
}
