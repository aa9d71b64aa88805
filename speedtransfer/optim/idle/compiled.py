"""The catch-up of Adam and its relatives in one pass over the rows, compiled by numba (extra ``fast``).

The same operations in the same order as `catch_up` has them in torch, so the same bits; torch needs a dozen passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from speedtransfer.engines.compiled import compile_function


@njit(inline="always")
def _is_hard(m: Any, x: Any, valid_from: Any, floor: bool) -> bool:
    hard = False
    for i in range(len(x)):
        size = x[i] if floor else np.sqrt(x[i])
        hard |= size < valid_from and m[i] != 0
    return hard


@compile_function
def take_terms(
    weight: Any,
    m: Any,
    v: Any,
    x: Any,
    products: Any,
    sums: Any,
    made_at: Any,
    index: Any,
    newest: int,
    floor: bool,
    eps: float,
    hard: Any,
    start: int,
    stop: int,
) -> None:
    """Bring the rows `start` to `stop` up to date, and flag in `hard` (n,) those left as they are.

    Parameters
    ----------
    weight, m, v, x : array
        ``(n, dim)`` float32: weights, numerator, the second plane of `Rule.factors`, denominator (maybe `v` itself).
    products, sums, made_at : array
        The lines of `History`.
    index : array
        ``(n,)`` int64: the line of each row; `newest` has missed nothing.
    floor : bool
        As `Rule.floor`; `eps` is then the least that `v` holds.
    """
    tiny, lowest = np.float32(1e-30), np.float32(eps)
    for j in range(start, stop):
        line = index[j]
        if line == newest:
            continue
        tail = products[made_at[line], 0]
        decay, first, second = (
            np.float32(products[line, 0]),
            np.float32(products[line, 5]),
            np.float32(products[line, 6]),
        )
        linear, mass = np.float32(sums[line, 0] * tail), np.float32(sums[line, 1] * tail)
        center_0, center_1, center_2 = np.float32(sums[line, 2]), np.float32(sums[line, 3]), np.float32(sums[line, 4])
        spread_0, spread_1 = np.float32(sums[line, 5]), np.float32(sums[line, 6])
        valid_from = np.float32(sums[line, 7])
        p_row, m_row, v_row, x_row = weight[j], m[j], v[j], x[j]
        if valid_from > 0 and _is_hard(m_row, x_row, valid_from, floor):
            hard[j] = True
            continue
        least = max(valid_from, tiny)
        for i in range(len(p_row)):
            size = x_row[i] if floor else np.sqrt(x_row[i])
            size = size if size > least else least
            value = (size + center_1) - spread_1 / (size + center_2)
            value = mass / ((size + center_0) - spread_0 / value)
            p_row[i] = p_row[i] * decay - (value + linear) * m_row[i]
            m_row[i] = m_row[i] * first
        for i in range(len(v_row)):
            scaled = v_row[i] * second
            v_row[i] = lowest if floor and scaled < lowest else scaled
