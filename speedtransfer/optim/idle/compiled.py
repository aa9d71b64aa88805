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


@njit(inline="always")
def _step_by_step(
    weight: Any, m: Any, x: Any, steps: Any, line: int, newest: int, horizon: int, floor: bool, decay: float, work: Any
) -> None:
    """Take the steps that one row has missed, in double precision; `decay` is for those beyond the horizon."""
    for i in range(len(weight)):
        work[0, i], work[1, i] = weight[i], m[i]
        work[2, i] = x[i] if floor else np.sqrt(np.float64(x[i]))
    for step in range(line, min(newest, line + horizon)):
        scale, root, eps = steps[step, 0], steps[step, 1], steps[step, 2]
        for i in range(len(weight)):
            work[1, i] *= steps[step, 3]
            work[2, i] *= steps[step, 4]
            size = work[2, i]
            divisor = (size if size > eps else eps) if floor else root * size + eps
            term = 0.0 if work[1, i] == 0 else work[1, i] / divisor
            work[0, i] = work[0, i] * steps[step, 5] - scale * term
    for i in range(len(weight)):
        weight[i] = np.float32(work[0, i] * decay)


@njit(inline="always")
def _take_sums(weight: Any, m: Any, x: Any, sums: Any, tail: float, decay: float, floor: bool) -> None:
    linear, mass = np.float32(sums[0] * tail), np.float32(sums[1] * tail)
    center_0, center_1, center_2 = np.float32(sums[2]), np.float32(sums[3]), np.float32(sums[4])
    spread_0, spread_1 = np.float32(sums[5]), np.float32(sums[6])
    least = max(np.float32(sums[7]), np.float32(1e-30))
    kept = np.float32(decay)
    for i in range(len(weight)):
        size = x[i] if floor else np.sqrt(x[i])
        size = size if size > least else least
        value = (size + center_1) - spread_1 / (size + center_2)
        value = mass / ((size + center_0) - spread_0 / value)
        weight[i] = weight[i] * kept - (value + linear) * m[i]


@compile_function
def take_terms(
    weight: Any,
    m: Any,
    v: Any,
    x: Any,
    products: Any,
    sums: Any,
    made_at: Any,
    steps: Any,
    index: Any,
    newest: int,
    horizon: int,
    floor: bool,
    eps: float,
    start: int,
    stop: int,
) -> None:
    """Bring the rows `start` to `stop` up to date.

    Parameters
    ----------
    weight, m, v, x : array
        ``(n, dim)`` float32: weights, numerator, the second plane of `Rule.factors`, denominator (maybe `v` itself).
    products, sums, made_at, steps : array
        `History.arrays`.
    index : array
        ``(n,)`` int64: the line of each row; `newest` has missed nothing.
    horizon : int
        `History.horizon`.
    floor : bool
        As `Rule.floor`; `eps` is then the least that `v` holds.
    """
    lowest = np.float32(eps)
    work = np.empty((3, weight.shape[1]))
    for j in range(start, stop):
        line = index[j]
        if line == newest:
            continue
        valid_from = np.float32(sums[line, 7])
        if valid_from > 0 and _is_hard(m[j], x[j], valid_from, floor):
            later = products[min(line + horizon, newest), 0]
            _step_by_step(weight[j], m[j], x[j], steps, line, newest, horizon, floor, later, work)
        else:
            tail = products[made_at[line], 0]
            _take_sums(weight[j], m[j], x[j], sums[line], tail, products[line, 0], floor)
        first, second = np.float32(products[line, 5]), np.float32(products[line, 6])
        m_row, v_row = m[j], v[j]
        for i in range(len(m_row)):
            m_row[i] *= first
        for i in range(len(v_row)):
            scaled = v_row[i] * second
            v_row[i] = lowest if floor and scaled < lowest else scaled
