"""The core of the benchmarks: what is timed is right, and checked to be."""

from __future__ import annotations

import itertools

import pytest
import torch

from speedtransfer.benchmark import methods
from speedtransfer.benchmark.environment import commit_of, environment
from speedtransfer.benchmark.measure import Case, Group, WrongResultError, measure
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.workload import Ids, Tables, distinct_ids, spread, workload, zipf_ids
from speedtransfer.errors import HostMemoryError

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
BOTH = pytest.mark.parametrize("direction", ["gather", "scatter"])


def run_one(*cases: Case, **settings) -> GroupResult:
    return measure(Group("a group", lambda: cases), CPU, **{**FAST, **settings})


def failing(error: BaseException):
    def run():
        raise error

    return run


def test_samples_are_taken_in_turns_and_nothing_runs_before_its_check():
    calls = []
    cases = [Case(name, lambda n=name: calls.append(n), lambda n=name: calls.append(f"check {n}")) for name in "ab"]
    result = run_one(*cases, turns=2, samples=2, budget_s=10.0)
    assert calls[:3] == ["a", "check a", "a"]
    assert [name for name, _ in itertools.groupby(calls[6:])] == ["a", "b", "a", "b"]
    assert calls.count("a") == 2 + 2 * (1 + 2), "the first run of a turn warms up"
    for case in result.cases:
        assert len(case.samples_s) == 4
        assert all(0 < host <= done for host, done in zip(case.host_s, case.samples_s, strict=True))


def test_what_comes_before_a_sample_is_not_timed_and_parts_share_the_time(monkeypatch):
    calls = []
    clock = iter(range(1000))
    monkeypatch.setattr("speedtransfer.benchmark.measure.time.perf_counter", lambda: float(next(clock)))
    case = Case("cold", lambda: calls.append("run"), None, 300, "ours", before=lambda: calls.append("before"), parts=4)
    result = run_one(case, turns=2, samples=2, budget_s=1000.0)
    assert calls == ["before", "run"] * 5
    assert result.cases[0].samples_s == [0.5] * 4
    assert result.cases[0].gb_per_s == pytest.approx(300 / 0.5 / 1e9)


def test_a_wrong_result_of_ours_raises_and_another_is_not_timed():
    wrong, good = failing(AssertionError("row 3 differs")), Case("good", lambda: None, role="ours")
    result = run_one(Case("bad", lambda: None, wrong), good)
    assert [case.error for case in result.cases] == ["gives a wrong result (row 3 differs)", ""]
    assert [case.name for case in result.ran] == ["good"]
    for role in ("ours", "roof"):
        with pytest.raises(WrongResultError, match=r"a group: bad gives a wrong result \(row 3 differs\)"):
            run_one(good, Case("bad", lambda: None, wrong, role=role))


def test_what_cannot_run_says_why_and_the_rest_goes_on():
    result = run_one(
        Case("large", failing(HostMemoryError("no room\nfor this")), role="ours"),
        Case("broken", failing(RuntimeError("headers missing"))),
        Case("known", lambda: None, error=HostMemoryError("too large")),
        Case("fine", lambda: None),
    )
    assert [case.error for case in result.cases] == ["no room for this", "headers missing", "too large", ""]
    assert [case.name for case in result.ran] == ["fine"]
    assert measure(Group("none", failing(HostMemoryError("too large"))), CPU).skipped == "too large"
    with pytest.raises(RuntimeError, match="a fault"):  # our own faults are no figures
        run_one(Case("ours", failing(RuntimeError("a fault")), role="ours"))


def test_shares_and_the_way_through_json():
    result = run_one(*(Case(role, lambda: None, payload_bytes=100, role=role) for role in ("ours", "roof")))
    ours, roof = result.cases
    ours.samples_s, roof.samples_s = [4e-9, 2e-9, 3e-9], [1e-9]
    assert result.share_of_roof(ours) == pytest.approx(1 / 3)
    assert (ours.quartiles_s, ours.noisy) == ((2.5e-9, 3.5e-9), False)
    ours.samples_s = [2e-9, 6e-9]
    assert ours.noisy
    data = result.to_json()
    data["cases"][0]["device_s"] = None  # of an earlier version
    assert GroupResult.from_json(data) == result


