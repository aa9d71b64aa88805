r"""Add a step to the lines of `Sums`, in NumPy; `numba_sums.take_step` does the same, faster.

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
BLOCK = 256  # lines whose products are made together, see `History`

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
    products = blocks.shape[1]
    begin = newest - newest % BLOCK
    _multiply(lines[begin : newest + 1, :products], step)
    _multiply(blocks[: newest // BLOCK], step)
    if lines.shape[1] > products:
        lines[newest, -STEP:] = step[products:]
        with np.errstate(all="ignore"):
            _add_terms(lines[final : newest + 1, products:-STEP], step[products:], limits, floor)


def _multiply(products: Floats, step: Floats) -> None:
    a, b, c, d = step[1:5]
    if (a, b, c, d) != (1.0, 0.0, 0.0, 1.0):
        weights, partners = products[:, 1:3].copy(), products[:, 3:5].copy()  # rows of each 2 x 2 product
        products[:, 1:3] = a * weights + b * partners
        products[:, 3:5] = c * weights + d * partners
    products[:, 0] *= step[0]
    products[:, 5:] *= step[5 : products.shape[1]]
    products[np.abs(products) < FLUSHED] = 0


def _add_terms(lines: Floats, step: Floats, limits: Floats, floor: bool) -> None:
    scale, root, eps, numerator, root_factor, decay_factor = step
    linear, mass, *fraction, valid_from, decay, b, r, least, most, nodes = lines.T
    decay *= decay_factor
    b *= numerator
    r *= root_factor
    weight, slope = scale * b / decay, root * r
    divides = slope > SMALLEST_SLOPE  # else x does not count, and the term is m / eps
    counts = weight != 0
    # No measure where decay of more than all turns signs around.
    nodes[(decay < SMALLEST_DECAY) | (divides & counts & (weight / slope < 0))] = -1
    linear += np.where(counts & ~divides, weight / eps, 0.0)
    some = np.flatnonzero(counts & divides & (nodes >= 0))
    w, e = weight[some] / slope[some], eps / slope[some]
    least[some], most[some] = np.minimum(least[some], e), np.maximum(most[some], e)
    if floor:
        mass[some] += w
        valid_from[:] = most
    else:
        _add_point(mass, fraction, nodes, some, w, e)
        ratio = limits[0]
        valid_from[:] = np.maximum((most - ratio * np.where(nodes > 0, least, 0.0)) / (ratio - 1), 0.0)
    largest = np.abs(lines[:, : SUMS - 1]).max(axis=1, initial=0.0)
    valid_from[(nodes < 0) | ~(largest <= limits[1])] = np.inf  # beyond the numbers that rows have: step by step


def _add_point(
    mass: Floats, fraction: list[Floats], nodes: Floats, some: np.ndarray[Any, Any], w: Floats, e: Floats
) -> None:
    """Add the mass `w` at the point `e` to the lines `some`."""
    count = nodes[some].astype(np.int64)
    nodes[some] = np.minimum(count + 1, NODES)
    gamma, sigma, t, rest = np.ones_like(w), np.zeros_like(w), np.zeros_like(w), w
    for node in range(NODES):
        # A line takes part up to its first free node.
        inside = count >= node
        spread = mass if node == 0 else fraction[NODES + node - 1]
        there, center = spread[some], np.where(count == node, e, fraction[node][some])
        total = there + rest
        positive = total > 0
        last_sigma, beta = sigma, gamma * total
        gamma = np.where(positive, there / total, 1.0)
        sigma = np.where(positive, rest / total, 0.0)
        turned = sigma * (center - e) - gamma * t
        moved = center - (turned - t)
        rest = np.where(sigma > 0, turned * turned / sigma, last_sigma * there)
        t = turned
        fraction[node][some] = np.where(inside, moved, fraction[node][some])
        spread[some] = np.where(inside, beta, there)
