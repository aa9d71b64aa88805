r"""Add a step to the lines of `Sums`; `numba_sums` compiles it.

A line stands for a step that rows may have been touched last at. Its columns, after those of the products:

====================== =============================================================================================
linear, mass           of the fraction below, as they would be without the decay of the weights
centers, spreads       of the continued fraction ``mass / (x + c0 - s0 / (x + c1 - s1 / (x + c2)))``
valid from             the smallest x for which that is good
decay, B, R            products of the steps since, of the weights, the numerator and the root
least, most            points of the measure so far
nodes                  that the fraction has so far; -1: there is no such fraction
====================== =============================================================================================

The sum of a line is that of its terms :math:`w_u / (x + e_u)`. A further one is a further mass w at the point e, and the three
nodes of Gauss and that point, reduced to three nodes again, are the nodes of Gauss for all the points: either agree with the
moments 0 to 5. So a step costs a line a few rotations of its Jacobi matrix (W. Gragg and W. Harwood, Numer. Math. 44, 1984).
"""

from __future__ import annotations

from typing import Any

import numpy as np

NODES = 3
SUMS = 2 * NODES + 2  # linear, mass, centers, spreads, valid from
OWN = 6  # decay, B, R, least, most, nodes
STEP = 6  # scale, root, eps, factors of numerator and root, decay
BLOCK = 256  # lines whose products are made together, see `Sums`

SMALLEST_SLOPE = 1e-150
SMALLEST_DECAY = 1e-100
FLUSHED = 1e-150  # products are set to zero before they become subnormal, which is slow

Floats = np.ndarray[Any, np.dtype[np.float64]]


def identity(products: int, sums: bool) -> Floats:
    """Return the line of rows that have missed nothing, with `products` columns before the others."""
    line = np.ones(products)
    line[2:4] = 0
    own = [1.0, 1.0, 1.0, np.inf, 0.0, 0.0]
    return np.concatenate([line, np.zeros(SUMS), own, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]) if sums else line


def take_step(
    lines: Floats, blocks: Floats, newest: int, final: int, step: Floats, limits: Floats, floor: bool
) -> None:
    """Let the lines take one more step.

    Parameters
    ----------
    lines : array
        ``(capacity + 1, columns)``, those after `newest` as `identity` has them.
    blocks : array
        ``(n, products)``: of the steps after each block of lines.
    newest : int
        The line of rows that have missed this step alone.
    final : int
        Lines before this one keep their sums.
    step : array
        decay, four of mix, one factor for each plane; then, where there are sums, what `STEP` lists.
    limits : array
        Ratio of the largest x + e to the smallest that three nodes are good for, largest coefficient.
    floor : bool
        As `Rule.floor`.
    """
    products, columns = blocks.shape[1], lines.shape[1]
    for number in range(newest - newest % BLOCK, newest + 1):
        multiply(lines[number], step, products)
    for number in range(newest // BLOCK):
        multiply(blocks[number], step, products)
    if columns > products:
        term = step[products:]
        # No slice is assigned: for its error message numba would compile text functions, half of the time that all takes.
        for column in range(STEP):
            lines[newest, columns - STEP + column] = term[column]
        for number in range(final, newest + 1):
            add_term(lines[number, products:], term, limits, floor)


def multiply(line: Floats, step: Floats, products: int) -> None:
    """Multiply the products of a line by those of a step."""
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


def add_point(line: Floats, weight: float, point: float) -> None:
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


def add_term(line: Floats, step: Floats, limits: Floats, floor: bool) -> None:
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
            add_point(line, mass, point)
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
