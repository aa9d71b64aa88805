"""Passes over the ids and rows of a batch: which ids are unknown, and which rows were used. Compiled by numba."""

from __future__ import annotations

import numpy as np

from speedtransfer.errors import RowIndexError
from speedtransfer.jit import compiled_module
from speedtransfer.vocabulary.id_index import table_for
from speedtransfer.vocabulary.mixing import checked

_COMPILED = "speedtransfer.vocabulary.numba_index"


def first_unknown(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the ids that have no row.

    Parameters
    ----------
    ids : (n,) int64 array
    rows : (n,) int64 array
        Their rows, -1 for an unknown id.

    Returns
    -------
    unknown : (u,) int64 array
        The distinct unknown ids in order of first appearance.
    counts : (u,) int64 array
        How often each occurs.
    positions : (p,) int64 array
        Where an unknown id stands in `ids`, ascending.
    numbers : (p,) int64 array
        Which of `unknown` stands there.
    """
    ids, rows = checked(ids, "ids"), checked(rows, "rows")
    positions = np.flatnonzero(rows == -1)
    if not len(positions):
        return tuple(np.empty(0, np.int64) for _ in range(4))  # type: ignore[return-value]
    unknown, counts, numbers = (np.empty(len(positions), np.int64) for _ in range(3))
    number = compiled_module(_COMPILED).number
    found = number(*table_for(len(positions)), ids[positions], unknown, counts, numbers)
    return unknown[:found].copy(), counts[:found].copy(), positions, numbers


def touch(
    rows: np.ndarray, now: int, last_use: np.ndarray, counts: np.ndarray | None = None, decay: float = 1.0
) -> None:
    """Note that rows were used.

    Parameters
    ----------
    rows : (n,) int64 array
        Negative ones are passed over.
    now : int
        The time.
    last_use : (R,) int64 array
        When each row was used last; set to `now`.
    counts : (R,) float32 array, optional
        How often each row was used: multiplied by ``decay ** (now - last use)``, then one is added for each time that the row
        stands in `rows`.
    decay : float
        From 0 to 1.

    Raises
    ------
    RowIndexError
        A row is beyond the last; nothing is changed.
    """
    rows = checked(rows, "rows")
    if len(rows) and rows.max() >= len(last_use):
        at = int(rows.argmax())
        raise RowIndexError(f"rows[{at}] is {rows[at]} but there are {len(last_use)} rows; pass rows of the table")
    compiled = compiled_module(_COMPILED)
    if counts is None:
        compiled.touch(rows, now, last_use)
    else:
        compiled.touch_and_count(rows, now, last_use, counts, float(decay))


def powers(base: float, exponents: np.ndarray) -> np.ndarray:
    """Return powers by squaring, as the compiled pass does: those of the C library differ between machines."""
    powers, left = np.ones(len(exponents)), np.maximum(exponents, 0)
    while left.any():
        powers = np.where(left & 1, powers * base, powers)
        base *= base
        left = left >> 1
    return powers
