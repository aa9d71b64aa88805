"""Vectors for numba, and the sums and products of rows that are made of them, beside numpy."""

import numpy as np
import pytest
import torch
from numba import njit

from speedtransfer.word2vec import lane_rows
from speedtransfer.word2vec.lanes import WIDTH, load, store

DTYPES = [np.float32, np.float64]
ROWS = 8


def random_rows(count: int, dim: int, dtype: type, seed: int = 0) -> np.ndarray:
    """Rows as wide as whole vectors, zero from `dim` on."""
    rows = lane_rows.zero_rows(count, dim, dtype)
    rows[:, :dim] = np.random.default_rng(seed).normal(size=(count, dim))
    return rows


@pytest.fixture(params=[(dtype, dim) for dtype in DTYPES for dim in (1, 16, 30, 64, 100, 150)], ids=str)
def case(request):
    dtype, dim = request.param
    return random_rows(ROWS, dim, dtype), random_rows(WIDTH, dim, dtype, 1), dim


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(found, expected, rtol=0, atol=100 * np.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_begin_where_lines_of_the_cache_do(dtype):
    rows = lane_rows.zero_rows(5, 33, dtype)
    assert (rows.shape, rows.dtype) == ((5, 48), dtype)
    assert not rows.any()
    assert all(row.ctypes.data % 64 == 0 for row in rows)


@pytest.mark.parametrize("anew", [False, True])
def test_weighted_sums_and_scores(case, anew):
    rows, others, _ = case
    weights, chosen = random_rows(1, 6, rows.dtype.type, 2), np.array([0, 3, 3, 15, 1, 2])
    expected = rows.copy()
    expected[2] = (0 if anew else expected[2]) + weights[0, 1:5] @ others[chosen[1:5]]
    found = lane_rows.score(rows, 1, others, 7)
    lane_rows.weighted_sum(rows, 2, anew, weights, others, chosen, 1, 5)
    assert close(rows, expected)
    assert close(np.asarray(found, rows.dtype), rows[1] @ others[7])


def test_products_of_matrices(case):
    rows, others, dim = case
    dtype = rows.dtype
    by_column, scores = np.zeros((dim, WIDTH), dtype), np.zeros((ROWS, WIDTH), dtype)
    lane_rows.set_columns(by_column, others)
    lane_rows.set_scores(scores, rows, by_column)
    assert (by_column == others[:, :dim].T).all()
    assert close(scores, rows @ others.T)
    into, weights = others.copy(), random_rows(ROWS, WIDTH, dtype.type, 3)
    lane_rows.add_products(into, weights, rows)
    assert close(into, others + weights.T @ rows)
    into = np.full_like(rows, 9)
    lane_rows.set_products(into, weights, others)
    assert close(into, weights @ others)


@njit
def sigmoid_of(scores: np.ndarray, heights: np.ndarray, found: np.ndarray) -> None:
    for n in range(0, scores.shape[1], WIDTH):
        store(found, 0, n, lane_rows.sigmoid(load(scores, 0, n), load(heights, 0, n)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_is_exact_to_a_few_roundings(dtype):
    scores = np.concatenate([np.linspace(-79, 79, 10_000), np.zeros(16), np.linspace(-1e-3, 1e-3, 16)]).astype(dtype)[
        None
    ]
    heights, found = np.full_like(scores, -0.03), np.empty_like(scores)
    sigmoid_of(scores, heights, found)
    expected = heights.astype(np.float64) * torch.sigmoid(torch.from_numpy(scores).double()).numpy()
    assert np.abs(found / expected - 1).max() < 8 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_of_scores_without_bound_and_of_nan(dtype):
    scores = np.zeros((1, WIDTH), dtype)
    scores[0, :5] = np.inf, -np.inf, np.nan, 1e30, -1e30
    found = np.empty_like(scores)
    sigmoid_of(scores, np.ones_like(scores), found)
    assert np.isnan(found[0, 2])
    assert (found[0, [0, 3, 5]] == [1, 1, 0.5]).all()
    assert (found[0, [1, 4]] > 0).all()
    assert (found[0, [1, 4]] < 1e-34).all()
