"""Tables with a cache of hot rows: the contract of every table, and training that is the same to the bit."""

import copy
import functools
import io
import itertools
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cases import assert_same_bits, refused, take_step
from hypothesis import strategies as some
from hypothesis.stateful import initialize, rule
from machines import short_and_long
from refusals import check_refused, refusals
from table_cases import GatherCases, PlaneCases, ScatterCases
from ticket_machine import CONFIGS, ROW, WRITES, TicketMachine, run_held, written
from torch import nn

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError
from speedtransfer.optim import find_handle
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables import planes
from speedtransfer.tables.memories import PageableMemory

ROWS, DIM = 40, 6
SEVERAL = {"exp_avg": (None, None, 0.5), "step": (1, torch.int32, -1), "half": (7, torch.float16, 2)}


class Synced(st.Table):
    """A table with a cache whose views are looked at by tests that know nothing of it: each write is waited for."""

    def write(self, ids, rows, unsorted=False):
        super().write(ids, rows, unsorted)
        self.wait()


class TestPageable(GatherCases, ScatterCases, PlaneCases):
    """The part of the contract that moves rows and planes; the others copy whole tables."""

    memory, kind, options = "pageable", Synced, {"cache_rows": 3}

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


OF_TWO_PLANES = """
rows = {name: emb.table.stored(name)[:1].clone().zero_() for name in ("weight", emb.table.planes[-1])}
emb.table.write(torch.tensor([row]), rows)
"""


class CachedMachine(TicketMachine):
    """The second side may have a cache, records and a file; the first has none of these."""

    @initialize(config=CONFIGS, seed=some.integers(0, 99))
    def start(self, config, seed):
        super().start({**config, "cache": None, "layout": "planes", "memory": "pageable"}, seed)
        without, self.other_folder = self.sides[0], self.folder
        super().start(config, seed)
        self.sides[0], self.added = without, 0

    def teardown(self):
        super().teardown()
        if hasattr(self, "other_folder"):
            self.other_folder.cleanup()

    @rule(write=some.sampled_from([*WRITES[:4], OF_TWO_PLANES]), row=ROW)
    def write(self, write, row):
        self.both(lambda side: written(side, write, row))

    @rule(row=ROW)
    def write_to_a_view_after_a_wait(self, row):
        views = [side.emb.table.torch() for side in self.sides]
        self.both(lambda side: side.emb.table.wait())
        assert_same_bits(*views)
        for view in views:
            view[row] = 2

    @rule(call=some.sampled_from(["wait", "flush"]))
    def bring_up_to_date(self, call):
        self.both(lambda side: getattr(side.emb.table, call)())
        tables = [side.emb.table for side in self.sides]
        for name in tables[0].planes:
            assert_same_bits(*(table.stored(name) for table in tables))

    @rule(capacity=some.integers(1, 9))
    def shrink(self, capacity):
        self.sides[1].emb.table.shrink_cache(capacity)

    @rule(engine=some.sampled_from(["host", "reference"]))
    def engine(self, engine):
        self.sides[1].emb.table.engine = engine

    @rule(row=ROW, drop=some.booleans())
    def plane(self, row, drop):
        name, self.added = f"plane{self.added}", self.added + 1

        def add(side):
            side.emb.table.add_plane(name, 2, torch.float32, fill=1)
            side.emb.table.scatter([row], {name: torch.full((1, 2), 2.0)})
            found = side.emb.table.gather([0, row], name)
            if drop:
                side.emb.table.drop_plane(name)
            return found

        self.both(add)

    @rule()
    def states(self):
        self.both(lambda side: side.emb.state_dict()["weight"])
        first, second = (side.optimizer.state_dict()["state"].get(0, {}) for side in self.sides)
        for name, value in first.items():
            assert_same_bits(torch.as_tensor(second[name]), torch.as_tensor(value))


@short_and_long({"max_examples": 10}, {"max_examples": 400})
def test_any_sequence_of_calls_gives_the_same_bits(options):
    run_held(CachedMachine, options)


# --- what others see ----------------------------------------------------------------------------------------------------


