"""The map from ids to rows, and passes over a batch, against plain Python; ids of strings, and the sketch of sightings."""

import collections
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.vocabulary import id_index
from speedtransfer.vocabulary.id_index import IdIndex
from speedtransfer.vocabulary.id_rows import IdRows
from speedtransfer.vocabulary.policies import Admission, Eviction
from speedtransfer.vocabulary.string_ids import hash_ids

LOW, HIGH = -(2**63), 2**63 - 1
# A few near ids, so that examples repeat them, and those at the edges.
IDS = some.integers(-4, 40) | some.integers(LOW, HIGH) | some.sampled_from([LOW, HIGH, -1, 0, 2**32, 2**48, -(2**48)])


def array(values):
    return np.array(list(values), dtype=np.int64)


def touch(rows, now, last_use, counts=None, decay=1.0):
    IdRows.touch(SimpleNamespace(last_use=last_use, counts=counts), rows, now, decay)


class AgainstDict(RuleBasedStateMachine):
    @initialize(room=some.integers(0, 100), pace=some.sampled_from([1, 20, 1 << 15]))
    def make(self, room, pace):
        # How fast a table that is too small is moved.
        self.context = pytest.MonkeyPatch()
        self.context.setattr(id_index, "_MOVED_SLOTS", pace)
        self.context.setattr(id_index, "_MOVED_SLOTS_PER_ID", 0)
        self.index = IdIndex(room)
        self.oracle = {}

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
        """What comes before the first one that is wrong is done."""
        absent = data.draw(IDS.filter(lambda id: id not in self.oracle))
        with pytest.raises(InvalidValueError, match="has a row already"):
            self.index.insert(array([absent, absent]), array([1, 2]))
        assert self.index.find(array([absent])).tolist() == [1]
        with pytest.raises(InvalidValueError, match="stands there twice"):
            self.index.remove(array([absent, absent]))

    @rule(room=some.integers(0, 500))
    def reserve(self, room):
        self.index.reserve(room)

    def teardown(self):
        if hasattr(self, "context"):
            self.context.undo()

    @rule()
    def go_on(self):
        self.index.go_on()

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


def test_more_than_the_machine_has_is_refused():
    index = IdIndex()
    index.insert(array([5]), array([6]))
    with pytest.raises(HostMemoryError, match="max_capacity"):
        index.reserve(2**56)
    assert index.find(array([5])).tolist() == [6]


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


# --- hashes and counters, which are stored in checkpoints: no version may make others ---------------------------------

TEXT = some.text(max_size=12) | some.binary(max_size=12)


def oracle(value, salt=""):
    """The definition, in one line of the standard library for each kind."""
    options = {"salt": hashlib.blake2b(salt.encode(), digest_size=16).digest()} if salt else {}
    if isinstance(value, tuple):
        parts = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in value]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        options["person"] = b"tuple"
    else:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, **options).digest(), "little", signed=True)


@settings(max_examples=100, deadline=None)
@given(some.lists(TEXT | some.tuples(TEXT, TEXT) | some.tuples(TEXT)), some.text(max_size=3))
def test_ids_are_those_of_the_definition(values, salt):
    ids = hash_ids(values, salt)
    assert (ids.dtype, ids.device.type, ids.shape) == (torch.int64, "cpu", (len(values),))
    assert ids.tolist() == [oracle(value, salt) for value in values]


def test_kinds_of_input_agree():
    names = ["b", "a", "", "b", "größe", "7"]
    ids = hash_ids(names)
    assert len(set(ids.tolist())) == 5
    same = [
        tuple(names),  # what the collate function of a data loader returns
        np.array(names),
        np.array(names, dtype=object),
        [name.encode() for name in names],
        np.array([name.encode() for name in names]),
        [np.str_(name) for name in names],
    ]
    for values in same:
        assert torch.equal(hash_ids(values), ids)
    assert hash_ids("b").shape == ()
    assert hash_ids(b"b").item() == ids[0].item()


# --- sightings --------------------------------------------------------------------------------------------------------


def sketch_of(width, depth, seed, limit):
    return Admission(limit, seed, width, np.zeros((depth, width), np.uint8))


def estimate(sketch, ids):
    """Return how often ids were seen: nothing is added."""
    before = sketch.counters.copy()
    found = sketch.add(ids, np.zeros(len(ids), np.int64))
    assert np.array_equal(sketch.counters, before)
    return found


@settings(max_examples=60, deadline=None)
@given(some.data())
def test_never_too_low(data):
    """Whatever is added in whatever batches, with halving between them, up to the limit."""
    limit = data.draw(some.sampled_from([255, 256, 2**16, 2**32 - 1]))
    width, depth = data.draw(some.integers(1, 40)), data.draw(some.integers(1, 5))
    sketch = sketch_of(width, depth, data.draw(some.integers(-(2**63), 2**64 - 1)), limit)
    most = data.draw(some.sampled_from([3, 2**40, 2**63 - 1]))
    exact = collections.Counter()
    for batch in data.draw(some.lists(some.dictionaries(IDS, some.integers(0, most), max_size=20), max_size=6)):
        if data.draw(some.integers(0, 3)) == 0:
            sketch.counters >>= 1
            exact = collections.Counter({id: count // 2 for id, count in exact.items()})
        estimates = sketch.add(array(batch), array(batch.values()))
        for id, count in batch.items():
            exact[id] = min(exact[id] + count, limit)
        assert np.array_equal(estimates, estimate(sketch, array(batch)))
        ids = array(exact)
        assert (estimate(sketch, ids) >= array(exact.values())).all()
        assert (estimate(sketch, ids) <= limit).all()
    assert estimate(sketch, array([])).shape == (0,)


def test_golden_counters():
    """Counters are kept in checkpoints: the same id has the same ones in every version."""
    sketch = sketch_of(11, 2, 3, 2**32 - 1)
    sketch.add(array([1, -1, 2**62]), array([1, 10, 100]))
    assert sketch.counters.tolist() == [[1, 0, 0, 0, 0, 0, 10, 0, 100, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0]]


@pytest.mark.parametrize(("kept", "admit", "found"), [("u1", 1000, "u2"), ("u2", 2, "u1"), ("u4", 300, "u2")])
def test_counters_of_another_number_of_sightings_go_on(kept, admit, found):
    counters = Admission(admit, 1, 4, np.array([[7, 250]], kept)).counters
    assert (counters.dtype, counters.tolist()) == (found, [[7, 250]])


def test_ids_seen_long_ago_count_half():
    """After so many sightings for each counter; those of ids that never come again would fill the sketch."""
    admission = Admission(3, seed=1, width=1024)
    assert not admission.choose(array([7]), array([2])).any()
    admission.choose(array([9]), array([5000]))
    assert not admission.choose(array([7]), array([1])).any()
    assert admission.choose(array([7]), array([1])).all()


def test_a_row_stays_for_the_whole_of_its_time():
    assert Eviction(5, half_life=1.0).scores(10, array([1, 2]), array([4, 5]), None).tolist() == [4.0, np.inf]
