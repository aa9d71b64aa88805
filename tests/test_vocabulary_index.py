"""The map from ids to rows, against a dict; and the passes over a batch, against plain loops."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, RowIndexError
from speedtransfer.vocabulary.id_index import IdIndex, first_unknown
from speedtransfer.vocabulary.id_rows import IdRows
from speedtransfer.vocabulary.mixing import mix64

LOW, HIGH = -(2**63), 2**63 - 1
# A few near ids, so that examples repeat them, and those at the edges.
IDS = some.integers(-4, 40) | some.integers(LOW, HIGH) | some.sampled_from([LOW, HIGH, -1, 0, 2**32, 2**48, -(2**48)])


def array(values):
    return np.array(list(values), dtype=np.int64)


def touch(rows, now, last_use, counts=None, decay=1.0):
    IdRows.touch(SimpleNamespace(last_use=last_use, counts=counts), rows, now, decay)


class AgainstDict(RuleBasedStateMachine):
    """An index and a dict."""

    @initialize(room=some.integers(0, 100))
    def make(self, room):
        self.index = IdIndex(room)
        self.oracle: dict[int, int] = {}

    @rule(ids=some.lists(IDS, unique=True, max_size=80), row=some.integers(0, 2**62))
    def insert(self, ids, row):
        ids = [id for id in ids if id not in self.oracle]
        rows = range(row, row + len(ids))
        self.index.insert(array(ids), array(rows))
        self.oracle.update(zip(ids, rows, strict=True))

    @rule(data=some.data())
    def remove(self, data):
        ids = data.draw(some.lists(some.sampled_from(sorted(self.oracle)), unique=True)) if self.oracle else []
        self.index.remove(array(ids))
        for id in ids:
            del self.oracle[id]

    @rule(data=some.data())
    def refuse(self, data):
        """What is half right changes nothing."""
        present, absent = sorted(self.oracle), data.draw(IDS.filter(lambda id: id not in self.oracle))
        wrong = [[absent, absent], *([[absent, present[0]]] if present else [])]
        for ids in wrong:
            with pytest.raises(InvalidValueError, match="has a row already"):
                self.index.insert(array(ids), array([1, 1]))
        with pytest.raises(InvalidValueError, match="has no row"):
            self.index.remove(array([*present[:1], absent]))
        if present:
            with pytest.raises(InvalidValueError, match="stands there twice"):
                self.index.remove(array([present[0], present[0]]))

    @rule(room=some.integers(0, 500))
    def reserve(self, room):
        self.index.reserve(room)

    @rule()
    def clear(self):
        self.index.remove(array(self.oracle))
        self.oracle.clear()

    @rule(ids=some.lists(IDS))
    def find(self, ids):
        assert self.index.find(array(ids)).tolist() == [self.oracle.get(id, -1) for id in ids]

    @invariant()
    def holds_the_same(self):
        ids = array(self.oracle)
        if hasattr(self, "index"):
            index = self.index
            assert len(index) == len(self.oracle)
            assert index.find(ids).tolist() == list(self.oracle.values())
            assert dict(zip(*(part.tolist() for part in index.items()), strict=True)) == self.oracle


AgainstDict.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
test_against_a_dict = AgainstDict.TestCase


def homes(index, ids):
    """Return where the search for each id begins."""
    seed, multiplier = index._hash
    return mix64((ids.view(np.uint64) ^ seed) * multiplier) & np.uint64(len(index._slots) - 1)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(3000),
        -np.arange(3000) - 1,
        np.concatenate([LOW + np.arange(1500), HIGH - np.arange(1500)]),
        (np.arange(3000) - 1500) << 32,
        (np.arange(3000) - 1500) << 48,
    ],
    ids=["sequential", "negative", "edges", "multiples of 2**32", "multiples of 2**48"],
)
def test_regular_ids_fill_slots_as_random_numbers_do(ids):
    """3,000 in 8,192 have runs of a dozen."""
    index = IdIndex.of(ids, np.arange(3000))
    assert np.bincount(homes(index, ids).astype(np.int64)).max() < 12


def test_ids_that_share_a_slot():
    """Chosen with the index's own random number, round the end of the table too."""
    index = IdIndex(200)
    candidates = np.random.default_rng(0).integers(LOW, HIGH, 200_000)
    at = homes(index, candidates)
    size = len(index._slots)
    ids = np.concatenate([candidates[at == home][:60] for home in (size - 1, size - 2, 0)])
    assert len(ids) > 150
    index.insert(ids, np.arange(len(ids)))
    assert len(index._slots) == size
    rows, rng = np.arange(len(ids)), np.random.default_rng(1)
    for _ in range(60):
        few = rng.choice(len(ids), 40, replace=False)
        index.remove(ids[few])
        left = np.delete(np.arange(len(ids)), few)
        assert (index.find(ids[few]) == -1).all()
        assert (index.find(ids[left]) == rows[left]).all()
        index.insert(ids[few], rows[few])


