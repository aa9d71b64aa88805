"""Tables with a cache of hot rows: the contract of every table, and training that is the same to the bit."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import assert_same_bits
from refusals import check_refused, refusals
from table_cases.gather import GatherCases
from table_cases.planes import PlaneCases
from table_cases.scatter import ScatterCases
from third_party import RowCounts
from torch import nn

import speedtransfer as st
from speedtransfer.engines import HostEngine
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim import find_handle
from speedtransfer.optim.placeholder import EncodedPlane

ROWS, DIM = 40, 6


class Synced(st.Table):
    """A table with a cache whose views are looked at by tests that know nothing of it: each write is waited for."""

    def write(self, ids, rows, unsorted=False):
        super().write(ids, rows, unsorted)
        self.wait()


class TestPageable(GatherCases, ScatterCases, PlaneCases):
    """The part of the contract that moves rows and planes; the others copy whole tables."""

    def make(self, num_rows, dim, dtype=torch.float32, **kwargs):
        return Synced(num_rows, dim, dtype, "pageable", device=self.device, cache_rows=3, **kwargs)

    def from_array(self, array, **kwargs):
        return Synced.from_array(array, "pageable", device=self.device, cache_rows=3, **kwargs)

    def load(self, path, **kwargs):
        return Synced.load(path, "pageable", device=self.device, cache_rows=3, **kwargs)

    def test_stats(self):
        table = self.make(10, 4)
        table.gather([[1, 2], [2, 9]])
        table.gather([9, 3])  # of the first two rows and the last
        assert table.stats() == st.TableStats(6, 96, 0, 0, 0, 6, 0, 96)
        table.gather([9, 3])
        assert table.stats().cache_hits == 1
        table.reset_stats()
        assert table.stats() == st.TableStats()


# --- training -----------------------------------------------------------------------------------------------------------


def make(cache, seed=0, **options):
    torch.manual_seed(seed)
    return st.Embedding(ROWS, DIM, device="cpu", **{"memory": "pageable"} | options, **cache)


def same(left, right):
    assert len(left) == len(right)
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype, number
        assert_same_bits(a, b)


COUNTS = torch.arange(ROWS).flip(0)
CACHES = [{"cache_rows": 7}, {"cache_rows": 9, "cache_counts": COUNTS}, {"cache_rows": ROWS, "cache_counts": COUNTS}]


class Program:
    """Things that may be done to a module and its optimizer, by turns that chance takes; `seen` has all results."""

    def __init__(self, seed, cache, options, kind, folder):
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.folder, self.seen, self.added = folder, [], 0
        if options.get("memory") == "mmap":
            options = {**options, "path": folder / "rows.npy"}
        self.emb = make(cache, seed, **options)
        rate = {"lr": 0.05, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.05}
        self.optimizer = kind(self.emb.parameters(), **rate)
        self.held, self.written_bytes = self.emb.table.torch(), 0

    def ids(self, count=9):
        return (torch.rand(count, generator=self.generator) ** 2 * ROWS).long()

    def values(self, count):
        return torch.randn(count, DIM, generator=self.generator)

    def step(self, lookups=1, ahead=False):
        index = [self.ids() for _ in range(lookups)]
        if ahead:
            self.emb.prefetch(index[0])
        found = [self.emb(ids) for ids in index]
        sum((rows**2).sum() for rows in found).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += [rows.detach() for rows in found]

    def two(self):
        self.step(2)

    def read_ahead(self):
        self.step(ahead=True)

    def look(self):
        with torch.no_grad():
            self.seen.append(self.emb(self.ids()))

    def gather(self):
        self.seen.append(self.emb.table.gather(self.ids()))
        self.seen += self.emb.table.gather(self.ids(), list(self.emb.table.planes), catch_up=False).values()

    def scatter(self):
        ids = torch.randperm(ROWS, generator=self.generator)[:4]
        self.emb.table.scatter(ids, self.values(4).to(self.emb.table.dtype))

    def write_to_a_view(self):
        self.emb.table.torch()[self.ids(3)] = 1

    def write_to_a_view_that_was_held(self):
        self.emb.table.plane("weight")
        self.held[self.ids(2)] = 2

    def write_to_data(self):
        before = self.emb.table.stats().scattered_bytes
        self.emb.weight.data[self.ids(1)] = 3.0
        # Writes to a view of the table are not counted.
        self.written_bytes += self.emb.table.stats().scattered_bytes - before

    def write_to_the_weight(self):
        with torch.no_grad():
            self.emb.weight.mul_(0.9)

    def whole(self):
        self.seen.append(self.emb.weight.detach().clone())

    def wait(self):
        self.emb.table.wait()
        self.seen.append(self.held.clone())

    def flush(self):
        self.emb.table.flush()

    def model_state(self):
        self.seen.append(self.emb.state_dict()["weight"].clone())

    def optimizer_state(self):
        state = self.optimizer.state_dict()["state"].get(0, {})
        self.seen += [torch.as_tensor(state[name]).clone() for name in sorted(state)]

    def load_state(self):
        states = copy.deepcopy((self.emb.state_dict(), self.optimizer.state_dict()))
        self.step()
        self.emb.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])

    def checkpoint(self):
        path = self.folder / "checkpoint"
        st.save_checkpoint(path, model=self.emb, optimizer=self.optimizer)
        self.step()
        st.load_checkpoint(path, model=self.emb, optimizer=self.optimizer)

    def plane(self):
        name, self.added = f"plane{self.added}", self.added + 1
        self.emb.table.add_plane(name, 2, fill=1)
        ids = torch.tensor([1, 5, 30])
        self.emb.table.scatter(ids, {name: torch.full((3, 2), 2, dtype=self.emb.table.dtype)})
        self.seen.append(self.emb.table.gather([0, 1, 30], name))
        if self.chance.random() < 0.7:
            self.emb.table.drop_plane(name)

    def engine(self):
        self.emb.table.engine = self.chance.choice(["host", "reference", HostEngine("cpu")])

    def copies(self):
        double, again = copy.deepcopy(self.emb), pickle.loads(pickle.dumps(self.emb))
        for module in (double, again):
            self.seen.append(module(torch.arange(ROWS)).detach())
            assert module.table.cache_rows == self.emb.table.cache_rows

    def shrink(self):
        self.emb.table.shrink_cache(self.chance.randrange(2, 20))

    def run(self, turns):
        often = [self.step, self.step, self.step, self.two, self.look]
        rarely = [
            *(self.read_ahead, self.gather, self.scatter, self.write_to_a_view, self.write_to_a_view_that_was_held),
            *(self.write_to_data, self.write_to_the_weight, self.whole, self.wait, self.flush, self.model_state),
            *(
                self.optimizer_state,
                self.load_state,
                self.checkpoint,
                self.plane,
                self.engine,
                self.copies,
                self.shrink,
            ),
        ]
        for _ in range(turns):
            self.chance.choice(often if self.chance.random() < 0.6 else rarely)()
        self.whole()
        self.optimizer_state()
        return self.seen


OPTIONS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "file": {"memory": "mmap", "idle": "lazy"},
    "records in a file": {"memory": "mmap", "idle": "exact", "layout": "rows"},
    "bfloat16": {"idle": "exact", "storage_dtype": torch.bfloat16},
    "int8": {"idle": "lazy", "storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "float8": {"idle": "exact", "storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8, "scale_block": 3},
    "float8 records": {"idle": "lazy", "storage_dtype": torch.float8_e5m2, "layout": "rows", "scale_block": 2},
    "float16 records": {
        "idle": "exact",
        "storage_dtype": torch.float16,
        "state_dtype": torch.bfloat16,
        "layout": "rows",
    },
}
KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adamax]


def compare(seed, cache, options, kind, folder, turns):
    runs: list[Program] = []
    for name, given in (("without", {}), ("with", cache)):
        (folder / name).mkdir()
        runs.append(Program(seed, given, options, kind, folder / name))
    same(*[run.run(turns) for run in runs])
    without, stats = (run.emb.table.stats() for run in runs)
    # Without a cache state that has not changed is not written.
    assert 0 < without.scattered_bytes - runs[0].written_bytes <= stats.scattered_bytes - runs[1].written_bytes
    return stats


PAIRS = [(name, KINDS[(i + j) % 4]) for i, name in enumerate(OPTIONS) for j in (0, 2)]


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda part: getattr(part, "__name__", part))
def test_any_program_gives_the_same_bits(name, kind, tmp_path):
    seed = list(OPTIONS).index(name) * 10 + KINDS.index(kind)
    stats = compare(seed, CACHES[seed % 3], OPTIONS[name], kind, tmp_path, 25)
    assert stats.cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_any_program_gives_the_same_bits_long(first, tmp_path):
    for seed in range(first, first + 20):
        chance = random.Random(seed)
        options, kind = chance.choice(list(OPTIONS.values())), chance.choice(KINDS)
        (tmp_path / str(seed)).mkdir()
        compare(seed, chance.choice(CACHES), options, kind, tmp_path / str(seed), 120)


def test_bool_state():
    found = []
    for cache in ({}, CACHES[0]):
        emb = make(cache, idle="lazy")
        optimizer = RowCounts(emb.parameters())
        for step in range(4):
            optimizer.zero_grad()
            emb(torch.tensor([1, step])).sum().backward()
            optimizer.step()
        state = optimizer.state_dict()["state"][0]
        assert state["seen"].dtype == torch.bool
        found.append([state["seen"].clone(), state["signs"].clone(), emb.weight.detach().clone()])
    same(*found)


# --- what others see ----------------------------------------------------------------------------------------------------


def trained(cache, **options):
    emb = make(cache, idle="lazy", **options)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1)
    for _ in range(6):
        emb(torch.tensor([1, 2, 30])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return emb, optimizer


def dirty(table):
    return any(bool((part.dirty & part.valid).any()) for part in table._cache.slots._parts.values())


def test_nothing_shows_what_is_out_of_date():
    emb, optimizer = trained({"cache_rows": 10})
    assert dirty(emb.table)
    state = optimizer.state[emb.weight]
    assert all(isinstance(state[name], EncodedPlane) for name in ("exp_avg", "exp_avg_sq"))
    assert repr(state["exp_avg"]) == f"EncodedPlane('exp_avg', shape=({ROWS}, {DIM}))"
    expected, plain = trained({})
    for name in ("exp_avg", "exp_avg_sq"):
        for shown in (
            copy.deepcopy(state[name]),
            pickle.loads(pickle.dumps(state[name])),
            optimizer.state_dict()["state"][0][name],
            copy.deepcopy(optimizer).state_dict()["state"][0][name],
        ):
            assert_same_bits(shown, plain.state[expected.weight][name])
    assert not find_handle(emb.weight).aliased
    emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert dirty(emb.table)
    expected(torch.tensor([1])).sum().backward()
    plain.step()
    assert_same_bits(emb.weight.data + 0, expected.weight.detach())


def test_a_view_is_up_to_date_after_wait_and_may_be_written_to():
    emb, _ = trained({"cache_rows": 10})
    view = emb.table.torch()
    emb.table[[1, 35]] = torch.ones(2, DIM)
    emb.table.wait()
    assert view[[1, 35]].eq(1).all()
    view[1] = 2
    assert emb(torch.tensor([1])).eq(2).all()
    emb.table[[1, 35]] = torch.ones(2, DIM)
    view[2] = 7
    with pytest.raises(InvalidValueError, match=r"call table\.wait"):
        emb(torch.tensor([2]))
    assert emb(torch.tensor([1, 2]))[:, 0].tolist() == [1, 7]


@pytest.mark.parametrize("look", [st.Table.numpy, np.asarray, torch.from_dlpack], ids=["numpy", "array", "dlpack"])
def test_arrays_over_the_memory_end_the_cache(look):
    emb, optimizer = trained({"cache_rows": 10})
    array = look(emb.table)
    assert emb.table.cache_rows == 0
    for value in (1, 2):
        array[5] = value
        assert emb(torch.tensor([5])).eq(value).all()
    emb(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert float(array[5, 0]) == float(emb.table.gather(5)[0]) != 2
    assert copy.deepcopy(emb).table.cache_rows == 10


def test_writing_back_is_no_change_of_the_table():
    table = trained({"cache_rows": 10})[0].table
    table.gather([1, 2])
    version, log = table.version, table.watch()
    table[[1, 35]] = torch.ones(2, DIM)
    assert dirty(table)
    assert table.version > version
    version = table.version
    table.wait()
    assert not dirty(table)
    assert table.version == version
    assert [write.ids.tolist() for write in table.written_since(log)] == [[1, 35]]
    table.torch()[1] = 2
    assert table.version > version
    assert table.written_since(log) is None


def test_planes_that_go_free_their_slots():
    emb, optimizer = trained({"cache_rows": 10})
    slots = emb.table._cache.slots
    assert len(slots._parts) == 3
    optimizer.state.clear()
    find_handle(emb.weight).drop_state("for a test")
    assert len(slots._parts) == 1


def test_given_memory_is_copied():
    weight, array = torch.randn(ROWS, DIM), np.zeros((ROWS, DIM), dtype=np.float32)
    emb = st.Embedding.from_pretrained(weight, memory="pageable", freeze=False, cache_rows=5)
    assert emb.table.torch().data_ptr() != weight.data_ptr()
    assert_same_bits(emb.table.torch(), weight)
    table = st.Table.from_array(array, "pageable", device="cpu", copy=False, cache_rows=5)
    table[[1]] = torch.ones(1, DIM)
    table.wait()
    assert not array.any()
    other = make({})
    with pytest.raises(InvalidValueError, match="one memory cannot be two tables"):
        other.weight = nn.Parameter(emb.table.torch())


def test_a_file_has_all_rows_when_the_table_goes(tmp_path):
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu", cache_rows=5)
    for _ in range(2):
        table[[1, 2]] = torch.ones(2, DIM)
        assert table[[1, 2]].eq(1).all()
    table[[2]] = torch.full((1, DIM), 3.0)
    assert dirty(table)
    del table
    assert np.load(tmp_path / "t.npy")[:4, 0].tolist() == [0, 1, 3, 0]


@pytest.mark.slow
def test_a_file_has_all_rows_when_the_process_ends(tmp_path):
    code = (
        "import sys, torch, speedtransfer as st\n"
        "table = st.Table(9, 2, memory='mmap', path=sys.argv[1], device='cpu', cache_rows=5)\n"
        "table.gather([3])\n"
        "table[[3]] = torch.ones(1, 2)\n"
        "assert not table.stored('weight').any()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.npy")], check=True)
    assert np.load(tmp_path / "t.npy")[2:5, 0].tolist() == [0, 1, 0]


def test_flush_and_save(tmp_path):
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu", cache_rows=5)
    table.gather([3])
    for act, path in ((table.flush, "t.npy"), (lambda: table.save(tmp_path / "u.npy"), "u.npy")):
        table[[3]] = table[[3]] + 1
        assert dirty(table)
        act()
        assert np.load(tmp_path / path)[3].tolist() == table[3].tolist()


# --- how it is asked for ------------------------------------------------------------------------------------------------


def test_who_has_a_cache(tmp_path):
    table = st.Table(ROWS, DIM, memory="pageable", device="cpu", cache_rows=7)
    assert table.cache_rows == 7
    assert "memory='pageable', cache_rows=7, device='cpu'" in repr(table)
    assert "cache_rows" not in repr(st.Table(3, 2, device="cpu"))
    assert st.Table(3, 2, device="cpu").cache_rows is None
    assert table.engine == "host"
    table.engine = "reference"
    assert (table.engine, table.cache_rows) == ("reference", 7)
    table.save(tmp_path / "t.npy")
    for memory in ("pageable", "mmap"):
        assert st.Table.load(tmp_path / "t.npy", memory, "cpu", cache_rows=4).cache_rows == 4
    assert st.Table.from_array(torch.ones(3, 2), "pageable", device="cpu", cache_rows=9).cache_rows == 3
    assert table.astype(torch.float64).cache_rows == copy.deepcopy(table).cache_rows == 7
    table.shrink_cache(2)
    assert table.cache_rows == copy.deepcopy(table).cache_rows == 2
    st.Table(3, 2, device="cpu").shrink_cache()
    assert 0 < st.Table(3, 2, device="cpu", cache_rows="auto").cache_rows <= 3
    emb = make({"cache_rows": 7}, storage_dtype=torch.int8)
    assert repr(emb).endswith("storage_dtype=torch.int8, cache_rows=7)")
    emb.weight.data = torch.ones(5, DIM)  # another table
    assert emb.table.cache_rows == 5
    assert emb.half() is emb
    model = nn.Sequential(nn.Embedding(9, 2))
    st.replace_embeddings(model, min_rows=0, cache_rows=3, memory="pageable")
    assert model[0].table.cache_rows == 3
    meta = st.Embedding(9, 2, device="meta", cache_rows=3, memory="pageable").to_empty(device="cpu")
    assert meta.table.cache_rows == 3


def test_the_rows_with_the_largest_counts():
    counts = torch.zeros(ROWS)
    counts[[3, 8, 30]] = torch.tensor([5.0, 2.0, 9.0])
    table = st.Table(ROWS, DIM, memory="pageable", device="cpu", cache_rows=2, cache_counts=counts)
    assert table._cache.slots._map[0].tolist() == [3, 30]
    table.shrink_cache(1)
    assert table._cache.slots._map[0].tolist() == [30]
    for given in (counts.numpy(), counts.tolist(), counts.long()):
        emb = make({"cache_rows": 2, "cache_counts": given})
        assert emb.table._cache.slots._map[0].tolist() == [3, 30]
    again = pickle.loads(pickle.dumps(emb))
    assert again.table._cache.slots._map[0].tolist() == [3, 30]


WRONG = r"""
cache_rows=-1 -> InvalidValueError: cache_rows is -1 but must be at least 0
cache_rows=1.5 -> InvalidTypeError: cache_rows is 1.5
cache_rows="all" -> InvalidValueError: cache_rows is 'all' but must be 'auto' or a number of rows
cache_counts=torch.ones(3) -> InvalidValueError: cache_counts is given but cache_rows is None
cache_rows=5, cache_counts=torch.ones(3) -> InvalidValueError: cache_counts has shape \(3,\) but the table has 9 rows
cache_rows=5, cache_counts=torch.ones(9) > 0 -> InvalidTypeError: cache_counts is of dtype torch.bool
cache_rows=4, cache_counts="x" -> InvalidTypeError: cache_counts is a str but must hold a number for each row
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_what_is_refused(tmp_path, refusal):
    path = tmp_path / "t.npy"
    for call in (
        'st.Table(9, 2, memory="mmap", path=path, device="cpu", {})',
        'st.Table.from_array(torch.ones(9, 2), "mmap", path, "cpu", {})',
        'st.Embedding(9, 2, memory="mmap", path=path, device="cpu", {})',
    ):
        call = refusal._replace(call=call.format(refusal.call))
        assert "; " in check_refused(call, st=st, torch=torch, path=path)
        assert not path.exists()


def test_what_cannot_have_a_cache():
    with pytest.raises(
        InvalidValueError, match="cache_rows is 5 but memory='device' has all rows on the compute device"
    ):
        st.Table(9, 2, memory="device", device="cpu", cache_rows=5)
    with pytest.raises(InvalidTypeError, match="did you mean 'cache_rows'"):
        st.Embedding(9, 2, cache_row=5)
    with pytest.raises(InvalidValueError, match="rows is -1 but must be at least 0"):
        st.Table(3, 2, device="cpu", cache_rows=2).shrink_cache(-1)


def test_a_table_that_goes_warns_of_a_lost_write():
    table = st.Table(8, 2, memory="pageable", device="cpu", cache_rows=4)
    table.gather([1])
    view = table.torch()
    table.gather([1])
    table[[1]] = torch.ones(1, 2)
    view.fill_(9)
    with pytest.warns(UserWarning, match="when the table went"):
        del table