def trained(cache, **options):
    emb = make(cache, idle="lazy", **options)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1)
    for _ in range(6):
        take_step(optimizer, emb(torch.tensor([1, 2, 30])).sum())
    return emb, optimizer


def dirty(table):
    return any(bool((part.dirty & part.valid).any()) for part in table._cache.slots._parts.values())


@pytest.mark.parametrize("look", [st.Table.numpy, np.asarray, torch.from_dlpack], ids=["numpy", "array", "dlpack"])
def test_arrays_over_the_memory_end_the_cache(look):
    emb, optimizer = trained({"cache_rows": 10})
    array = look(emb.table)
    assert emb.table.cache_rows == 0
    for value in (1, 2):
        array[5] = value
        assert emb(torch.tensor([5])).eq(value).all()
    take_step(optimizer, emb(torch.tensor([5])).sum())
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
    with pytest.raises(InvalidValueError, match="one memory cannot be that of two weights"):
        other.weight = nn.Parameter(emb.table.torch())
    with pytest.raises(InvalidTypeError, match="would not follow the rows of another"):
        other.weight = nn.Parameter(emb.weight[:])


def test_a_file_has_all_rows_when_they_are_flushed_and_when_the_table_goes(tmp_path):
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu", cache_rows=5)
    table.gather([1, 2])
    table[[1, 2]] = torch.ones(2, DIM)
    assert dirty(table)
    table.flush()
    assert np.load(tmp_path / "t.npy")[:4, 0].tolist() == [0, 1, 1, 0]
    table[[2]] = torch.full((1, DIM), 3.0)
    assert dirty(table)
    table.save(tmp_path / "u.npy")
    assert np.load(tmp_path / "u.npy")[:4, 0].tolist() == [0, 1, 3, 0]
    table[[1]] = torch.full((1, DIM), 4.0)
    del table
    assert np.load(tmp_path / "t.npy")[:4, 0].tolist() == [0, 4, 3, 0]


