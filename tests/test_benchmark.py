"""The core of the benchmarks and suite `transfer`: what is timed is right, and checked to be."""

from __future__ import annotations

import itertools

import pytest
import torch

from speedtransfer.benchmark import methods, transfer
from speedtransfer.benchmark.environment import commit_of, environment
from speedtransfer.benchmark.measure import Case, Group, WrongResultError, measure
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.benchmark.workload import Ids, Tables, Workload, distinct_ids, workload, zipf_ids
from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.tables import Table

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


def run_one(*cases: Case, **settings) -> GroupResult:
    return measure(Group("a group", lambda: cases), CPU, **{**FAST, **settings})


def failing(error: Exception):
    def run():
        raise error

    return run


# --- measure ------------------------------------------------------------------------------------------------------------


def test_samples_are_taken_in_turns_and_nothing_runs_before_its_check():
    calls = []
    cases = [Case(name, lambda n=name: calls.append(n), lambda n=name: calls.append(f"check {n}")) for name in "ab"]
    result = run_one(*cases, turns=2, samples=2, budget_s=10.0)
    assert calls[:3] == ["a", "check a", "a"]
    assert [name for name, _ in itertools.groupby(calls[6:])] == ["a", "b", "a", "b"]
    assert [len(case.samples_s) for case in result.cases] == [4, 4]
    assert all(
        0 < host <= done for case in result.cases for host, done in zip(case.host_s, case.samples_s, strict=True)
    )


def test_what_comes_before_a_sample_is_not_timed_and_parts_share_the_time(monkeypatch):
    calls = []
    clock = iter(range(1000))
    monkeypatch.setattr("speedtransfer.benchmark.measure.time.perf_counter", lambda: float(next(clock)))
    case = Case("cold", lambda: calls.append("run"), None, 300, "ours", before=lambda: calls.append("before"), parts=4)
    result = run_one(case, turns=2, samples=2, budget_s=1000.0)
    assert calls == ["before", "run"] * 5
    assert result.cases[0].samples_s == [0.5] * 4
    assert result.cases[0].gb_per_s == pytest.approx(300 / 0.5 / 1e9)


def test_a_wrong_result_raises_and_gives_no_time():
    def check():
        raise AssertionError("row 3 differs")

    with pytest.raises(WrongResultError, match=r"a group: bad gives a wrong result \(row 3 differs\)") as caught:
        run_one(Case("good", lambda: None), Case("bad", lambda: None, check, role="ours"))
    assert isinstance(caught.value, AssertionError)


def test_a_wrong_result_of_another_costs_the_rest_nothing():
    def check():
        raise AssertionError("row 3 differs")

    result = run_one(Case("bad", lambda: None, check), Case("good", lambda: None, role="ours"))
    assert [case.error for case in result.cases] == ["gives a wrong result (row 3 differs)", ""]
    assert [case.name for case in result.ran] == ["good"]


def test_what_cannot_run_says_why_and_the_rest_goes_on():
    result = run_one(
        Case("large", failing(HostMemoryError("no room\nfor this"))),
        Case("broken", failing(RuntimeError("headers missing"))),
        Case("fine", lambda: None),
    )
    assert [case.error for case in result.cases] == ["no room for this", "headers missing", ""]
    assert [case.name for case in result.ran] == ["fine"]
    assert measure(Group("none", failing(HostMemoryError("too large"))), CPU).skipped == "too large"


def test_our_own_faults_are_no_figures():
    with pytest.raises(RuntimeError, match="a fault"):
        run_one(Case("ours", failing(RuntimeError("a fault")), role="ours"))


def test_shares_and_the_way_through_json():
    result = run_one(
        Case("ours", lambda: None, payload_bytes=100, role="ours"),
        Case("roof", lambda: None, payload_bytes=100, role="roof"),
    )
    result.cases[0].samples_s, result.cases[1].samples_s = [4e-9, 2e-9, 3e-9], [1e-9]
    assert result.share_of_roof(result.cases[0]) == pytest.approx(1 / 3)
    assert result.cases[0].quartiles_s == (2.5e-9, 3.5e-9)
    assert GroupResult.from_json(result.to_json()) == result
    assert not result.cases[0].noisy
    result.cases[0].samples_s = [2e-9, 6e-9]
    assert result.cases[0].noisy


def test_environment_names_machine_and_versions(tmp_path):
    facts = environment(CPU)
    assert not facts["cuda"]
    assert facts["device"].startswith("CPU")
    assert facts["versions"]["torch"] == torch.__version__
    assert commit_of(tmp_path) == ("unknown", None)


# --- workloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "count"), [(10, 10), (100, 30), (10_000, 100), (2**33, 1000)])
def test_distinct_ids(num_rows, count):
    ids = distinct_ids(num_rows, count, torch.Generator().manual_seed(0))
    assert ids.dtype == torch.int64
    assert len(ids.unique()) == len(ids) == count
    assert ids.min() >= 0
    assert ids.max() < num_rows
    assert (ids[1:] < ids[:-1]).any(), "in random order"


