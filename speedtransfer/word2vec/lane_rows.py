"""Sums and products of rows by vectors (`lanes`), compiled by numba. Rows are as wide as some of those together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from speedtransfer.jit import compile_function
from speedtransfer.word2vec.lanes import (
    WIDTH,
    add,
    bits_of,
    clip,
    divide,
    fill,
    fill_like,
    load,
    mul_add,
    negative,
    power_of_two,
    rint,
    store,
    total,
)

# Sums in any order, which is what lets them run in vectors; infinities and NaN stay what they are.
_MATH = {"reassoc", "contract", "arcp", "nsz"}
_FOUR = 4 * WIDTH
_TAYLOR = tuple(1 / math.factorial(k) for k in range(14))  # of exp


def compile_loops(function: Any, inline: bool = False) -> Any:
    """Compile when first called, as `compile_function` does."""
    return compile_function(function, fastmath=_MATH, forceinline=inline)


def compile_inlined(function: Any) -> Any:
    """Compile as a part of whatever calls it: to pass an array costs more than to add some rows."""
    return compile_loops(function, inline=True)


@compile_loops
def zero_rows(count: int, columns: int, dtype: Any) -> np.ndarray:
    """Return zeros of shape (count, columns rounded up to whole vectors); each row begins where a line of the cache does."""
    columns = -(-columns // WIDTH) * WIDTH
    numbers = np.zeros(count * columns + WIDTH, dtype=dtype)
    first = -(numbers.ctypes.data // numbers.itemsize) % WIDTH
    return numbers[first : first + count * columns].reshape(count, columns)


@compile_loops
def set_way(starts: np.ndarray, ends: np.ndarray, rate: Any, way: np.ndarray) -> None:
    """Set `way` (n, dim) to the way from `ends` back to `starts`, divided by `rate`."""
    for n in range(len(way)):
        for d in range(way.shape[1]):
            way[n, d] = (starts[n, d] - ends[n, d]) / rate


@compile_inlined
def copy_row(into: np.ndarray, n: int, rows: np.ndarray, m: int) -> None:
    """Set row `n` of `into` to row `m` of `rows`."""
    for d in range(0, into.shape[1], WIDTH):
        store(into, n, d, load(rows, m, d))


@compile_inlined
def add_row(into: np.ndarray, n: int, rows: np.ndarray, m: int) -> None:
    """Add row `m` of `rows` to row `n` of `into`."""
    for d in range(0, into.shape[1], WIDTH):
        store(into, n, d, add(load(into, n, d), load(rows, m, d)))


@compile_inlined
def mean_row(into: np.ndarray, n: int, rows: np.ndarray, chosen: np.ndarray, first: int, last: int) -> None:
    """Set row `n` of `into` to the mean of the rows that `chosen` has from `first` to before `last`, one at least."""
    copy_row(into, n, rows, chosen[first])
    if last > first + 1:
        for j in range(first + 1, last):
            add_row(into, n, rows, chosen[j])
        for d in range(into.shape[1]):
            into[n, d] /= last - first


@compile_inlined
def score(rows: np.ndarray, n: int, others: np.ndarray, m: int) -> Any:
    """Return the dot product of two rows."""
    sums = fill(rows.dtype.type(0))
    for d in range(0, rows.shape[1], WIDTH):
        sums = mul_add(load(rows, n, d), load(others, m, d), sums)
    return total(sums)


@compile_inlined
def weighted_sum(
    into: np.ndarray, n: int, anew: bool, weights: np.ndarray, rows: np.ndarray, chosen: np.ndarray, first: int, last: int
) -> None:  # fmt: skip
    """Add to row `n` of `into`, or where `anew` set it to, ``weights[0, j] * rows[chosen[j]]`` of j from `first` to `last`."""
    zero, width = fill(into.dtype.type(0)), into.shape[1]
    by_fours = width // _FOUR * _FOUR  # what an element of `chosen` costs beside its row is then shared by four vectors
    for d in range(0, by_fours, _FOUR):
        d1, d2, d3 = d + WIDTH, d + 2 * WIDTH, d + 3 * WIDTH
        if anew:
            s0 = s1 = s2 = s3 = zero
        else:
            s0, s1, s2, s3 = load(into, n, d), load(into, n, d1), load(into, n, d2), load(into, n, d3)
        for j in range(first, last):
            weight, m = fill(weights[0, j]), chosen[j]
            s0 = mul_add(weight, load(rows, m, d), s0)
            s1 = mul_add(weight, load(rows, m, d1), s1)
            s2 = mul_add(weight, load(rows, m, d2), s2)
            s3 = mul_add(weight, load(rows, m, d3), s3)
        store(into, n, d, s0)
        store(into, n, d1, s1)
        store(into, n, d2, s2)
        store(into, n, d3, s3)
    for d in range(by_fours, width, WIDTH):
        s0 = zero if anew else load(into, n, d)
        for j in range(first, last):
            s0 = mul_add(fill(weights[0, j]), load(rows, chosen[j], d), s0)
        store(into, n, d, s0)


@compile_inlined
def set_columns(by_column: np.ndarray, rows: np.ndarray) -> None:
    """Set `by_column` (dim, WIDTH) to the first numbers of each of `WIDTH` rows, transposed."""
    for d in range(len(by_column)):
        for n in range(WIDTH):
            by_column[d, n] = rows[n, d]


@compile_inlined
def add_products(into: np.ndarray, weights: np.ndarray, rows: np.ndarray) -> None:
    """Add to `into` (WIDTH, dim) the product of `weights` (k, WIDTH), transposed, and `rows` (k, dim)."""
    for d in range(0, into.shape[1], WIDTH):
        for n in range(0, WIDTH, 4):
            s0, s1, s2, s3 = load(into, n, d), load(into, n + 1, d), load(into, n + 2, d), load(into, n + 3, d)
            for k in range(len(rows)):
                numbers = load(rows, k, d)
                s0 = mul_add(fill(weights[k, n]), numbers, s0)
                s1 = mul_add(fill(weights[k, n + 1]), numbers, s1)
                s2 = mul_add(fill(weights[k, n + 2]), numbers, s2)
                s3 = mul_add(fill(weights[k, n + 3]), numbers, s3)
            store(into, n, d, s0)
            store(into, n + 1, d, s1)
            store(into, n + 2, d, s2)
            store(into, n + 3, d, s3)


@compile_inlined
def set_products(into: np.ndarray, weights: np.ndarray, rows: np.ndarray, count: int) -> None:
    """Set `into` (k, dim), k a multiple of 4, to the product of `weights` (k, `count` or more) and `rows` (`count`, dim)."""
    zero = fill(rows.dtype.type(0))
    for d in range(0, into.shape[1], WIDTH):
        for k in range(0, len(into), 4):
            s0 = s1 = s2 = s3 = zero
            for n in range(count):
                numbers = load(rows, n, d)
                s0 = mul_add(fill(weights[k, n]), numbers, s0)
                s1 = mul_add(fill(weights[k + 1, n]), numbers, s1)
                s2 = mul_add(fill(weights[k + 2, n]), numbers, s2)
                s3 = mul_add(fill(weights[k + 3, n]), numbers, s3)
            store(into, k, d, s0)
            store(into, k + 1, d, s1)
            store(into, k + 2, d, s2)
            store(into, k + 3, d, s3)


@compile_inlined
def sigmoid(scores: Any, height: Any) -> Any:
    """Return ``height / (1 + exp(-scores))`` of vectors, within some roundings; scores count as 80 beyond that."""
    one = fill_like(scores, 1)
    x = clip(negative(scores), fill_like(scores, -80), fill_like(scores, 80))
    # exp(x) is 2**n exp(r), n whole and r within half of log(2). Of this the first part has few bits, for an exact product.
    n = rint(mul_add(x, fill_like(scores, 1.4426950408889634), fill_like(scores, 0)))
    r = mul_add(n, fill_like(scores, 2.1219444005469058e-4), mul_add(n, fill_like(scores, -0.693359375), x))
    last = 7 if bits_of(scores) == 32 else 13
    series = fill_like(scores, _TAYLOR[last])
    for k in range(last - 1, -1, -1):
        series = mul_add(series, r, fill_like(scores, _TAYLOR[k]))
    return divide(height, mul_add(series, power_of_two(n), one))
