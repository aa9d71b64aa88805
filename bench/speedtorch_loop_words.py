"""The four ways of bench/speedtorch_loop.py, and what came of them in a line."""

from __future__ import annotations

from typing import Any

SPEEDTORCH, OURS, DENSE, SPARSE = WAYS = ("SpeedTorch's names", "drop-in", "dense", "SparseAdam")


def in_short(result: dict[str, Any]) -> str:
    """Return a line for the list of results."""
    return "step " + "; ".join(told(size) for size in result["measured"])


def told(size: dict[str, Any]) -> str:
    """Return a line about one vocabulary."""
    return f"{size['rows']:,} rows: " + ", ".join(f"{way} {milliseconds(size['ways'][way])}" for way in WAYS)


def milliseconds(found: dict[str, Any]) -> str:
    """Return how long a step of a way took."""
    return f"{1e3 * found['step_s']:.3g} ms"
