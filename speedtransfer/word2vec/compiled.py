"""Training within a block, compiled by numba: `gradients` uses it for rows on the host.

A pair costs a dot product and two additions of a row, all in the cache: the rows of a block are few beside the tables.
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
def _score(first: np.ndarray, second: np.ndarray) -> Any:
    total = first[0] * second[0]
    for d in range(1, len(first)):
        total += first[d] * second[d]
    return total


@_compile
def _score_all(vectors: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> None:
    """Set `scores` (n, k) to the products of `vectors` (n, dim) and `rows` (k, dim), n a multiple of 4."""
    for n in range(0, len(vectors), 4):
        a, b, c, e = vectors[n], vectors[n + 1], vectors[n + 2], vectors[n + 3]
        for k in range(len(rows)):
            row = rows[k]
            of_a, of_b, of_c, of_e = a[0] * row[0], b[0] * row[0], c[0] * row[0], e[0] * row[0]
            for d in range(1, len(row)):
                of_a += a[d] * row[d]
                of_b += b[d] * row[d]
                of_c += c[d] * row[d]
                of_e += e[d] * row[d]
            scores[n, k], scores[n + 1, k], scores[n + 2, k], scores[n + 3, k] = of_a, of_b, of_c, of_e


@_compile
def _add_all(totals: np.ndarray, slopes: np.ndarray, rows: np.ndarray) -> None:
    """Add to `totals` (n, dim) the product of `slopes` (n, k) and `rows` (k, dim), k a multiple of 4."""
    for n in range(len(totals)):
        total = totals[n]
        for k in range(0, len(rows), 4):
            a, b, c, e = slopes[n, k], slopes[n, k + 1], slopes[n, k + 2], slopes[n, k + 3]
            row_a, row_b, row_c, row_e = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
            for d in range(len(total)):
                total[d] += a * row_a[d] + b * row_b[d] + c * row_c[d] + e * row_e[d]


@_compile
def _add(total: np.ndarray, slope: Any, row: np.ndarray) -> None:
    for d in range(len(total)):
        total[d] += slope * row[d]


@_compile
def _mean(vector: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> None:
    vector[:] = rows[chosen[0]]
    if len(chosen) > 1:
        for row in chosen[1:]:
            _add(vector, vector.dtype.type(1), rows[row])
        vector /= vector.dtype.type(len(chosen))


@_compile
def train(
    center_rows: np.ndarray,
    context_rows: np.ndarray,
    bag_rows: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    draws: np.ndarray,
    span: int,
    negative: int,
    rate: Any,
    cbow: bool,
    with_loss: bool,
) -> float:
    """Train both kinds of rows in place and return the loss; arguments as `gradients.train_block`, `draws` (spans, k)."""
    count, dim, dtype, loss = len(contexts), center_rows.shape[1], center_rows.dtype, 0.0
    reach = max(before.max(), after.max()) if count else 0
    one, k = dtype.type(1), draws.shape[1]
    # Products go by fours: what fills them up is zero.
    words, drawn = -(-span // 4) * 4, -(-k // 4) * 4
    vectors, moves = np.zeros((words, dim), dtype=dtype), np.empty((words, dim), dtype=dtype)
    noise, noise_moves = np.zeros((drawn, dim), dtype=dtype), np.empty((drawn, dim), dtype=dtype)
    found = np.empty((span + 2 * reach, dim), dtype=dtype)  # vectors of the words from `low` on
    slopes, noise_slopes = np.empty((span, 2 * reach + 1), dtype=dtype), np.zeros((words, drawn), dtype=dtype)

    for number in range(len(draws)):
        start, stop = number * span, min((number + 1) * span, count)
        low, high = (max(start - reach, 0), min(stop + reach, count)) if cbow else (start, stop)
        for i in range(low, high):
            _mean(found[i - low], center_rows, bag_rows[starts[i] : starts[i + 1]])
        for i in range(start, stop):
            at, around = i - start, before[i] + after[i]
            vector, move = vectors[at], moves[at]
            move[:] = 0
            if cbow:
                vector[:] = 0
                for near in range(i - before[i], i + after[i] + 1):
                    if near != i:
                        _add(vector, one / around, found[near - low])
            else:
                vector[:] = found[i - low]
            for near in range(i, i + 1 if around else i) if cbow else range(i - before[i], i + after[i] + 1):
                if near == i and not cbow:
                    continue
                context = context_rows[contexts[near]]
                score = _score(vector, context)
                slope = rate / (one + np.exp(score))
                slopes[at, near - i + reach] = slope
                _add(move, slope, context)
                if with_loss:
                    loss += max(-score, 0.0) + math.log1p(math.exp(-abs(score)))
        for t in range(k):
            noise[t] = context_rows[draws[number, t]]
        _score_all(vectors, noise, noise_slopes)
        for at in range(words):
            around = before[start + at] + after[start + at] if at < stop - start else 0
            weight = dtype.type(negative * (min(around, 1) if cbow else around)) / k
            for t in range(k):
                score = noise_slopes[at, t]
                noise_slopes[at, t] = -rate * weight / (one + np.exp(-score))
                if with_loss:
                    loss += weight * (max(score, 0.0) + math.log1p(math.exp(-abs(score))))
        _add_all(moves, noise_slopes, noise)
        noise_moves[:] = 0
        _add_all(noise_moves, noise_slopes.T, vectors)

        # What is written from here on is read by the next span.
        for i in range(start, stop):
            at, around = i - start, before[i] + after[i]
            for near in range(i, i + 1 if around else i) if cbow else range(i - before[i], i + after[i] + 1):
                if near != i or cbow:
                    _add(context_rows[contexts[near]], slopes[at, near - i + reach], vectors[at])
        for t in range(k):
            _add(context_rows[draws[number, t]], one, noise_moves[t])
        for i in range(start, stop):
            for near in range(i - before[i], i + after[i] + 1) if cbow else range(i, i + 1):
                if near != i or not cbow:
                    for row in bag_rows[starts[near] : starts[near + 1]]:
                        _add(center_rows[row], one, moves[i - start])
    return loss