@pytest.mark.slow
def test_a_file_has_all_rows_when_the_process_ends(tmp_path):
    code = """
import sys, torch, speedtransfer as st
table = st.Table(9, 2, memory="mmap", path=sys.argv[1], device="cpu", cache_rows=5)
table.gather([3])
table[[3]] = torch.ones(1, 2)
assert not table.stored("weight").any()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.npy")], check=True)
    assert np.load(tmp_path / "t.npy")[2:5, 0].tolist() == [0, 1, 0]


# --- how it is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("cache_rows", 7), ("layout", "rows")])
def test_copies_have_the_cache_and_the_layout(tmp_path, name, value):
    option = {name: value, "memory": "pageable"}
    table = st.Table(ROWS, DIM, device="cpu", **option)
    table.add_planes(SEVERAL)
    duplicate = copy.deepcopy(table)
    for plane in table.planes:
        assert duplicate.stored(plane).stride() == table.stored(plane).stride()
    table.save(tmp_path / "t.npy")
    read = [st.Table.load(tmp_path / "t.npy", **option | {"memory": memory}) for memory in ("pageable", "mmap")]
    emb = make({name: value}, storage_dtype=torch.int8)
    emb.weight.data = torch.ones(9, DIM)  # another table
    model = nn.Sequential(nn.Embedding(9, 2), nn.EmbeddingBag(9, 2))
    st.replace_embeddings(model, min_rows=0, **option)
    meta = st.Embedding(9, 2, device="meta", **option).to_empty(device="cpu")
    read.append(st.Table.from_array(torch.ones(9, 2), device="cpu", **option))
    tables = [table, duplicate, table.astype(torch.float64), *read, *(module.table for module in (emb, *model, meta))]
    assert [getattr(each, name) for each in tables] == [value] * len(tables)


def test_who_has_a_cache():
    table = st.Table(ROWS, DIM, memory="pageable", device="cpu", cache_rows=7)
    assert "memory='pageable', cache_rows=7, device='cpu'" in repr(table)
    assert st.Table(3, 2, device="cpu").cache_rows is None
    table.engine = "reference"
    assert (table.engine, table.cache_rows) == ("reference", 7)
    assert st.Table.from_array(torch.ones(3, 2), "pageable", device="cpu", cache_rows=9).cache_rows == 3
    table.shrink_cache(2)
    assert table.cache_rows == copy.deepcopy(table).cache_rows == table.astype(torch.float64).cache_rows == 2
    st.Table(3, 2, device="cpu").shrink_cache()
    assert 0 < st.Table(3, 2, device="cpu", cache_rows="auto").cache_rows <= 3
    with refused(InvalidValueError, "layout is 'row', not one of its values; did you mean 'rows'"):
        table.layout = "row"


def test_the_rows_with_the_largest_counts():
    counts = torch.zeros(ROWS)
    counts[[3, 8, 30]] = torch.tensor([5.0, 2.0, 9.0])
    table = st.Table(ROWS, DIM, memory="pageable", device="cpu", cache_rows=2, cache_counts=counts)
    assert table._cache.slots.map[0].tolist() == [3, 30]
    table.shrink_cache(1)
    assert table._cache.slots.map[0].tolist() == [30]
    for given in (counts.numpy(), counts.tolist(), counts.long()):
        emb = make({"cache_rows": 2, "cache_counts": given})
        assert emb.table._cache.slots.map[0].tolist() == [3, 30]
    again = pickle.loads(pickle.dumps(emb))
    assert again.table._cache.slots.map[0].tolist() == [3, 30]


WRONG = r"""
make(cache_rows=-1) -> InvalidValueError: cache_rows is -1 but must be at least 0
make(cache_rows="all") -> InvalidValueError: cache_rows is 'all' but must be 'auto' or a number of rows
make(cache_rows=5, layout="row") -> InvalidValueError: layout is 'row', not one of its values; did you mean 'rows'
make(cache_rows=5, cache_counts=torch.ones(3)) -> InvalidValueError: cache_counts has shape \(3,\) but the table has 9 rows
make(cache_rows=5, cache_counts=torch.ones(9) > 0) -> InvalidTypeError: cache_counts is of dtype torch.bool
"""


def test_what_is_refused(tmp_path):
    options = {"memory": "mmap", "path": tmp_path / "t.npy", "device": "cpu"}
    array = functools.partial(st.Table.from_array, torch.ones(9, 2), **options)
    ways = [functools.partial(kind, 9, 2, **options) for kind in (st.Table, st.Embedding)]
    for refusal, make in itertools.product(refusals(WRONG), (array, *ways)):
        assert "; " in check_refused(refusal, make=make, torch=torch)
        assert list(tmp_path.iterdir()) == []


def test_a_table_that_goes_warns_of_a_lost_write():
    table = st.Table(8, 2, memory="pageable", device="cpu", cache_rows=4)
    table.gather([1])
    view = table.torch()
    table.gather([1])
    table[[1]] = torch.ones(1, 2)
    view.fill_(9)
    with pytest.warns(UserWarning, match="when the table went"):
        del table


# --- layout="rows": planes that are added together lie in one record a row --------------------------------------------


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_planes_added_together_share_one_allocation(tmp_path, memory):
    path = tmp_path / "t.npy" if memory == "mmap" else None
    table = st.Table(50, 4, device="cpu", layout="rows", memory=memory, path=path)
    planes = table.add_planes(SEVERAL)
    assert table.planes == ("weight", *SEVERAL)
    assert len({plane.untyped_storage().data_ptr() for plane in planes.values()}) == 1
    for name, (width, dtype, fill) in SEVERAL.items():
        assert planes[name] is table.stored(name)
        assert_same_bits(planes[name], torch.full((50, width or 4), fill, dtype=dtype or torch.float32))
    assert table.torch().is_contiguous()
    assert table.add_plane("alone").is_contiguous()
    table.drop_plane("half")
    assert planes["exp_avg"].eq(0.5).all()


@pytest.mark.parametrize("storage", ["float32", torch.bfloat16, torch.int8, "split24"], ids=str)
def test_the_weights_of_a_file_without_a_name_are_in_the_records(tmp_path, storage):
    options = {"state_dtype": torch.bfloat16} if storage == "float32" else {"storage_dtype": storage}
    pairs, states = [], []
    for where in ({}, {"memory": "mmap", "path": tmp_path, "layout": "rows"}):
        torch.manual_seed(0)
        emb = st.Embedding(50, 4, device="cpu", **options, **where)
        pairs.append((emb, torch.optim.AdamW(emb.parameters(), lr=0.1)))

    def step(kind=None):
        for emb, opt in pairs:
            opt = opt if kind is None else kind(emb.parameters(), lr=0.1)
            with torch.no_grad():
                emb.weight.mul_(0.9)
            emb(torch.arange(0, 50, 3)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            states.append(opt.state_dict()["state"][0])
        assert_same_bits(pairs[1][0].weight.detach(), pairs[0][0].weight.detach())
        torch.testing.assert_close(*states[-2:], rtol=0, atol=0)
        return pairs[1][0].table

    table = step()
    assert [table.path, *tmp_path.iterdir()] == [None]
    assert len({table.stored(name).untyped_storage().data_ptr() for name in table.planes}) == 1
    # What is saved has no state.
    expected, shown = (emb.state_dict()["weight"] for emb, _ in pairs)
    assert_same_bits(shown, expected)
    assert shown.untyped_storage().nbytes() == expected.nbytes
    pairs[0][0].load_state_dict({"weight": shown})
    # A pickle has each plane once.
    sizes = []
    for pair in pairs:
        torch.save(pair, buffer := io.BytesIO())
        sizes.append(len(buffer.getvalue()))
        copied, _ = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        assert_same_bits(copied.weight.detach(), pair[0].weight.detach())
    assert sizes[1] <= sizes[0] + 500
    # Nobody's view is left behind.
    view = table.torch()
    step(torch.optim.Adagrad)
    assert view.data_ptr() == table.stored("weight").data_ptr()
    assert table.stored("sum").untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    del view
    table = step(torch.optim.Adam)
    assert len({table.stored(name).untyped_storage().data_ptr() for name in table.planes}) == 1
    copied = copy.deepcopy(pairs[1][0])
    assert_same_bits(copied.weight.detach(), pairs[0][0].weight.detach())
    assert copied.to("meta").to_empty(device="cpu").table.folder == tmp_path


def test_rows_that_another_thread_writes_while_the_weights_move(tmp_path, monkeypatch):
    options = {"memory": "mmap", "path": tmp_path, "layout": "rows", "idle": "lazy"}
    emb, other = (st.Embedding(50, 4, device="cpu", **options) for _ in range(2))
    copied, threads = planes._copy_written, list[threading.Thread]()

    def moving(target, source):
        copied(target, source)
        threads.append(threading.Thread(target=emb.table.scatter, args=([7], torch.full((1, 4), 5.0))))
        threads[-1].start()
        threads[-1].join(0.2)

    monkeypatch.setattr(planes, "_copy_written", moving)
    take_step(torch.optim.AdamW(emb.parameters()), emb(torch.tensor([1])).sum())
    threads[0].join()
    assert emb.table[[7]].eq(5).all()
    with refused(InvalidValueError, "one memory cannot be that of two weights"):
        other.weight.data = emb.table.torch()


@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_no_memory_for_them_leaves_the_table_whole(layout, monkeypatch):
    emb = st.Embedding(20, 4, device="cpu", layout=layout)
    before, allocate, count = emb.table.torch().clone(), PageableMemory._allocate, []

    def fails(self, plane, shape, dtype):
        if count or layout == "rows":
            raise HostMemoryError("no room; buy more")
        count.append(plane)
        return allocate(self, plane, shape, dtype)

    opt = torch.optim.AdamW(emb.parameters())
    monkeypatch.setattr(PageableMemory, "_allocate", fails)
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(HostMemoryError):
        opt.step()
    assert emb.table.planes == ("weight",)
    assert_same_bits(emb.table.torch(), before)
    monkeypatch.undo()
    opt.step()
    assert emb.table.planes == ("weight", "exp_avg", "exp_avg_sq", LAST_STEP)
