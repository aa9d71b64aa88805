"""How far the contenders are apart that should give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# What is held against what, and what should be the case.
PAIRS = (
    ("exact", "dense", "the same to rounding"),
    ("lazy-prefetch", "lazy", "the same bits"),
    ("exact-prefetch", "exact", "the same bits"),
    ("lazy", "dense", "different: idle rows stay put"),
    ("sparse", "dense", "different: idle rows stay put"),
)
_CHUNK = 1 << 22


def compare(found: dict[str, dict[str, Any]], tables: dict[str, Path], dtype: str) -> list[dict[str, Any]]:
    """Return, for each pair that is there, the largest difference of a loss and of a number of the table.

    Parameters
    ----------
    found : dict of str to dict
        Results by contender.
    tables : dict of str to Path
        Files of the tables after training.
    dtype : str
        Of the numbers in them.
    """
    made = []
    for name, other, wanted in PAIRS:
        if not all(found.get(one, {}).get("complete") for one in (name, other)):
            continue
        losses = np.array([found[one]["losses"] for one in (name, other)])
        made.append(
            {
                "contender": name,
                "to": other,
                "wanted": wanted,
                "losses_equal": bool((losses[0] == losses[1]).all()),
                "loss_difference": float(np.abs(losses[0] - losses[1]).max()),
                "table_equal": found[name]["table_sha256"] == found[other]["table_sha256"],
                "table_difference": _difference(tables[name], tables[other], dtype),
            }
        )
    return made


def _difference(path: Path, other: Path, dtype: str) -> float:
    """Return the largest difference of two tables, over the largest number in the second."""
    a, b = (np.memmap(each, dtype=dtype, mode="r") for each in (path, other))
    parts = [slice(start, start + _CHUNK) for start in range(0, len(a), _CHUNK)]
    return float(max(np.abs(a[part] - b[part]).max() for part in parts) / max(np.abs(b[part]).max() for part in parts))
