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
def _add(total: np.ndarray, slope: Any, row: np.ndarray) -> None:
    for d in range(len(total)):
        total[d] += slope * row[d]


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
    """Add to `totals` (n, dim) the product of `slopes` (n, k) and `rows` (k, dim)."""
    by_fours = len(rows) // 4 * 4
    for n in range(len(totals)):
        total = totals[n]
        for k in range(0, by_fours, 4):
            a, b, c, e = slopes[n, k], slopes[n, k + 1], slopes[n, k + 2], slopes[n, k + 3]
            row_a, row_b, row_c, row_e = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
            for d in range(len(total)):
                total[d] += a * row_a[d] + b * row_b[d] + c * row_c[d] + e * row_e[d]
        for k in range(by_fours, len(rows)):
            _add(total, slopes[n, k], rows[k])


@_compile
def _set(total: np.ndarray, slope: Any, row: np.ndarray) -> None:
    for d in range(len(total)):
        total[d] = slope * row[d]


@_compile
def _mean(vector: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> None:
    vector[:] = rows[chosen[0]]
    if len(chosen) > 1:
        for row in chosen[1:]:
            _add(vector, vector.dtype.type(1), rows[row])
        vector /= vector.dtype.type(len(chosen))


@_compile
def _window_means(
    means: np.ndarray,
    sums: np.ndarray,
    rows: np.ndarray,
    bag_rows: np.ndarray,
    starts: np.ndarray,
    windows: tuple[np.ndarray, np.ndarray],
    span: tuple[int, int],
    near: tuple[int, int],
) -> None:
    """Set `means` (words, dim) to the mean vector around each word of `span`: differences of `sums` over the words `near`."""
    (before, after), (start, stop), (low, high) = windows, span, near
    one = rows.dtype.type(1)
    sums[0] = 0
    for i in range(low, high):
        total, earlier = sums[i - low + 1], sums[i - low]
        if starts[i + 1] - starts[i] == 1:  # in one pass where words have one row
            row = rows[bag_rows[starts[i]]]
            for d in range(len(total)):
                total[d] = earlier[d] + row[d]
        else:
            _mean(total, rows, bag_rows[starts[i] : starts[i + 1]])
            _add(total, one, earlier)
    for i in range(start, stop):
        mean, share = means[i - start], one / max(before[i] + after[i], 1)
        first, mine, since, end = (
            sums[i - before[i] - low],
            sums[i - low],
            sums[i + 1 - low],
            sums[i + after[i] + 1 - low],
        )
        for d in range(len(mean)):
            mean[d] = ((mine[d] - first[d]) + (end[d] - since[d])) * share


@_compile
def _move_windows(
    rows: np.ndarray,
    changes: np.ndarray,
    moves: np.ndarray,
    bag_rows: np.ndarray,
    starts: np.ndarray,
    windows: tuple[np.ndarray, np.ndarray],
    span: tuple[int, int],
    near: tuple[int, int],
) -> None:
    """Add to the rows of the words `near` the move of each word of `span` that has them in its window.

    `changes` has where that begins and ends; the running sum over it is what each of the words `near` gets.
    """
    (before, after), (start, stop), (low, high) = windows, span, near
    one = rows.dtype.type(1)
    changes[: high - low + 1] = 0
    for i in range(start, stop):
        _add(changes[i - before[i] - low], one, moves[i - start])
        _add(changes[i + after[i] + 1 - low], -one, moves[i - start])
    for i in range(low, high):
        change = changes[i - low]
        _add(changes[i - low + 1], one, change)
        if start <= i < stop:
            _add(change, -one, moves[i - start])  # no word is in its own window
        for row in bag_rows[starts[i] : starts[i + 1]]:
            _add(rows[row], one, change)


@_compile
def _loss(score: Any) -> float:
    """Return softplus of -score."""
    return max(-score, 0.0) + math.log1p(math.exp(-abs(score)))


@_compile
def _meet_contexts(
    vectors: np.ndarray,
    moves: np.ndarray,
    slopes: np.ndarray,
    context_rows: np.ndarray,
    contexts: np.ndarray,
    windows: tuple[np.ndarray, np.ndarray],
    span: tuple[int, int],
    rate: Any,
    cbow: bool,
    with_loss: bool,
) -> float:
    """Set `moves` of the words of a span, and `slopes` (words, places in a window), by what they predict; return the loss."""
    (before, after), (start, stop) = windows, span
    one, reach, loss = vectors.dtype.type(1), slopes.shape[1] // 2, 0.0
    for i in range(start, stop):
        at, around, fresh = i - start, before[i] + after[i], True
        for near in range(i, i + 1 if around else i) if cbow else range(i - before[i], i + after[i] + 1):
            if near == i and not cbow:
                continue
            context = context_rows[contexts[near]]
            score = _score(vectors[at], context)
            slope = rate / (one + np.exp(score))
            slopes[at, near - i + reach] = slope
            if fresh:
                _set(moves[at], slope, context)
            else:
                _add(moves[at], slope, context)
            fresh = False
            if with_loss:
                loss += _loss(score)
        if fresh:
            moves[at] = 0
    return loss


@_compile
def _meet_noise(
    vectors: np.ndarray,
    moves: np.ndarray,
    slopes: np.ndarray,
    noise: np.ndarray,
    noise_moves: np.ndarray,
    weights: np.ndarray,
    rate: Any,
    with_loss: bool,
) -> float:
    """Add to `moves`, and set `noise_moves`, by the negatives `noise` (k, dim), with `weights` (words,); return the loss."""
    one, loss = vectors.dtype.type(1), 0.0
    _score_all(vectors, noise, slopes)
    for at in range(len(vectors)):
        weight = weights[at]
        for t in range(len(noise)):
            score = slopes[at, t]
            slopes[at, t] = -rate * weight / (one + np.exp(-score))
            if with_loss:
                loss += weight * _loss(-score)
    _add_all(moves, slopes, noise)
    noise_moves[:] = 0
    _add_all(noise_moves, slopes.T, vectors)
    return loss


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
    most_words: int,
    negative: int,
    rate: Any,
    cbow: bool,
    with_loss: bool,
) -> float:
    """Train both kinds of rows in place, `most_words` words at once, and return the loss.

    Arguments as `gradients.block_gradients`; `rate` of the dtype of the rows.
    """
    count, dim, dtype, loss = len(contexts), center_rows.shape[1], center_rows.dtype, 0.0
    reach, k, windows = max(before.max(), after.max()) if count else 0, draws.shape[1], (before, after)
    words = -(-most_words // 4) * 4  # scores go by fours: what fills them up has no weight
    vectors, moves = np.zeros((words, dim), dtype=dtype), np.zeros((words, dim), dtype=dtype)
    noise, noise_moves = np.empty((k, dim), dtype=dtype), np.empty((k, dim), dtype=dtype)
    slopes, noise_slopes = np.empty((words, 2 * reach + 1), dtype=dtype), np.empty((words, k), dtype=dtype)
    weights, sums = np.zeros(words, dtype=dtype), np.empty((most_words + 2 * reach + 1, dim), dtype=dtype)

    for number in range(len(draws)):
        start, stop = span = number * most_words, min((number + 1) * most_words, count)
        near = max(start - reach, 0), min(stop + reach, count)
        weights[:] = 0
        for i in range(start, stop):
            predictions = min(before[i] + after[i], 1) if cbow else before[i] + after[i]
            weights[i - start] = dtype.type(negative * predictions) / k
            if not cbow:
                _mean(vectors[i - start], center_rows, bag_rows[starts[i] : starts[i + 1]])
        if cbow:
            _window_means(vectors, sums, center_rows, bag_rows, starts, windows, span, near)
        for t in range(k):
            noise[t] = context_rows[draws[number, t]]
        loss += _meet_contexts(vectors, moves, slopes, context_rows, contexts, windows, span, rate, cbow, with_loss)
        loss += _meet_noise(vectors, moves, noise_slopes, noise, noise_moves, weights, rate, with_loss)

        # What is written from here on is read by the next span.
        for i in range(start, stop):
            for other in range(i - before[i], i + after[i] + 1):
                if not cbow and other != i:
                    _add(context_rows[contexts[other]], slopes[i - start, other - i + reach], vectors[i - start])
            if cbow and before[i] + after[i]:
                _add(context_rows[contexts[i]], slopes[i - start, reach], vectors[i - start])
        for t in range(k):
            _add(context_rows[draws[number, t]], dtype.type(1), noise_moves[t])
        if cbow:
            _move_windows(center_rows, sums, moves, bag_rows, starts, windows, span, near)
        else:
            for i in range(start, stop):
                for row in bag_rows[starts[i] : starts[i + 1]]:
                    _add(center_rows[row], dtype.type(1), moves[i - start])
    return loss


@_compile
def way(starts: np.ndarray, ends: np.ndarray, rate: Any) -> None:
    """Set `ends` (n, dim) to the way from them back to `starts`, divided by `rate`."""
    for n in range(len(ends)):
        start, end = starts[n], ends[n]
        for d in range(len(end)):
            end[d] = (start[d] - end[d]) / rate