@pytest.mark.parametrize("num_rows", [1, 7, 1000, 2**31 + 11])
def test_zipf_ids_follow_the_harmonic_law(num_rows):
    ids = zipf_ids(num_rows, 20_000, torch.Generator().manual_seed(0))
    assert ids.min() >= 0
    assert ids.max() < num_rows
    counts = ids.unique(return_counts=True)[1].sort(descending=True).values
    if num_rows > 7:
        expected = 20_000 * torch.log(torch.tensor([2.0, 1.5])) / torch.log(torch.tensor(num_rows + 1.0))
        torch.testing.assert_close(counts[:2].float(), expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
def test_tables_show_one_memory_as_rows_of_any_width(memory):
    tables = Tables(CPU)
    wide, narrow = tables.table(memory, 1 << 16, 128), tables.table(memory, 1 << 16, 1)
    assert wide.torch().shape == (128, 128)
    assert narrow.torch().shape == (16384, 1)
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


# --- methods ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["nothing", "other rows"])
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_method_that_returns_wrong_rows_is_found(direction, wrong):
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)
    right = methods.our_methods(work, direction)[0]
    methods.as_case(right, work, direction).check()

    def move(ids):
        if wrong == "other rows":
            return right.move(ids._replace(device=ids.device.roll(1)))
        return work.out

    with pytest.raises(AssertionError, match=r"the rows are not|the table has other rows"):
        methods.as_case(methods.Method("wrong", move), work, direction).check()


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_plain_copy_is_checked_too(direction):
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)
    roofs = methods.roofs(work, direction)
    for roof in roofs:
        methods.as_case(roof, work, direction).check()
    idle = methods.Method("idle", lambda ids: (work.out, work.rows), "roof")
    with pytest.raises(AssertionError, match="not like the original"):
        methods.as_case(idle, work, direction).check()


def test_an_empty_launch_has_nothing_to_check():
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)
    assert (
        methods.as_case(methods.Method("empty launch", lambda ids: None, checked=False), work, "gather").check is None
    )


def test_our_first_method_is_the_call_with_all_checks():
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)
    for direction in ("gather", "scatter"):
        default, unchecked, *_ = methods.our_methods(work, direction)
        assert (default.name, unchecked.name) == ("speedtransfer", "speedtransfer, check=False")
        with pytest.raises(IndexError):
            default.move(Ids(*[torch.tensor([10**6])] * 2))


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_methods_that_cross_are_right_without_a_device(direction, monkeypatch):
    """The formulations for CUDA, with the CPU as their device: the buffers take turns, the rows arrive."""

    class Event:
        record = synchronize = lambda self, *stream: None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(methods, "pinned_empty", lambda size, device: torch.empty(size, dtype=torch.uint8))
    work = workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)
    found = {"gather": methods._crossing_gathers, "scatter": methods._crossing_scatters}[direction](work)
    for method in found:
        methods.as_case(method, work, direction).check()
    kept = [
        methods.BEST_TORCH[direction],
        methods.PLAIN_TORCH[direction],
        methods.OVERLAPPED_TORCH[direction],
    ]
    assert [method.name for method in found[:3]] == kept
    monkeypatch.setattr(Workload, "device", torch.device("meta"))  # another one than that of the table
    assert [method.name for method in methods.other_methods(work, direction, all_of_them=False)] == kept


# --- suites -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_transfer_runs_small_and_every_method_is_checked(quick):
    groups = transfer.groups(CPU, quick, rows=200, table_bytes=1 << 18, seed=1)
    results = [measure(group, CPU, **FAST) for group in groups]
    assert not any(result.skipped or case.error for result in results for case in result.cases)
    assert all({"ours", "roof"} <= {case.role for case in result.ran} for result in results)
    assert len({result.title for result in results}) == len(results)
    kinds = {result.params["kind"] for result in results}
    assert kinds == {"ways", "overhead"}
    if not quick:
        assert {result.params["row_bytes"] for result in results} == {4, 16, 64, 256, 512, 1024, 4096, 16384}
        assert {result.params["memory"] for result in results} == {"pageable", "mmap"}
    assert {result.params["table_bytes"] for result in results} == {1 << 18}
    names = {case.name for case in results[0].cases}
    assert {
        "speedtransfer",
        "speedtransfer, check=False",
        "engine: host",
        "index_select(out=)",
        "t[idx]",
        "F.embedding",
        "memcpy",
    } <= names


@pytest.mark.parametrize("options", [{"rows": 0}, {"table_bytes": 10}])
def test_sizes_that_make_no_sense(options):
    with pytest.raises(InvalidValueError, match="must be at least"):
        transfer.groups(CPU, True, **options)


def test_every_suite_has_a_module_with_groups():
    for suite in SUITES.values():
        assert suite.title
        assert callable(suite.module.groups)
        assert suite.declared("NOTE", "")


def test_tables_of_the_benchmark_move_rows_like_any_other():
    table = Tables(CPU).table("pageable", 1 << 16, 16)
    assert isinstance(table, Table)
    rows = torch.randn(3, 16)
    table.scatter([5, 0, 9], rows)
    assert torch.equal(table.gather([5, 0, 9]), rows)
