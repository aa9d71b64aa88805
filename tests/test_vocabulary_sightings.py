"""Which ids are admitted: the count-min sketch against a Counter, and the rules that ask it or draw."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.vocabulary.policies import Admission, Eviction
from speedtransfer.vocabulary.sightings import Sightings

IDS = some.integers(-5, 30) | some.integers(-(2**63), 2**63 - 1)


def array(values):
    return np.array(list(values), dtype=np.int64)


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
        assert np.array_equal(estimates, sketch.estimate(array(batch)))
        ids = array(exact)
        assert (sketch.estimate(ids) >= array(exact.values())).all()
        assert (sketch.estimate(ids) <= limit).all()
    assert sketch.estimate(array([])).shape == (0,)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_exact_while_ids_are_few(seed):
    """Skewed counts of half as many ids as counters in a line: hardly any estimate is too high."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(2500), np.arange(2500) << 48, -1 - np.arange(5000)])
    drawn = rng.choice(ids, 100_000, p=(weights := 1 / np.arange(1, 10_001)) / weights.sum())
    sketch, exact = Sightings(20_000, seed=seed), collections.Counter(drawn.tolist())
    for batch in np.split(drawn, 20):
        sketch.add(*np.unique(batch, return_counts=True))
    too_high = sketch.estimate(array(exact)) - array(exact.values())
    assert too_high.min() == 0
    assert (too_high > 0).mean() < 0.02
    never_seen = np.arange(10_000, 20_000)
    assert (sketch.estimate(never_seen) > 0).mean() < 0.06  # 0.4 ** 4 of them share every counter


def test_order_within_a_batch_does_not_matter():
    rng = np.random.default_rng(1)
    ids, counts, order = rng.permutation(300), rng.integers(1, 9, 300), rng.permutation(300)
    one, other = Sightings(40), Sightings(40)
    assert np.array_equal(one.add(ids, counts)[order], other.add(ids[order], counts[order]))
    assert np.array_equal(one.state, other.state)


@pytest.mark.parametrize(("limit", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "uint16"), (65_536, "uint32")])
def test_counters_stop_at_the_limit(limit, dtype):
    sketch = Sightings(10, 2, limit=limit)
    assert (sketch.state.dtype, sketch.nbytes) == (np.dtype(dtype), 20 * np.dtype(dtype).itemsize)
    assert sketch.add(array([7]), array([limit])).tolist() == [limit]
    assert sketch.add(array([7]), array([1])).tolist() == [limit]
    assert sketch.add(array([7]), array([2**63 - 1])).tolist() == [limit]
    sketch.halve()
    assert sketch.estimate(array([7])).tolist() == [limit // 2]


def test_state_goes_to_another_sketch():
    one, other = Sightings(30, 3, seed=5), Sightings(30, 3, seed=5)
    one.add(np.arange(50), np.arange(50))
    other.load(one.state.copy())
    assert np.array_equal(other.estimate(np.arange(60)), one.estimate(np.arange(60)))
    other.add(array([3]), array([99]))
    assert one.estimate(array([3])) < 99 <= other.estimate(array([3]))
    before = other.state.copy()
    with pytest.raises(InvalidValueError, match=r"shape \(3, 31\) but these are 3 lines of 30"):
        other.load(Sightings(31, 3).state)
    with pytest.raises(InvalidTypeError, match="dtype uint8 but these counters"):
        other.load(Sightings(30, 3, limit=9).state)
    assert np.array_equal(other.state, before)


def test_golden_counters():
    """Counters are kept in checkpoints: the same id has the same ones in every version."""
    sketch = Sightings(11, 2, seed=3)
    sketch.add(array([1, -1, 2**62]), array([1, 10, 100]))
    assert sketch.state.tolist() == [[1, 0, 0, 0, 0, 0, 10, 0, 100, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 0}, InvalidValueError, "width is 0"),
        ({"width": 2**32}, InvalidValueError, "width is 4294967296 but must be below"),
        ({"width": 5, "depth": 0}, InvalidValueError, "depth is 0"),
        ({"width": 5, "limit": 2**32}, InvalidValueError, "limit is 4294967296 but must be below"),
        ({"width": 5.0}, InvalidTypeError, "width is 5.0"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Sightings(**options)


def test_ids_seen_long_ago_count_half():
    """After so many sightings for each counter; those of ids that never come again would fill the sketch."""
    admission = Admission(3, seed=1, width=1024)
    assert not admission.choose(array([7]), array([2])).any()
    admission.choose(array([9]), array([5000]))
    assert not admission.choose(array([7]), array([1])).any()
    assert admission.choose(array([7]), array([1])).all()


def test_the_probability_is_that_of_each_sighting():
    admission, ids = Admission(0.5, seed=1, width=0), np.arange(4000)
    once, four_times = (admission.choose(ids, np.full(4000, count)) for count in (1, 4))
    assert (once.mean(), four_times.mean()) == pytest.approx((0.5, 1 - 0.5**4), abs=0.03)
    # Each lookup draws anew.
    assert (once != admission.choose(ids, np.ones(4000))).mean() == pytest.approx(0.5, abs=0.03)


def test_a_row_stays_for_the_whole_of_its_time():
    assert Eviction(5, half_life=1.0).scores(10, array([1, 2]), array([4, 5]), None).tolist() == [4.0, np.inf]
