"""Ids of trials, and the expected numbers that they are drawn to have."""

from __future__ import annotations

import numpy as np
import pytest

from speedtransfer.planning.timed_trial import Draws
from speedtransfer.ranks.zipf import draw_ids, expected_cached, expected_unique


@pytest.mark.parametrize(("rows", "zipf"), [(1000, 1.05), (3_000_000, 1.05), (3_000_000, 0.0), (1 << 40, 1.2)])
def test_distinct_ids_are_as_many_as_expected(rows, zipf):
    draw = np.random.default_rng(0)
    found = [len(np.unique(draw_ids(rows, zipf, 20_000, draw))) for _ in range(5)]
    assert np.mean(found) == pytest.approx(expected_unique(rows, zipf, 20_000), rel=0.02)


def test_frequencies_are_those_of_the_law():
    ids = draw_ids(100, 1.0, 200_000, np.random.default_rng(1))
    chances = 1 / np.arange(1, 101)
    assert np.bincount(ids, minlength=100) / len(ids) == pytest.approx(chances / chances.sum(), abs=2e-3)


@pytest.mark.parametrize(("rows", "zipf"), [(5000, 1.05), (2_000_000, 0.8), (2_000_000, 0.0)])
def test_rows_that_a_cache_serves(rows, zipf):
    cached = [0, rows // 100, rows // 3, rows]
    found = expected_cached(rows, zipf, 10_000, cached)
    assert found[0] == 0
    assert found[-1] == pytest.approx(expected_unique(rows, zipf, 10_000))
    draw = np.random.default_rng(2)
    drawn = [np.unique(draw_ids(rows, zipf, 10_000, draw)) for _ in range(5)]
    for count, expected in zip(cached, found, strict=True):
        assert np.mean([(ids < count).sum() for ids in drawn]) == pytest.approx(expected, rel=0.05, abs=5)


@pytest.mark.parametrize("zipf", [0.0, 1.1])
@pytest.mark.parametrize(("rows", "kept"), [(10_000, 10_000), (1_000_000, 10_000), (10_000_019, 10_000)])
def test_a_smaller_table_has_as_many_distinct_rows(rows, kept, zipf):
    draws = Draws(rows, kept, 2000, zipf, 1.0, None, 0)
    steps = [draws.step() for _ in range(8)]
    assert all(len(ids) == 2000 and ids.min() >= 0 and ids.max() < kept for ids in steps)
    found = np.mean([len(np.unique(ids)) for ids in steps])
    assert found == pytest.approx(expected_unique(rows, zipf, 2000), rel=0.03)


def test_hot_rows_come_again_and_others_in_turns():
    draws = Draws(1_000_000, 1000, 100, 0.0, 1.0, None, 0)
    steps = [set(draws.step()) for _ in range(5)]
    # Half of the rows take turns for ids that are all rare: none comes again within five steps.
    assert len(set().union(*steps)) == sum(map(len, steps)) == 500
    hot = Draws(1_000_000, 1000, 100, 2.0, 1.0, None, 0)
    first, second = set(hot.step()), set(hot.step())
    assert first & second


def test_a_share_of_distinct_rows_with_their_lookups():
    whole, part = Draws(5000, 5000, 4000, 1.05, 1.0, None, 3), Draws(5000, 5000, 4000, 1.05, 0.25, None, 3)
    counts = [[(len(ids), len(np.unique(ids))) for ids in (draws.step() for _ in range(20))] for draws in (whole, part)]
    (all_ids, all_rows), (ids, rows) = (np.mean(count, axis=0) for count in counts)
    assert rows == pytest.approx(0.25 * all_rows, rel=0.02)
    assert ids == pytest.approx(0.25 * all_ids, rel=0.25)


def test_distinct_rows_that_are_given():
    ids = Draws(10_000, 500, 300, 1.05, 1.0, 40.0, 0).step()
    assert (len(ids), len(np.unique(ids))) == (300, 40)
