"""The cache of hot rows as an engine: the engine cases, what it keeps and writes back, the policies, errors."""

import pytest
import torch
from cases import elsewhere, raising
from cpu_kernels import launch_by_cpu
from engine_cases import Twice, cached
from in_child import forks, in_child
from test_engines import OnCpu

from speedtransfer.engines import HostEngine, LfuPolicy, ReferenceEngine, cache_kernels, cache_slots, faults_left
from speedtransfer.engines.cache_policy import NO_ROW
from speedtransfer.errors import InvalidValueError

CPU = torch.device("cpu")


CACHES = [(1, "lfu"), (2, "static"), (2, "lfu"), (30, "static")]


class TestCached(OnCpu):
    @pytest.fixture(params=CACHES[:2], ids=str)
    def engine(self, request):
        return cached(*request.param)


@pytest.mark.sweep
class TestCachedTwice(OnCpu):
    @pytest.fixture(params=CACHES[2:], ids=str)
    def engine(self, request):
        return cached(*request.param, ReferenceEngine("cpu"), kind=Twice)


class ByKernels(HostEngine):
    """An inner engine that lets kernels reach its planes."""

    runs_kernels = True

    def update(self, planes, ids, read, queue):
        queue(None)


@pytest.fixture
def launches(monkeypatch):
    return launch_by_cpu(monkeypatch, cache_kernels)


@pytest.mark.sweep
class TestCachedByKernels(OnCpu):
    @pytest.fixture(params=CACHES, ids=str)
    def engine(self, request, launches):
        return cached(*request.param, ByKernels())


def test_kernels_leave_what_torch_leaves(launches, monkeypatch):
    """Rows, planes, victims, and hits and misses, after each call."""
    monkeypatch.setattr(cache_kernels, "_SORT_ROWS", 10)
    draw = torch.Generator().manual_seed(0)
    content = [torch.randn(40, 8, generator=draw), torch.arange(40)[:, None], torch.randn(40, 3, generator=draw).half()]
    engines = cached(6, "lfu", ByKernels()), cached(6, "lfu")
    sides = [[plane.clone() for plane in content] for _ in engines]
    for number in range(60):
        count = int(torch.randint(1, 20, (), generator=draw))
        ids, some = (torch.rand(40, generator=draw) ** 2 * 40).long()[:count], [(0, 1, 2), (0,), (2, 1)][number % 3]
        writes, found = number % 4 == 3, []
        ids = ids.unique() if writes else ids
        given = [torch.full((len(ids), content[p].shape[1]), number, dtype=content[p].dtype) for p in some]
        for engine, planes in zip(engines, sides, strict=True):
            rows = [part.clone() for part in given]
            if writes:
                engine.scatter([planes[p] for p in some], ids, rows)
            else:
                engine.gather([planes[p] for p in some], ids, rows, unsorted=True)
            if number % 13 == 12:
                engine.wait(writes_only=number % 2 == 0)
            elif number == 40:
                engine.shrink(4)
            found.append([*rows, *planes, *engine.slots.map, torch.tensor([*engine.counts().values()])])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert {"find_slots", "gather_cached", "scatter_cached"} == {*launches}


def test_kernels_leave_ids_of_no_row_alone(launches):
    plane, engine = torch.arange(12.0).view(4, 3), cached(3, "static", ByKernels())
    ids, rows = torch.tensor([3, 4, -1, 0, 2**63 - 1, 1]), torch.full((6, 3), 7.0)
    for _ in range(2):
        engine.gather([plane], ids, [rows])
        assert rows.tolist() == [[9, 10, 11], [0] * 3, [0] * 3, [0, 1, 2], [0] * 3, [3, 4, 5]]
    engine.scatter([plane], ids, [-rows])
    engine.wait()
    assert plane.tolist() == [[0, -1, -2], [-3, -4, -5], [6, 7, 8], [-9, -10, -11]]


# --- what it keeps ------------------------------------------------------------------------------------------------------


class Counting(HostEngine):
    def __init__(self):
        super().__init__()
        self.gathered, self.scattered, self.after_gather = [], [], lambda: None

    def gather(self, planes, index, rows, check=False, unsorted=False):
        self.gathered.append(index.tolist())
        super().gather(planes, index, rows, check, unsorted)
        self.after_gather()

    def scatter(self, planes, index, rows, unsorted=False):
        self.scattered.append(index.tolist())
        super().scatter(planes, index, rows, unsorted)


def read(engine, planes, ids):
    rows = [torch.full((len(ids), plane.shape[1]), -1, dtype=plane.dtype) for plane in planes]
    engine.gather(planes, torch.tensor(ids), rows)
    return rows


