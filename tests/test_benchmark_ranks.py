"""Suite `ranks`: what it compares is what it says, its checks notice what is wrong, and its processes end."""

from __future__ import annotations

import gc

import pytest
import torch

from speedtransfer.benchmark import ranks
from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.ranks_worker import (
    DENSE,
    ORDINARY,
    SHARDED,
    SHARED,
    SPARSE,
    Sizes,
    Worker,
    batches_of,
    part_of,
)
from speedtransfer.benchmark.report import headlines
from speedtransfer.benchmark.world import World, WorldError
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.ranks.zipf import expected_unique

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ROWS = 500
SIZES = Sizes(ROWS, 16, 256, 8, 1.05, 0)


@pytest.fixture(scope="module")
def processes():
    one, two = World(1, Worker), World(2, Worker)
    yield one, two
    one.end()
    two.end()


@pytest.fixture
def worlds(processes, monkeypatch):
    """One process and two, which have no models yet."""
    for world in processes:
        for method in (SHARDED, SHARED, ORDINARY, SPARSE, DENSE):
            world.call("forget", method)
    monkeypatch.setattr(ranks, "World", lambda count, worker: processes[count - 1])
    return processes


def test_every_method_is_measured(worlds):
    alone, together = ranks.groups(CPU, True, rows=ROWS)
    assert [group.params["ranks"] for group in (alone, together)] == [1, 2]
    found = measure(together, CPU, **FAST)
    assert not [case.error for case in found.cases if case.error]
    assert [case.name for case in found.ran] == [
        "speedtransfer, one process",
        "speedtransfer, sharded",
        'speedtransfer, memory="shared"',
        "speedtransfer, ordinary table",
        "nn.Embedding(sparse=True) + SparseAdam",
        "nn.Embedding + AdamW",
    ]
    one, sharded, shared, ordinary, sparse, dense = found.ran
    assert ranks.SENT not in one.figures
    # Half of the rows are those of the other process; each crosses with its id, and its gradient comes back.
    unique = sum(
        len(part_of(ids, rank, 2).unique()) for ids, _ in batches_of(together_sizes(together)) for rank in (0, 1)
    )
    unique /= 2 * len(batches_of(together_sizes(together)))
    assert sharded.figures[ranks.SENT] == pytest.approx(unique / 2 * (8 + 64 + 64) + 128, rel=0.1)
    assert shared.figures[ranks.SENT] == pytest.approx(unique / 2 * (8 + 64) + 192, rel=0.1)
    assert ordinary.figures[ranks.SENT] == pytest.approx(unique * (8 + 64) + 64, rel=0.1)
    assert sparse.figures[ranks.COMPUTED] == pytest.approx(unique * (8 + 64))
    assert dense.figures[ranks.COMPUTED] == ROWS * 64
    assert len(headlines("ranks", [found])) == 5


def together_sizes(group) -> Sizes:
    return Sizes(*(group.params[name] for name in Sizes._fields))


@pytest.mark.parametrize("method", [SHARDED, SHARED, ORDINARY, SPARSE, DENSE])
def test_a_step_too_many_is_noticed(worlds, method):
    one, two = worlds
    method = ranks._Steps(method, two, one, SIZES, steps=1)
    method.run()
    method.run()
    with pytest.raises(AssertionError, match=r"rows are off by .* of the largest move in one process"):
        method.check()


def test_replicas_that_differ_are_noticed(worlds, monkeypatch):
    one, two = worlds
    method = ranks._Steps(SHARDED, two, one, SIZES, steps=1)
    monkeypatch.setattr(two, "call", lambda *command: [(None, 1), (None, 2)])
    with pytest.raises(AssertionError, match="the processes have different rows"):
        method.check()


def test_moves_are_the_measure():
    start, right = torch.zeros(3), torch.tensor([0.0, 1e-3, 1.0])
    ranks.check_close("rows", right + 1e-3, right, start)
    with pytest.raises(AssertionError, match=r"rows are off by 0\.01 of"):
        ranks.check_close("rows", right - 0.01, right, start)
    with pytest.raises(AssertionError, match="no rows have moved"):
        ranks.check_close("rows", start, start, start)


def test_one_process_is_compared_with_the_same_by_hand(worlds):
    alone = ranks.groups(CPU, True, rows=ROWS)[0]
    cases = alone.make()
    assert [case.name for case in cases] == ["speedtransfer, one process", "speedtransfer, sharded", SPARSE, DENSE]
    assert len({id(case.run.__self__.world) for case in cases}) == 1
    cases[1].run()
    cases[1].check()


def test_a_process_that_fails_or_ends_is_told_and_replaced():
    world = World(2, Worker)
    assert not world.processes
    with pytest.raises(WorldError, match=r"process [01]: KeyError: 'x'"):
        world.call("state", "x", torch.tensor([0]))
    assert not world.processes
    assert world.call("sent") == [0, 0]
    world.processes[1].kill()
    with pytest.raises(WorldError, match=r"ended|Connection"):
        world.call("steps", DENSE, SIZES, 1)
    assert world.call("sent") == [0, 0]
    processes = list(world.processes)
    del world
    gc.collect()
    assert not [process for process in processes if process.is_alive()]


def test_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr("speedtransfer.benchmark.environment.physical_bytes", lambda: 1e6)
    group = ranks.groups(CPU, True, rows=5_000)[1]
    *_, dense = group.make()
    assert isinstance(dense.error, MemoryError)
    assert str(dense.error).startswith(
        "takes 3.2 MB but the tables of a comparison may take 600 kB of the host's memory"
    )


def test_batches_follow_the_law_and_are_divided():
    sizes = Sizes(3000, 4, 512, 4, 1.05, 7)
    found = batches_of(sizes)
    assert found[0][0].shape == (512, 4)
    unique = sum(len(ids.unique()) for ids, _ in found) / len(found)
    assert unique == pytest.approx(expected_unique(3000, 1.05, 2048), rel=0.05)
    ids = found[0][0]
    assert torch.equal(torch.cat([part_of(ids, rank, 4) for rank in range(4)]), ids)


def test_options():
    assert ranks.groups(CPU, False, rows=500, seed=3, whatever=1)[2].params["rows"] == 500
    assert len({group.title for group in ranks.groups(CPU, False)}) == 3
    with pytest.raises(InvalidValueError, match="rows is -1"):
        ranks.groups(CPU, True, rows=-1)
    with pytest.raises(InvalidTypeError, match=r"rows is 1\.5"):
        ranks.groups(CPU, True, rows=1.5)
