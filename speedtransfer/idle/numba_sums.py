"""Compile with numba a step of `quadrature`, and the catch-up of Adam and its relatives in one pass over the rows.

The same operations in the same order as `missed` has them in torch, so the same bits; torch needs a dozen passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from speedtransfer.idle.quadrature import BLOCK, FLUSHED, NODES, SMALLEST_DECAY, SMALLEST_SLOPE, STEP, SUMS
from speedtransfer.jit import compile_function


@njit(inline="always")
def _multiply(line: Any, step: Any, products: int) -> None:
    a, b, c, d = step[1], step[2], step[3], step[4]
    if not (a == 1 and b == 0 and c == 0 and d == 1):
        for column in range(1, 3):
            weight, partner = line[column], line[column + 2]
            line[column], line[column + 2] = a * weight + b * partner, c * weight + d * partner
    line[0] *= step[0]
    for column in range(5, products):
        line[column] *= step[column]
    for column in range(products):
        if abs(line[column]) < FLUSHED:
            line[column] = 0.0


@njit(inline="always")
def _add_point(line: Any, weight: float, point: float) -> None:
    """Add a mass to the fraction of a line, which begins with linear, mass, centers and spreads."""
    count = int(line[SUMS + 5])
    if count < NODES:
        line[2 + count] = point
        line[SUMS + 5] = count + 1
    gamma, sigma, t, rest = 1.0, 0.0, 0.0, weight
    for node in range(min(count + 1, NODES)):
        spread = 1 if node == 0 else 1 + NODES + node
        there, center = line[spread], line[2 + node]
        total = there + rest
        last_sigma, beta = sigma, gamma * total
        gamma, sigma = 1.0, 0.0
        if total > 0:
            gamma, sigma = there / total, rest / total
        turned = sigma * (center - point) - gamma * t
        line[2 + node] = center - (turned - t)
        rest = turned * turned / sigma if sigma > 0 else last_sigma * there
        t = turned
        line[spread] = beta


@njit(inline="always")
def _add_term(line: Any, step: Any, limits: Any, floor: bool) -> None:
    """Add a step to the sums of a line."""
    scale, root, eps, numerator, root_factor, decay_factor = step[0], step[1], step[2], step[3], step[4], step[5]
    line[SUMS] *= decay_factor
    line[SUMS + 1] *= numerator
    line[SUMS + 2] *= root_factor
    decay = line[SUMS]
    weight, slope = scale * line[SUMS + 1] / decay, root * line[SUMS + 2]
    divides, counts = slope > SMALLEST_SLOPE, weight != 0
    if decay < SMALLEST_DECAY or (divides and counts and weight / slope < 0):
        line[SUMS + 5] = -1
    if counts and not divides:
        line[0] += weight / eps
    if counts and divides and line[SUMS + 5] >= 0:
        mass, point = weight / slope, eps / slope
        line[SUMS + 3], line[SUMS + 4] = min(line[SUMS + 3], point), max(line[SUMS + 4], point)
        if floor:
            line[1] += mass
        else:
            _add_point(line, mass, point)
    if floor:
        line[SUMS - 1] = line[SUMS + 4]
    else:
        least = line[SUMS + 3] if line[SUMS + 5] > 0 else 0.0
        line[SUMS - 1] = max((line[SUMS + 4] - limits[0] * least) / (limits[0] - 1), 0.0)
    good = line[SUMS + 5] >= 0
    for column in range(SUMS - 1):
        good &= abs(line[column]) <= limits[1]
    if not good:
        line[SUMS - 1] = np.inf


@compile_function
def take_step(lines: Any, blocks: Any, newest: int, final: int, step: Any, limits: Any, floor: bool) -> None:
    """As `sums.take_step`."""
    products, columns = blocks.shape[1], lines.shape[1]
    for number in range(newest - newest % BLOCK, newest + 1):
        _multiply(lines[number], step, products)
    for number in range(newest // BLOCK):
        _multiply(blocks[number], step, products)
    if columns > products:
        term = step[products:]
        lines[newest, columns - STEP :] = term
        for number in range(final, newest + 1):
            _add_term(lines[number, products:], term, limits, floor)


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
        `History.arrays`.
    last : array
        ``(n, 1)`` int32: the step that touched each row last. Its line is that less `base`; `newest` has missed nothing.
    horizon : int
        `History.horizon`.
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
