"""Suite `exchange`: what it compares is what it says, bytes are those of a formula, and its checks notice what is wrong."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import exchange
from speedtransfer.benchmark.exchange import sent_in_all
from speedtransfer.benchmark.exchange_worker import (
    ALL_REDUCE,
    BLOCK_MOMENTUM,
    COMM_DTYPES,
    EIGHT_BITS,
    FP16,
    LOCAL_SGD,
    NO_ERRORS,
    ONE_BIT,
    PERIOD,
    POWER_SGD,
    WARMUP,
    Worker,
)
from speedtransfer.benchmark.measure import Case, Group, measure
from speedtransfer.benchmark.report import headlines, plot, summary_tables
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.world import World

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


@pytest.fixture(scope="module")
def processes():
    worlds = {1: World(1, Worker), 2: World(2, Worker)}
    yield worlds
    for world in worlds.values():
        world.end()


@pytest.fixture
def worlds(processes, monkeypatch):
    """The processes are started once; those of one loss are not ended either."""
    monkeypatch.setattr(exchange, "World", lambda count, worker, cuda=False: processes[count])
    monkeypatch.setattr(World, "end", lambda world: None)
    yield processes
    monkeypatch.undo()


@pytest.fixture(scope="module")
def measured(processes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "World", lambda count, worker, cuda=False: processes[count])
        patch.setattr(World, "end", lambda world: None)
        patch.setattr(exchange, "_QUICK_STEPS", 16)
        patch.setattr(exchange, "_QUICK", exchange._QUICK._replace(lr=0.15))
        return [measure(group, CPU, **FAST) for group in exchange.groups(CPU, True)]


def test_every_method_comes_to_the_loss(measured):
    gradients, table = measured
    assert not [case.error for group in measured for case in group.cases if case.error]
    assert [case.name for case in gradients.ran] == list(exchange.METHODS[exchange.GRADIENTS])
    assert [case.name for case in table.ran] == list(COMM_DTYPES)
    for case in gradients.ran:
        assert case.figures["steps"] % PERIOD == 0
        assert 0 < case.figures["loss"] < 0.1


def sent_by_formula(steps: int) -> dict[str, float]:
    """Return the bytes that one of two processes sends for a network 32 wide, which a ring sends and receives once."""
    shapes = [(32, 8), (32,), (32, 32), (32,), (1, 32), (1,)]
    values = sum(torch.Size(shape).numel() for shape in shapes)
    whole, after = 4 * values, steps - WARMUP
    # Two factors of two columns of each matrix but the last, which is as small as they are.
    low_rank = 4 * (2 * (32 + 8) + 2 * (32 + 32) + 32 + 32 + 32 + 1)
    rows = 32 + 1 + 32 + 1 + 1 + 1
    signs = 4 * rows + -(-values // 8)
    sent = dict.fromkeys((ONE_BIT, NO_ERRORS), WARMUP * whole + after * signs)
    sent |= dict.fromkeys((LOCAL_SGD, BLOCK_MOMENTUM), (WARMUP + steps // PERIOD) * whole)
    sent |= {ALL_REDUCE: steps * whole, FP16: steps * whole / 2, EIGHT_BITS: steps * (values + 8)}
    return {**sent, POWER_SGD: WARMUP * whole + after * low_rank}


def test_bytes_are_those_of_the_formula(measured):
    for case in measured[0].ran:
        steps = int(case.figures["steps"])
        assert sent_in_all(case) == pytest.approx(sent_by_formula(steps)[case.name], rel=1e-9), case.name


def test_gradients_of_rows_in_fewer_bytes(measured):
    whole, bfloat16, int8 = (case.figures["sent_bytes"] for case in measured[1].ran)
    sizes = exchange._QUICK
    # The rows, 4 bytes each value, cross as they are; the gradients of the same rows in 2 bytes, or 1 and a scale.
    rows = (whole - bfloat16) / (2 * sizes.dim)
    assert 0 < rows < sizes.rows
    assert whole - int8 == pytest.approx(rows * (3 * sizes.dim - 4), rel=1e-6)


def test_what_was_found_is_shown(measured):
    result = {
        "suite": "exchange",
        "quick": True,
        "environment": {"device": "CPU"},
        "groups": [group.to_json() for group in measured],
    }
    first, second = headlines("exchange", measured)
    assert "2 processes: all-reduce " in first
    assert "; st.one_bit_hook 0." in first
    assert "comm_dtype=torch.int8 0." in second
    tables = summary_tables(result)
    assert [table.header for table in tables] == [["", "2"]] * 6
    assert tables[0].title == "gradients, sent by a process until then, by processes"
    assert len(plot(result)) > 5000


def to_loss(worlds, method: str = ALL_REDUCE, target: float = 1e-9, steps: int = 16) -> exchange.ToLoss:
    return exchange.ToLoss(method, worlds[2], exchange._QUICK, target, steps)


def test_a_loss_that_is_not_reached_is_told(worlds):
    one = to_loss(worlds, ONE_BIT)
    found = measure(Group("", lambda: [Case("", one.run, one.check, role="ours", before=one.before)]), CPU, **FAST)
    assert isinstance(found, GroupResult)
    assert found.cases[0].error.startswith("did not come to a loss of 1e-09 in 48 steps; the lowest is 0.")
    assert not found.ran


def test_another_loss_than_that_of_one_process_is_noticed(worlds, monkeypatch):
    one = to_loss(worlds, target=1.0)
    one.before()
    one.run()
    one.check()
    monkeypatch.setattr(exchange, "loss_of_one", lambda *about: 1.02 * one.figures["loss"])
    with pytest.raises(AssertionError, match=r"the loss is .* but that of one process"):
        one.check()


def test_processes_that_drift_apart_are_noticed(worlds, monkeypatch):
    one = to_loss(worlds)
    monkeypatch.setattr(worlds[2], "call", lambda *command: [0.1, 0.2])
    with pytest.raises(AssertionError, match="the processes have different models"):
        one.run()


def test_options():
    assert [group.params["ranks"] for group in exchange.groups(CPU, False, seed=3)] == [2, 4, 2, 4]
    assert exchange.groups(CPU, True, seed=3, whatever=1)[0].params["seed"] == 3
