"""What suite `mixed` has found, as docs/mixed-precision.md shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speedtransfer.benchmark.report import markdown as of_suite
from speedtransfer.benchmark.results import GroupResult


def save(result: dict[str, Any], path: Path) -> str:
    """Draw nothing: the picture is that of the suite, which is drawn with those of the others."""
    return ""


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the figures, with what was trained first; `picture` is its path or nothing."""
    title, *rest = of_suite(result).split("\n\n")
    groups = [GroupResult.from_json(group) for group in result["groups"]]
    shown = (
        f"![Time, memory and accuracy in 16 and 32 bits by batch size, {result['environment']['device']}]({picture})"
    )
    return "\n\n".join([title, _trained(groups[0].params), shown if picture else "", *rest]).replace("\n\n\n\n", "\n\n")


def _trained(params: dict[str, Any]) -> str:
    layers = " and ".join(f"{params['hidden']:,}" for _ in range(params["layers"]))
    return (
        f"Rows of {params['dim']} values, {params['context']} words before the next one, hidden layers of {layers} units, "
        f"{params['classes']:,} words to choose from; {params['epochs']} epochs of {params['windows']:,} windows, judged by "
        f"{params['held_out']:,} that were held out."
    )
