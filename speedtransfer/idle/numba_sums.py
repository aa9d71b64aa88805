"""Compile with numba the steps of `quadrature`, and the catch-up of Adam and its relatives in one pass over the rows.

The latter has the same operations in the same order as `missed` in torch, so the same bits; torch needs a dozen passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from speedtransfer.idle import quadrature
from speedtransfer.idle.quadrature import BLOCK, STEP, SUMS
from speedtransfer.jit import compile_function

# `take_step` finds them by the names that they have there.
for _function in (quadrature.multiply, quadrature.add_point, quadrature.add_term):
    register_jitable(inline="always", error_model="numpy")(_function)
take_step = compile_function(quadrature.take_step)


@njit(inline="always")
def _is_hard(m: Any, size: Any, valid_from: Any) -> bool:
    hard = False
    for i in range(len(m)):
        hard |= size[i] < valid_from and m[i] != 0
    return hard


@njit(inline="always")
def _step_by_step(
    weight: Any, m: Any, x: Any, lines: Any, line: int, newest: int, horizon: int, floor: bool, decay: float, work: Any
) -> None:
    """Take the steps that one row has missed, in double precision; `decay` is for those beyond the horizon."""
    for i in range(len(weight)):
        work[0, i], work[1, i] = weight[i], m[i]
        work[2, i] = x[i] if floor else np.sqrt(np.float64(x[i]))
    for number in range(line, min(newest, line + horizon)):
        step = lines[number, lines.shape[1] - STEP :]
        scale, root, eps = step[0], step[1], step[2]
        for i in range(len(weight)):
            work[1, i] *= step[3]
            work[2, i] *= step[4]
            size = work[2, i]
            divisor = (size if size > eps else eps) if floor else root * size + eps
            term = 0.0 if work[1, i] == 0 else work[1, i] / divisor
            work[0, i] = work[0, i] * step[5] - scale * term
    for i in range(len(weight)):
        weight[i] = np.float32(work[0, i] * decay)


@njit(inline="always")
def _take_sums(
    weight: Any, m: Any, v: Any, size: Any, sums: Any, decay: float, first: Any, second: Any, lowest: Any
) -> None:
    linear, mass = np.float32(sums[0] * decay), np.float32(sums[1] * decay)
    center_0, center_1, center_2 = np.float32(sums[2]), np.float32(sums[3]), np.float32(sums[4])
    spread_0, spread_1 = np.float32(sums[5]), np.float32(sums[6])
    least = max(np.float32(sums[7]), np.float32(1e-30))
    kept = np.float32(decay)
    for i in range(len(weight)):
        x = size[i] if size[i] > least else least
        value = (x + center_1) - spread_1 / (x + center_2)
        value = mass / ((x + center_0) - spread_0 / value)
        weight[i] = weight[i] * kept - (value + linear) * m[i]
        m[i] *= first
        scaled = v[i] * second
        v[i] = lowest if scaled < lowest else scaled


@compile_function
def take_terms(
    weight: Any,
    m: Any,
    v: Any,
    x: Any,
    lines: Any,
    blocks: Any,
    last: Any,
    base: int,
    newest: int,
    horizon: int,
    floor: bool,
    eps: float,
    start: int,
    stop: int,
) -> None:
    """Catch up the rows `start` to `stop`.

    Parameters
    ----------
    weight, m, v, x : array
        ``(n, dim)`` float32: weights, numerator, the second plane of `Rule.factors`, denominator (maybe `v` itself).
    lines, blocks : array
        `Sums.table` and `Sums.blocks`.
    last : array
        ``(n, 1)`` int32: the step that touched each row last. Its line is that less `base`; `newest` has missed nothing.
    horizon : int
        `Sums.horizon`.
    floor : bool
        As `Rule.floor`; `eps` is then the least that `v` holds.
    """
    lowest = np.float32(eps if floor else -np.inf)
    products, dim = blocks.shape[1], weight.shape[1]
    size, work = np.empty(dim, np.float32), np.empty((3, dim))
    for j in range(start, stop):
        line = int(last[j, 0]) - base
        if line == newest:
            continue
        later, sums = blocks[line // BLOCK], lines[line, products:]
        decay = lines[line, 0] * later[0]
        valid_from = np.float32(sums[SUMS - 1])
        for i in range(dim):
            size[i] = x[j, i] if floor else np.sqrt(x[j, i])
        first, second = np.float32(lines[line, 5] * later[5]), np.float32(lines[line, 6] * later[6])
        hard = valid_from > 0 and _is_hard(m[j], size, valid_from)
        if valid_from < np.inf and not hard:
            _take_sums(weight[j], m[j], v[j], size, sums, decay, first, second, lowest)
            continue
        if hard:
            beyond = min(line + horizon, newest)
            left = lines[beyond, 0] * blocks[beyond // BLOCK, 0]
            _step_by_step(weight[j], m[j], x[j], lines, line, newest, horizon, floor, left, work)
        else:  # no sums, and nothing to sum: every m is zero
            for i in range(dim):
                weight[j, i] *= np.float32(decay)
        for i in range(dim):
            m[j, i] *= first
            scaled = v[j, i] * second
            v[j, i] = lowest if scaled < lowest else scaled