def test_bad_calls_say_what_to_do():
    index = IdIndex.of(array([1]), array([1]))
    with pytest.raises(InvalidValueError, match=r"2 ids and 1 rows"):
        index.insert(array([3, 4]), array([1]))
    with pytest.raises(InvalidValueError, match=r"rows\[1\] is -1 but must not be negative"):
        index.insert(array([3, 4]), array([1, -1]))
    with pytest.raises(InvalidValueError, match="room is -1"):
        IdIndex(-1)
    for call in (
        index.find,
        index.remove,
        lambda bad: first_unknown(bad, array([-1])),
        lambda bad: touch(bad, 1, array([0])),
    ):
        with pytest.raises(InvalidTypeError, match="dtype int32 but must be int64"):
            call(np.array([1], dtype=np.int32))
        with pytest.raises(InvalidValueError, match=r"shape \(1, 1\) but must have one dimension"):
            call(array([[1]]))
    last = np.zeros(3, np.int64)
    with pytest.raises(RowIndexError, match=r"rows\[1\] is 3 but there are 3 rows"):
        touch(array([0, 3]), 5, last, np.zeros(3, np.float32), 0.5)
    assert not last.any()
    assert index.find(array([1, 3, 4])).tolist() == [1, -1, -1]


def test_uint64_ids_are_the_same_bits():
    index = IdIndex.of(np.array([2**64 - 1, 2**63], dtype=np.uint64), array([5, 6]))
    assert index.find(array([-1, LOW, HIGH])).tolist() == [5, 6, -1]
    assert index.find(np.array([2**63, 0], dtype=np.uint64)).tolist() == [6, -1]


def test_more_than_the_machine_has_is_refused():
    index = IdIndex.of(array([5]), array([6]))
    with pytest.raises(HostMemoryError, match="max_capacity"):
        index.reserve(2**56)
    assert index.find(array([5])).tolist() == [6]


@settings(max_examples=50, deadline=None)
@given(some.lists(some.tuples(IDS, some.booleans()), max_size=200))
def test_unknown_ids_are_numbered_in_order(pairs):
    known = {id for id, flag in pairs if flag}
    ids, rows = array(id for id, _ in pairs), array(2 if id in known else -1 for id, _ in pairs)
    counts = collections.Counter(id for id, _ in pairs if id not in known)  # in order of first appearance
    order = list(counts)
    places = [at for at, (id, _) in enumerate(pairs) if id not in known]
    expected = [order, list(counts.values()), places, [order.index(pairs[at][0]) for at in places]]
    results = first_unknown(ids, rows)
    assert [result.dtype for result in results] == [np.int64] * 4
    assert [result.tolist() for result in results] == expected


@pytest.mark.parametrize("decay", [None, 1.0, 0.999, 0.5, 0.0])
def test_touch(decay):
    """Without a decay uses are not counted."""
    rng = np.random.default_rng(5)
    oracle, oracle_last = [0.0] * 50, [-1] * 50
    last, counts = np.full((50, 1), -1), np.zeros((50, 1), np.float32)
    for now in (np.cumsum(rng.integers(0, 30, 40)) + 2**40).tolist():
        rows = rng.integers(-1, 50, rng.integers(0, 60))
        touch(rows, now, last[:, 0], *([] if decay is None else [counts[:, 0], decay]))
        for row in rows[rows >= 0].tolist():
            oracle[row] = oracle[row] * (decay or 0.0) ** (now - oracle_last[row]) + 1
            oracle_last[row] = now
        assert last[:, 0].tolist() == oracle_last
        assert np.allclose(counts[:, 0], 0 if decay is None else oracle, rtol=1e-5)