def test_environment_names_machine_and_versions(tmp_path):
    facts = environment(CPU)
    assert not facts["cuda"]
    assert facts["device"].startswith("CPU")
    assert facts["versions"]["torch"] == torch.__version__
    assert commit_of(tmp_path) == ("unknown", None)


# --- workloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "count"), [(10, 10), (2**33, 1000)])
def test_distinct_ids(num_rows, count):
    ids = distinct_ids(num_rows, count, torch.Generator().manual_seed(0))
    assert len(ids.unique()) == len(ids) == count
    assert 0 <= ids.min() <= ids.max() < num_rows
    assert (ids[1:] < ids[:-1]).any(), "in random order"


@pytest.mark.parametrize("num_rows", [500, 2**31 + 11])
def test_zipf_ids_fall_as_one_over_the_rank(num_rows):
    draw = torch.Generator().manual_seed(0)
    ids, more = (zipf_ids(num_rows, 100_000, draw) for _ in range(2))
    assert 0 <= ids.min() <= ids.max() < num_rows
    assert not torch.equal(ids, more)
    first, second = ((ids == row).sum().item() for row in spread(torch.arange(2), num_rows))
    assert first / second == pytest.approx(2, rel=0.1)
    places = spread(torch.arange(500), num_rows)
    assert len(places.unique()) == 500


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
def test_tables_show_one_memory_as_rows_of_any_width(memory):
    tables = Tables(CPU)
    wide, narrow = tables.table(memory, 1 << 16, 128), tables.table(memory, 1 << 16, 1)
    assert (wide.torch().shape, narrow.torch().shape) == ((128, 128), (16384, 1))
    assert wide.memory == narrow.memory == memory
    assert wide.torch().data_ptr() == narrow.torch().data_ptr()
    assert len(narrow.torch().view(torch.int32).unique()) > 16300, "no two rows are alike, or hardly"
    assert wide.path is None or not wide.path.parent.exists(), "nothing stays behind, whatever happens"


def test_batches_for_scatter_name_no_row_twice():
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 500, "zipf", repeats=False)
    assert {len(ids.host) for ids in work.sets} == {len(work.rows)}
    assert all(len(ids.host.unique()) == len(ids.host) for ids in work.sets)
    assert len(work.sets) >= 3
    assert not torch.equal(work.sets[0].host, work.sets[1].host)


# --- methods ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def work():
    return workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)


@BOTH
def test_a_method_that_moves_wrong_rows_is_found(work, direction):
    right, *_ = methods.our_methods(work, direction)
    with pytest.raises(IndexError):  # the call with all checks
        right.move(Ids(*[torch.tensor([10**6])] * 2))
    methods.as_case(right, work, direction).check()
    work.out.copy_(work.plane[work.sets[-1].host])  # an earlier method may have left the right rows
    for move in (lambda ids: right.move(ids._replace(device=ids.device.roll(1))), lambda ids: work.out):
        with pytest.raises(AssertionError, match=r"the rows are not|the table has other rows"):
            methods.as_case(methods.Method("wrong", move), work, direction).check()
    for roof in methods.roofs(work, direction):
        methods.as_case(roof, work, direction).check()
    work.out.copy_(work.rows)
    idle = methods.Method("idle", lambda ids: (work.out, work.rows), "roof")
    with pytest.raises(AssertionError, match="not like the original"):
        methods.as_case(idle, work, direction).check()


@BOTH
def test_methods_that_cross_are_right_without_a_device(work, direction, monkeypatch):
    """The formulations for CUDA, with the CPU as their device: the buffers take turns, the rows arrive."""

    class Event:
        record = synchronize = lambda self, *stream: None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(methods, "pinned_empty", lambda size, device: torch.empty(size, dtype=torch.uint8))
    found = methods._crossing_methods(work, direction)
    assert len(found) == 3
    for method in found:
        methods.as_case(method, work, direction).check()
