"""The example of a GPT with n-gram tables (examples/ngram_lm.py): ``python bench/record.py here --only ngram_example``."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from examples import ngram_lm
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.report import show_figure, show_held, show_time
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.errors import SpeedtransferError

NOTE = "The loss is that of the last 20 batches, the validation that of text that was not trained on."
COLUMNS = {
    "loss": show_figure("loss", "{:.4f}"),
    "validation": show_figure("validation", "{:.4f}"),
    "perplexity": show_figure("perplexity", "{:,.1f}"),
    "tokens/s": lambda group, case: f"{group.params['batch'] * group.params['context'] / case.median_s:,.0f}",
    "step": show_time,
    "table + state": show_figure("table_bytes", "{:,.0f} MB", 1e-6),
    "peak memory": show_held,
}
CURVES = {"loss": ("loss of the batch", "linear"), "validation": ("loss of validation", "linear")}
_QUICK = {"steps": 6, "batch": 2, "context": 8, "vocabulary": 40, "width": 8, "layers": 2, "attention_heads": 2}
_QUICK |= {"rows": 50, "dim": 4}
SETTINGS = list(ngram_lm.SIZES)


def groups(device: torch.device, quick: bool, **given: Any) -> list[Group]:
    flags = (_QUICK if quick else {}) | {name: value for name, value in given.items() if name in SETTINGS}
    params: dict[str, Any] = {"headline": False}
    return [Group("a GPT with n-gram tables", functools.partial(_measure, flags, params), params)]


def _measure(flags: dict[str, Any], params: dict[str, Any]) -> list[CaseResult]:
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    try:
        result = ngram_lm.main(words)
    except SystemExit as error:
        raise SpeedtransferError(f"the example ended early ({error})") from None
    params |= {**result["settings"], **{name: result[name] for name in ("data", "vocabulary", "tokens", "comparisons")}}
    cases = []
    for name, found in result["contenders"].items():
        way, last = ngram_lm.WAYS[name], found["losses"][-20:]
        steps, validation = map(list, zip(*found["validation"], strict=True))
        case = CaseResult(way.title, "ours" if way.kind == "ours" else "other", 0, [found["step_s"]])
        case.figures = {"loss": sum(last) / len(last), "validation": validation[-1]}
        case.figures |= {"perplexity": math.exp(min(validation[-1], 700)), "table_bytes": found["table_bytes"]}
        losses = [round(loss, 4) for loss in found["losses"]]
        case.values = {"loss": losses, "validation": validation, "validation_steps": steps}
        cases.append(case)
    return cases


def about(groups: list[GroupResult]) -> list[str]:
    """Return what was trained, and how far the ways are apart."""
    lines = []
    for found in (group.params for group in groups):
        lines += [
            f"{found['data']}, {found['tokens']['train']:,} tokens of {found['vocabulary']:,} words; GPT of {found['layers']} "
            f"blocks, width {found['width']}; {found['heads']} rows a token, each in a head of {found['rows']:,} x "
            f"{found['dim']} {found['dtype']}; {found['steps']:,} steps of {found['batch'] * found['context']:,} tokens",
            *map(ngram_lm.sentence, found["comparisons"]),
        ]
    return lines
