"""The positive pairs of a block, compiled by numba (extra ``fast``): `gradients` uses it for rows on the host.

A pair costs a dot product and two additions of a row, all in the cache, where matrix products over a band of scores also
compute the scores outside of the windows. No two threads write one row: the first pass goes by rows of centers, the second
by rows of contexts, and each sums over the positions of its row, in the order of the text. So results do not depend on threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit


def _compile(function: Any) -> Any:
    """Compile when first called, without the GIL; kept on disk where numba finds a folder for it."""
    try:
        return njit(nogil=True, cache=True, fastmath=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, fastmath=True, error_model="numpy")(function)


@_compile
def group_by_row(places: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of `places` (n,) sorted by what they hold, and where each of `num_rows` rows begins among them."""
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    for place in places:
        starts[place + 1] += 1
    for row in range(num_rows):
        starts[row + 1] += starts[row]
    order, free = np.empty(len(places), dtype=np.int64), starts[:-1].copy()
    for position, place in enumerate(places):
        order[free[place]] = position
        free[place] += 1
    return order, starts


@_compile
def center_pass(
    center_rows: np.ndarray,
    context_rows: np.ndarray,
    contexts: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
    slopes: np.ndarray,
    grad: np.ndarray,
    losses: np.ndarray,
    with_loss: bool,
    start: int,
    stop: int,
) -> None:
    """Set `slopes` (n, 2 * window + 1), ``sigmoid(score) - 1`` of each pair, and `grad` (u, dim) of the centers.

    Does the rows whose first position in `order` is from `start` to below `stop`.
    """
    reach, dim = slopes.shape[1] // 2, center_rows.shape[1]
    for row in range(np.searchsorted(starts[:-1], start), len(starts) - 1):
        if starts[row] >= stop:
            break
        center, total = center_rows[row], grad[row]
        total[:] = 0.0
        for position in order[starts[row] : starts[row + 1]]:
            loss = 0.0
            for near in range(position - before[position], position + after[position] + 1):
                if near == position:
                    continue
                context = context_rows[contexts[near]]
                score = np.float32(0.0)
                for d in range(dim):
                    score += center[d] * context[d]
                slope = np.float32(-1.0) / (np.float32(1.0) + np.exp(score))
                slopes[position, near - position + reach] = slope
                for d in range(dim):
                    total[d] += slope * context[d]
                if with_loss:
                    loss += max(-score, 0.0) + math.log1p(math.exp(-abs(score)))
            losses[position] = loss


@_compile
def context_pass(
    center_rows: np.ndarray,
    centers: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
    slopes: np.ndarray,
    grad: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """Add to `grad` (v, dim) of the contexts what the pairs of `slopes` give; rows as in `center_pass`."""
    reach, dim, count = slopes.shape[1] // 2, center_rows.shape[1], len(centers)
    for row in range(np.searchsorted(starts[:-1], start), len(starts) - 1):
        if starts[row] >= stop:
            break
        total = grad[row]
        for position in order[starts[row] : starts[row + 1]]:
            for other in range(max(position - reach, 0), min(position + reach + 1, count)):
                gap = position - other
                if gap == 0 or gap > after[other] or -gap > before[other]:
                    continue
                slope, center = slopes[other, gap + reach], center_rows[centers[other]]
                for d in range(dim):
                    total[d] += slope * center[d]