def write(engine, planes, ids, value):
    engine.scatter(
        planes, torch.tensor(ids), [torch.full((len(ids), p.shape[1]), value, dtype=p.dtype) for p in planes]
    )


def test_rows_are_read_once_and_written_when_somebody_waits():
    inner, plane = Counting(), torch.arange(60.0).view(30, 2)
    engine = cached(10, inner=inner)  # rows 20 to 29
    for _ in range(3):
        assert torch.equal(read(engine, [plane], [29, 3, 20, 29])[0], plane[[29, 3, 20, 29]])
    assert inner.gathered == [[29, 3, 20, 29], [3], [3]]
    write(engine, [plane], [3, 25, 20], 7.0)
    assert inner.scattered == [[3]]
    assert plane[25].tolist() == [50.0, 51.0]
    assert read(engine, [plane], [25, 20])[0].eq(7).all()
    assert inner.gathered[3:] == []
    engine.wait(writes_only=True)
    assert inner.scattered[1:] == [[20, 25]]
    assert plane[[20, 25]].eq(7).all()
    read(engine, [plane], [25])
    assert inner.gathered[3:] == []  # still known
    write(engine, [plane], [25], 7.0)
    engine.wait()
    assert inner.scattered[2:] == [[25]]  # nothing else is new
    read(engine, [plane], [25])
    assert inner.gathered[3:] == [[25]]


def test_a_row_that_leaves_is_written_back_and_one_that_stays_is_not():
    inner, plane = Counting(), torch.zeros(30, 2)
    engine = cached(2, "lfu", inner)
    read(engine, [plane], [4, 9])  # chosen now
    write(engine, [plane], [4, 9], 1.0)
    assert inner.scattered == []
    for _ in range(3):
        read(engine, [plane], [9, 12, 12, 12])
    assert engine.slots.map[0].tolist() == [9, 12]
    assert inner.scattered == [[4]]
    assert plane[[4, 9]].tolist() == [[1, 1], [0, 0]]
    assert read(engine, [plane], [4, 9, 12])[0].tolist() == [[1, 1], [1, 1], [0, 0]]
    engine.wait()
    assert plane[[4, 9, 12]].tolist() == [[1, 1], [1, 1], [0, 0]]


# --- who else writes ----------------------------------------------------------------------------------------------------


def test_a_write_to_a_plane_that_lacks_rows():
    plane, engine = torch.zeros(30, 2), cached(10)
    read(engine, [plane], [26])
    write(engine, [plane], [25], 1)
    plane[26] = 2
    message = r"a view of the table was written to while its cache held 1 newer rows.*call table.wait\(\) before"
    for call in (lambda: read(engine, [plane], [25]), lambda: write(engine, [plane], [1], 0), engine.wait):
        with pytest.raises(InvalidValueError, match=message):
            call()
        assert plane[25:27].tolist() == [[1, 1], [2, 2]]
        assert read(engine, [plane], [25, 26])[0].tolist() == [[1, 1], [2, 2]]  # as if nothing had been
        write(engine, [plane], [25], 1)
        plane[26] = 2


