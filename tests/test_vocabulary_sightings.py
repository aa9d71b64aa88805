"""Which ids are admitted: the count-min sketch against a Counter, and the rules that ask it."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from speedtransfer.errors import InvalidValueError
from speedtransfer.vocabulary.policies import Admission, Eviction
from speedtransfer.vocabulary.sightings import Sightings

IDS = some.integers(-5, 30) | some.integers(-(2**63), 2**63 - 1)


def array(values):
    return np.array(list(values), dtype=np.int64)


def estimate(sketch, ids):
    """Return how often ids were seen: nothing is added."""
    before = sketch.state.copy()
    found = sketch.add(ids, np.zeros(len(ids), np.int64))
    assert np.array_equal(sketch.state, before)
    return found


@settings(max_examples=60, deadline=None)
@given(some.data())
def test_never_too_low(data):
    """Whatever is added in whatever batches, with halving between them, up to the limit."""
    limit = data.draw(some.sampled_from([1, 5, 255, 256, 2**16, 2**32 - 1]))
    width, depth = data.draw(some.integers(1, 40)), data.draw(some.integers(1, 5))
    sketch = Sightings(width, depth, data.draw(some.integers(-(2**63), 2**64 - 1)), limit)
    most = data.draw(some.sampled_from([3, 2**40, 2**63 - 1]))
    exact = collections.Counter()
    for batch in data.draw(some.lists(some.dictionaries(IDS, some.integers(0, most), max_size=20), max_size=6)):
        if data.draw(some.integers(0, 3)) == 0:
            sketch.halve()
            exact = collections.Counter({id: count // 2 for id, count in exact.items()})
        estimates = sketch.add(array(batch), array(batch.values()))
        for id, count in batch.items():
            exact[id] = min(exact[id] + count, limit)
        assert np.array_equal(estimates, estimate(sketch, array(batch)))
        ids = array(exact)
        assert (estimate(sketch, ids) >= array(exact.values())).all()
        assert (estimate(sketch, ids) <= limit).all()
    assert estimate(sketch, array([])).shape == (0,)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_exact_while_ids_are_few(seed):
    """Skewed counts of half as many ids as counters in a line: hardly any estimate is too high."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(2500), np.arange(2500) << 48, -1 - np.arange(5000)])
    drawn = rng.choice(ids, 100_000, p=(weights := 1 / np.arange(1, 10_001)) / weights.sum())
    sketch, exact = Sightings(20_000, 4, seed, 2**32 - 1), collections.Counter(drawn.tolist())
    for batch in np.split(drawn, 20):
        sketch.add(*np.unique(batch, return_counts=True))
    too_high = estimate(sketch, array(exact)) - array(exact.values())
    assert too_high.min() == 0
    assert (too_high > 0).mean() < 0.02
    never_seen = np.arange(10_000, 20_000)
    assert (estimate(sketch, never_seen) > 0).mean() < 0.06  # 0.4 ** 4 of them share every counter


def test_order_within_a_batch_does_not_matter():
    rng = np.random.default_rng(1)
    ids, counts, order = rng.permutation(300), rng.integers(1, 9, 300), rng.permutation(300)
    one, other = (Sightings(40, 4, 0, 2**32 - 1) for _ in range(2))
    assert np.array_equal(one.add(ids, counts)[order], other.add(ids[order], counts[order]))
    assert np.array_equal(one.state, other.state)


@pytest.mark.parametrize(("limit", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "uint16"), (65_536, "uint32")])
def test_counters_stop_at_the_limit(limit, dtype):
    sketch = Sightings(10, 2, 0, limit)
    assert (sketch.state.dtype, sketch.state.nbytes) == (np.dtype(dtype), 20 * np.dtype(dtype).itemsize)
    assert sketch.add(array([7]), array([limit])).tolist() == [limit]
    assert sketch.add(array([7]), array([1])).tolist() == [limit]
    assert sketch.add(array([7]), array([2**63 - 1])).tolist() == [limit]
    sketch.halve()
    assert estimate(sketch, array([7])).tolist() == [limit // 2]


def test_state_goes_to_another_sketch():
    one = Admission(300, seed=5, width=30)
    one.choose(np.arange(50), np.arange(50))
    other = Admission(300, seed=5, width=1, counters=one.sightings.state)
    assert np.array_equal(estimate(other.sightings, np.arange(60)), estimate(one.sightings, np.arange(60)))
    other.choose(array([3]), array([99]))
    assert estimate(one.sightings, array([3])) < 99 <= estimate(other.sightings, array([3]))
    # One that counts less far.
    lower = Admission(2, seed=5, width=1, counters=other.sightings.state + np.uint16(300)).sightings.state
    assert (lower.dtype, lower.shape, lower.min()) == (np.uint8, (4, 30), 255)


def test_golden_counters():
    """Counters are kept in checkpoints: the same id has the same ones in every version."""
    sketch = Sightings(11, 2, 3, 2**32 - 1)
    sketch.add(array([1, -1, 2**62]), array([1, 10, 100]))
    assert sketch.state.tolist() == [[1, 0, 0, 0, 0, 0, 10, 0, 100, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0]]


def test_more_counters_than_a_line_may_have():
    with pytest.raises(InvalidValueError, match=r"width is 4294967296 but must be below"):
        Admission(2, seed=1, width=2**32)


def test_ids_seen_long_ago_count_half():
    """After so many sightings for each counter; those of ids that never come again would fill the sketch."""
    admission = Admission(3, seed=1, width=1024)
    assert not admission.choose(array([7]), array([2])).any()
    admission.choose(array([9]), array([5000]))
    assert not admission.choose(array([7]), array([1])).any()
    assert admission.choose(array([7]), array([1])).all()


def test_a_row_stays_for_the_whole_of_its_time():
    assert Eviction(5, half_life=1.0).scores(10, array([1, 2]), array([4, 5]), None).tolist() == [4.0, np.inf]
