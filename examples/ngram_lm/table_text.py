"""The results as text."""

from __future__ import annotations

import math
from typing import Any

from ngram_lm.contenders import CONTENDERS
from speedtransfer.errors import format_bytes

_HEADER = ("", "loss", "validation", "perplexity", "tokens/s", "step", "table + state", "peak memory")


def show(result: dict[str, Any]) -> str:
    """Return the table of the contenders and a line for each comparison."""
    rows = cells(result)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["", what(result), ""]
    for name, *others in rows:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    lines += ["", *(sentence(one) for one in result["comparisons"])]
    failed = ((name, one["error"]) for name, one in result["contenders"].items() if one.get("error"))
    return "\n".join([*lines, *(f"{CONTENDERS[name].title}: {error}" for name, error in failed)])


def cells(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table, its header first."""
    found = result["contenders"].items()
    return [_HEADER, *(_row(name, one, result["settings"]) for name, one in found if one["losses"])]


def what(result: dict[str, Any]) -> str:
    """Return what was trained, and where."""
    settings, environment = result["settings"], result["environment"]
    parts = [
        f"{result['data']}, {result['tokens']['train']:,} tokens of {result['vocabulary']:,} words",
        f"GPT of {settings['layers']} blocks, width {settings['width']}",
        f"{settings['heads']} rows a token, each in a head of {settings['rows']:,} x {settings['dim']} {settings['dtype']}",
        f"{settings['steps']:,} steps of {settings['batch'] * settings['context']:,} tokens",
        f"{environment['device']}, torch {environment['versions']['torch']}",
    ]
    return "; ".join(parts)


def _row(name: str, one: dict[str, Any], settings: dict[str, Any]) -> tuple[str, ...]:
    last = one["losses"][-20:]
    validation = one["validation"][-1][1] if one["validation"] else None
    step = one.get("step_s")
    return (
        CONTENDERS[name].title + ("" if one["complete"] else f" (stopped after {len(one['losses']):,} steps)"),
        f"{sum(last) / len(last):.4f}",
        "" if validation is None else f"{validation:.4f}",
        "" if validation is None else f"{math.exp(min(validation, 700)):,.1f}",
        "" if step is None else f"{settings['batch'] * settings['context'] / step:,.0f}",
        "" if step is None else f"{1e3 * step:,.1f} ms",
        format_bytes(one["table_bytes"]) if one.get("table_bytes") else "",
        format_bytes(one["peak_bytes"]) if "peak_bytes" in one else "",
    )


def sentence(one: dict[str, Any]) -> str:
    """Return what a comparison has found."""
    names = " and ".join(CONTENDERS[one[key]].title for key in ("contender", "to"))
    if one["losses_equal"] and one["table_equal"]:
        return f"{names}: all losses and the table are the same bits"
    losses = "the same bits" if one["losses_equal"] else f"apart by at most {one['loss_difference']:.1e}"
    table = "the same bits" if one["table_equal"] else f"by {one['table_difference']:.1e} of its largest number"
    return f"{names}: losses {losses}, the table {table} (wanted: {one['wanted']})"
