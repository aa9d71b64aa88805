"""What chosen suites have found, as pages of docs/ show it: `mixed` and `exchange`."""

from __future__ import annotations

from typing import Any

from experiment import blocks_of

from speedtransfer.benchmark import report
from speedtransfer.benchmark.results import GroupResult


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of a page; `picture` is its path or nothing."""
    return {"mixed": _mixed, "exchange": _exchange}[result["suite"]](result, picture)


def _mixed(result: dict[str, Any], picture: str) -> str:
    """Return the figures, with what was trained first."""
    title, *rest = report.markdown(result).split("\n\n")
    params = GroupResult.from_json(result["groups"][0]).params
    layers = " and ".join(f"{params['hidden']:,}" for _ in range(params["layers"]))
    trained = (
        f"Rows of {params['dim']} values, {params['context']} words before the next one, hidden layers of {layers} units, "
        f"{params['classes']:,} words to choose from; {params['epochs']} epochs of {params['windows']:,} windows, judged by "
        f"{params['held_out']:,} that were held out."
    )
    what = f"Time, memory and accuracy in 16 and 32 bits by batch size, {result['environment']['device']}"
    return "\n\n".join([title, trained, blocks_of(picture, what, *rest)])


def _exchange(result: dict[str, Any], picture: str) -> str:
    tables = [report.markdown_table(table) for table in report.summary_tables(result)]
    missing = "\n".join(f"- {line}" for line in report.missing(result))
    title = "Bytes, steps and seconds to the same loss, by how gradients are sent"
    return blocks_of(picture, title, *tables, missing, f"{report.provenance(result)}; medians.")
