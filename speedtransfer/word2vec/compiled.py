"""The positive pairs of a block, compiled by numba: `gradients` uses it for rows on the host.

A pair costs a dot product and two additions of a row, all in the cache, where matrix products over a band of scores also
compute the scores outside of the windows. Each gradient row is summed up in one go, over the positions of its word in the
order of the text: two passes, by centers and by contexts, with the slopes of the first kept for the second.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

# Sums in any order, which is what lets them run in vectors; infinities and NaN stay what they are.
_MATH = {"reassoc", "contract", "arcp", "nsz"}


def _compile(function: Any) -> Any:
    """Compile when first called, without the GIL; kept on disk where numba finds a folder for it."""
    try:
        return njit(nogil=True, cache=True, fastmath=_MATH, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, fastmath=_MATH, error_model="numpy")(function)


@_compile
def _group_by_row(places: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
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
def pairs(
    center_rows: np.ndarray,
    context_rows: np.ndarray,
    centers: np.ndarray,
    contexts: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    center_grad: np.ndarray,
    context_grad: np.ndarray,
    with_loss: bool,
) -> float:
    """Set `center_grad` (u, dim) and `context_grad` (v, dim), return the loss; arguments as `skipgram_gradients`."""
    count, dim, loss = len(centers), center_rows.shape[1], 0.0
    reach = max(before.max(), after.max()) if count else 0
    slopes = np.empty((count, 2 * reach + 1), dtype=center_rows.dtype)
    order, starts = _group_by_row(centers, len(center_rows))
    for row in range(len(center_rows)):
        center, total = center_rows[row], center_grad[row]
        total[:] = 0
        for position in order[starts[row] : starts[row + 1]]:
            for near in range(position - before[position], position + after[position] + 1):
                if near == position:
                    continue
                context = context_rows[contexts[near]]
                score = center[0] * context[0]
                for d in range(1, dim):
                    score += center[d] * context[d]
                slope = -1 / (1 + np.exp(score))
                slopes[position, near - position + reach] = slope
                for d in range(dim):
                    total[d] += slopes[position, near - position + reach] * context[d]
                if with_loss:
                    loss += max(-score, 0.0) + math.log1p(math.exp(-abs(score)))

    order, starts = _group_by_row(contexts, len(context_rows))
    for row in range(len(context_rows)):
        total = context_grad[row]
        total[:] = 0
        for position in order[starts[row] : starts[row + 1]]:
            for other in range(max(position - reach, 0), min(position + reach + 1, count)):
                gap = position - other
                if gap == 0 or gap > after[other] or -gap > before[other]:
                    continue
                slope, center = slopes[other, gap + reach], center_rows[centers[other]]
                for d in range(dim):
                    total[d] += slope * center[d]
    return loss