def test_a_thread_that_reads_ahead_reports_to_nobody():
    plane, engine, told = torch.zeros(30, 2), cached(10), []
    write(engine, [plane], [25], 1)
    plane[26] = 2

    def look():
        for _ in range(2):
            try:
                with faults_left():
                    told.append(read(engine, [plane], [25])[0][0, 0].item())
            except InvalidValueError:
                told.append("raised")

    elsewhere(look)
    assert told == ["raised", 1]
    with pytest.raises(InvalidValueError, match="its cache held 1 newer rows"):
        read(engine, [plane], [25])
    assert read(engine, [plane], [25, 26])[0][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("what", ["scatter", "wait", "choose", "shrink"])
def test_rows_that_were_read_while_they_changed_are_not_kept(what):
    inner, plane = Counting(), torch.arange(60.0).view(30, 2)
    engine, expected = cached(10, inner=inner), plane.clone()

    def change():
        inner.after_gather = lambda: None
        if what == "scatter":
            write(engine, [plane], [25], 3)
        elif what == "wait":
            plane[25] = 3
            engine.wait()
        elif what == "choose":
            with engine.slots.turn():
                engine.slots.place(torch.arange(10))
        else:
            engine.shrink(3)

    expected[25] = 3 if what in ("scatter", "wait") else plane[25]
    read(engine, [plane], [20])
    inner.after_gather = lambda: elsewhere(change)
    read(engine, [plane], [20, 25])
    assert torch.equal(read(engine, [plane], list(range(30)))[0], expected)
    engine.wait()
    assert torch.equal(plane, expected)


@forks
def test_a_forked_process_sees_the_rows_and_writes_none_back(tmp_path):
    shared = torch.from_file(str(tmp_path / "rows"), shared=True, size=60).view(30, 2)
    engine = cached(10, at_exit=True)
    write(engine, [shared], [25], 1)

    def use():
        assert read(engine, [shared], [25])[0].eq(1).all()
        assert engine.capacity == 0
        write(engine, [shared], [26], 5)
        engine.wait()

    in_child(use)
    write(engine, [shared], [25], 2)
    assert shared[25:27].tolist() == [[1, 1], [5, 5]]
    assert engine.capacity == 10
    engine.wait()
    assert shared[25:27].tolist() == [[2, 2], [5, 5]]


# --- its size -----------------------------------------------------------------------------------------------------------


def test_shrinking():
    inner, plane = Counting(), torch.zeros(30, 2)
    engine = cached(10, inner=inner)
    write(engine, [plane], [20, 29], 1)
    engine.shrink(20)
    assert engine.capacity == 10
    engine.shrink(3)
    assert engine.slots.map[0].tolist() == [27, 28, 29]  # the hottest
    assert plane[[20, 29]].eq(1).all()
    write(engine, [plane], [20, 29], 2)
    assert plane[[20, 29], 0].tolist() == [2, 1]
    engine.shrink(0)
    assert plane[[20, 29], 0].tolist() == [2, 2]
    write(engine, [plane], [20, 29], 3)
    assert plane[[20, 29], 0].tolist() == [3, 3]
    assert not engine.slots._parts


@pytest.mark.parametrize("policy", ["static", "lfu"])
def test_no_memory_for_slots(monkeypatch, policy):
    """The second plane does not fit beside the first until both have fewer slots."""
    made = []

    def new_values(count, plane, device, new=cache_slots.new_values):
        if count * plane.shape[1] > (30 if plane.shape[1] == 2 else 18):
            raise torch.OutOfMemoryError("out of memory")
        made.append(count)
        return new(count, plane, device)

    monkeypatch.setattr(cache_slots, "new_values", new_values)
    planes, engine = [torch.zeros(30, 2), torch.zeros(30, 3)], cached(12, policy)
    read(engine, planes[:1], list(range(18, 30)))
    write(engine, planes[:1], list(range(18, 30)), 2)
    assert engine.capacity == 12
    write(engine, planes, [20, 29], 1)
    assert engine.capacity == 3
    assert made == [14, 8, 5, 5]
    assert planes[0][[18, 28]].eq(2).all()
    rows = read(engine, planes, [20, 28, 29])
    assert [r[:, 0].tolist() for r in rows] == [[1, 2, 1], [1, 0, 1]]
    monkeypatch.setattr(cache_slots, "new_values", raising(torch.OutOfMemoryError("full")))
    more = torch.zeros(30, 1)
    write(engine, [more], list(range(30)), 1)
    assert engine.capacity == 0
    assert more.eq(1).all()


# --- policies -----------------------------------------------------------------------------------------------------------


def seen(policy, *ids):
    return policy.saw(torch.tensor(ids))


def test_the_rows_used_most():
    policy = LfuPolicy(CPU, every=4)
    assert policy.choose(2).tolist() == [NO_ROW, NO_ROW]
    assert seen(policy, 5, 5, 3, NO_ROW, NO_ROW)
    assert policy.choose(2).tolist() == [3, 5]
    assert not seen(policy, 8, 8)
    assert seen(policy, 8)
    assert policy.choose(2).tolist() == [5, 8]
    assert [seen(policy, 1) for _ in range(4)] == [False, False, False, True]
    assert policy.choose(2).tolist() == [1, 8]
    assert [seen(policy, 2) for _ in range(4)] == [False, False, False, True]  # no further apart than `every`


def test_what_is_long_ago_counts_less():
    policy = LfuPolicy(CPU, every=1, decay=0.5)
    seen(policy, *[7] * 8)
    assert policy.choose(1).tolist() == [7]
    for expected in (7, 4, 4):
        seen(policy, 4, 4, 4)
        assert policy.choose(1).tolist() == [expected]


def test_it_counts_a_bounded_number_of_rows_and_none_that_it_was_not_shown():
    policy, ids = LfuPolicy(CPU, every=1), torch.arange(1000)
    policy.saw(ids)
    policy.choose(10)
    assert policy._ids.tolist() == list(range(40))
    policy.choose(2)
    assert len(policy._counts) == 8
