"""The benchmarks: what is timed is right, and checked to be; each suite runs small."""

import itertools

import pytest
import torch
from cases import raising

from speedtransfer.benchmark import cache, lookup, memory, methods, precision, prefetch, step
from speedtransfer.benchmark.cold_tables import DIM, ColdTables
from speedtransfer.benchmark.contenders import PLANES, ROW_BYTES
from speedtransfer.benchmark.measure import SUITES, Case, Group, WrongResultError, measure
from speedtransfer.benchmark.workload import Ids, Tables, workload
from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.page_cache import PagesStayError, share_in_memory

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
BOTH = pytest.mark.parametrize("direction", ["gather", "scatter"])


def run_one(*cases, **settings):
    return measure(Group("a group", lambda: cases), CPU, **{**FAST, **settings})


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
    wrong, good = raising(AssertionError("row 3 differs")), Case("good", lambda: None, role="ours")
    result = run_one(Case("bad", lambda: None, wrong), good)
    assert [case.error for case in result.cases] == ["gives a wrong result (row 3 differs)", ""]
    assert [case.name for case in result.ran] == ["good"]
    for role in ("ours", "roof"):
        with pytest.raises(WrongResultError, match=r"a group: bad gives a wrong result \(row 3 differs\)"):
            run_one(good, Case("bad", lambda: None, wrong, role=role))


def test_what_cannot_run_says_why_and_the_rest_goes_on():
    result = run_one(
        Case("large", raising(HostMemoryError("no room\nfor this")), role="ours"),
        Case("broken", raising(RuntimeError("headers missing"))),
        Case("known", lambda: None, error=HostMemoryError("too large")),
        Case("fine", lambda: None),
    )
    assert [case.error for case in result.cases] == ["no room for this", "headers missing", "too large", ""]
    assert [case.name for case in result.ran] == ["fine"]
    assert measure(Group("none", raising(HostMemoryError("too large"))), CPU).skipped == "too large"
    with pytest.raises(RuntimeError, match="a fault"):  # our own faults are no figures
        run_one(Case("ours", raising(RuntimeError("a fault")), role="ours"))


def test_shares_of_the_roof():
    result = run_one(*(Case(role, lambda: None, payload_bytes=100, role=role) for role in ("ours", "roof")))
    ours, roof = result.cases
    ours.samples_s, roof.samples_s = [4e-9, 2e-9, 3e-9], [1e-9]
    assert result.share_of_roof(ours) == pytest.approx(1 / 3)
    assert (ours.quartiles_s, ours.noisy) == ((2.5e-9, 3.5e-9), False)


# --- methods ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def work():
    return workload(Tables(CPU).table("pageable", 1 << 16, 16), 50)


@BOTH
def test_a_method_that_moves_wrong_rows_is_found(work, direction):
    def check(move, role="other"):
        methods.as_case(work, direction, "a method", move, role).check()

    right, *_ = methods.our_methods(work, direction).values()
    with pytest.raises(IndexError):  # the call with all checks
        right(Ids(*[torch.tensor([10**6])] * 2))
    check(right)
    work.out.copy_(work.plane[work.sets[-1].host])  # an earlier method may have left the right rows
    for move in (lambda ids: right(ids._replace(device=ids.device.roll(1))), lambda ids: work.out):
        with pytest.raises(AssertionError, match=r"the rows are not|the table has other rows"):
            check(move)
    for roof in methods.roofs(work, direction).values():
        check(roof, "roof")
    work.out.copy_(work.rows)
    with pytest.raises(AssertionError, match="not like the original"):
        check(lambda ids: (work.out, work.rows), "roof")


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
    for name, move in found.items():
        methods.as_case(work, direction, name, move).check()


# --- suites: each runs small, and its checks notice what is wrong -----------------------------------------------------


ROWS = 4096  # of tables in files
# The rows of a small run, and how many cases run in each group: what fits beside the others in little memory.
RUNS = {
    "step": (300, [4, 2, 1, 4, 4]),
    "memory": (20_000, [3]),
    "precision": (300, [len(precision.FORMS[::3])]),
    "lookup": (500, [3, 3, 3]),
    "prefetch": (ROWS, [7]),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few bytes, steps and lookups, and no processes."""
    monkeypatch.setattr(step, "_QUICK_BYTES", 2.3e6)
    for name in ("HISTORY", "QUICK_HISTORY"):
        monkeypatch.setattr(step, name, 30)
    monkeypatch.setattr(precision, "_QUICK_STEPS", 6)
    monkeypatch.setattr(precision, "_QUICK_BATCHES", (16,))
    monkeypatch.setattr(prefetch, "QUICK", prefetch.Sizes(examples=4, warm=5, steps=2, turns=1))
    monkeypatch.setattr(cache, "_QUICK_LOOKUPS", 1000)


def drops_pages():
    """Skip a test where pages of files cannot be dropped."""
    try:
        ColdTables(ROWS, seed=0).drop_pages()
    except PagesStayError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("suite", RUNS)
def test_each_runs_small(suite, monkeypatch):
    """Contenders run and pass their checks; groups take options of others."""
    rows, counts = RUNS[suite]
    monkeypatch.setattr(memory, "in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(precision, "FORMS", precision.FORMS[::3])
    if suite == "prefetch":
        drops_pages()
    groups = SUITES[suite].groups(CPU, True, rows=rows, seed=1, whatever=1)
    assert len({group.title for group in groups}) == len(groups)
    assert [len({case.name for case in measure(group, CPU, **FAST).ran}) for group in groups] == counts


@pytest.mark.parametrize("suite", SUITES)
def test_sizes_are_checked(suite):
    module = SUITES[suite].module
    groups = module.groups(CPU, False, rows=1000, table_bytes=100_000)
    assert len({group.title for group in groups}) == len(groups)
    assert module.NOTE
    with pytest.raises(InvalidValueError, match="rows is -1"):
        module.groups(CPU, True, rows=-1)


# --- step ---------------------------------------------------------------------------------------------------------------


def taken_of(experiment, number):
    """A case of an experiment after its first step, and the step."""
    small = [group for group in step.groups(CPU, True, rows=300) if group.params["experiment"] == experiment]
    case = small[0].make()[number]
    case.run()
    return case, case.run.__self__


@pytest.mark.parametrize(("experiment", "number"), [("size", 0), ("size", 2), ("small step", 3), ("idle rows", 1)])
def test_a_wrong_step_is_noticed(experiment, number):
    case, taken = taken_of(experiment, number)
    row, emb = taken.task.checked[0].flatten()[0], taken.model.tables[0]
    (emb.table.torch() if case.role == "ours" else emb.weight.data)[row] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


def test_a_step_that_changes_other_rows_is_noticed():
    case, taken = taken_of("size", 0)
    touched, emb = taken.task.touched, taken.model.tables[0]
    emb.table.torch()[touched[~torch.isin(touched, taken.task.checked[0])][0]] += 1e-6
    with pytest.raises(AssertionError, match="rows that it does not touch"):
        case.check()
    case, taken = taken_of("idle rows", 1)
    case.check()
    last = taken.model.tables[0].table.read(torch.arange(300), ["idle.last_step"])["idle.last_step"]
    assert last.max() == 1 + 14 + 30, "new ids have missed steps"


# --- precision and lookup -----------------------------------------------------------------------------------------------


def test_a_training_that_goes_wrong_is_noticed():
    """All forms begin with the same model and see the same batches."""
    plain, _, more, _, far, *_ = (case.run.__self__ for case in precision._cases(CPU, 500, 64, 4, 0))
    for training in (plain, far):
        training.run()
    assert plain.data is far.data
    plain.check()
    assert plain.figures["table_bytes"] == 3 * 500 * ROW_BYTES == plain.memory["host_bytes"]
    far.reached["FP32"] = 0.1
    with pytest.raises(AssertionError, match=r"FP32 with 0\.1000"):
        far.check()
    assert far.figures["moved_bytes"] / plain.figures["moved_bytes"] == 0.2578125
    more.run()
    more.model.rows.table.add_plane("more", 1)
    with pytest.raises(AssertionError, match="holds"):
        more.check()


def test_wrong_rows_of_a_lookup_are_noticed():
    case = lookup.case_of("zeros", lambda ids: torch.zeros(2, 3), [(torch.tensor([1, 2]), torch.ones(2, 3))])
    with pytest.raises(AssertionError, match="not those"):
        case.check()


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_a_table_in_a_process_of_its_own():
    """With more rows than one step takes."""
    ours = memory._child, "speedtransfer, pageable", "AdamW"
    taken = memory.in_process(*ours, 50_000, CPU)
    planes = PLANES["AdamW"] * 50_000 * ROW_BYTES
    assert planes <= taken["host_bytes"] <= planes + memory._BUFFERS_BYTES
    assert taken["device_bytes"] == 0
    with pytest.raises(HostMemoryError, match=r"failed: plane 'weight' of 1000000000000 x 128 .* asks for 512 TB"):
        memory.in_process(*ours, 10**12, CPU)


def test_what_a_table_may_take(monkeypatch):
    planes, taken = PLANES["AdamW"] * 10_000_000 * ROW_BYTES, [1.06]
    monkeypatch.setattr(
        memory, "in_process", lambda *about: {"host_bytes": int(taken.pop(0) * planes), "device_bytes": 0}
    )
    group = memory.groups(CPU, False, rows=10_000_000)[0]
    with pytest.raises(AssertionError, match=r"pageable takes .* 6\.0% beyond the 15,3"):
        measure(group, CPU)
    taken[:] = [0.94, 1.0, 4 / 3, 1.0]
    low, *others = measure(group, CPU).cases
    assert "the measurement is wrong" in low.error
    assert all(case.memory for case in others)


# --- tables in files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Small ones, where pages can be dropped."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    drops_pages()
    return ColdTables(ROWS, seed=0)


def test_pages_of_all_planes_are_dropped_and_nothing_is_lost(tables, tmp_path, monkeypatch):
    file, in_memory = tables.in_file[0].table, tables.in_memory[0].table
    assert file.planes == in_memory.planes == ("weight", "exp_avg", "exp_avg_sq")
    assert len(tables.files) == len(file.planes)
    for table in (file, in_memory):
        table.scatter([5], torch.full((1, DIM), 3.0))
    assert share_in_memory(file.block for file in tables.files) > 0.9
    tables.drop_pages()
    assert share_in_memory(file.block for file in tables.files) < 0.01
    assert all(torch.equal(file.stored(name), in_memory.stored(name)) for name in file.planes)
    assert not list(tmp_path.glob("speedtransfer-*")), "nothing stays behind, whatever happens"
    monkeypatch.setattr("speedtransfer.page_cache.share_in_memory", lambda blocks: 0.5)
    with pytest.raises(PagesStayError, match=r"50% of the pages .* TMPDIR"):
        tables.drop_pages()


def test_hits_of_a_cache_are_those_computed(tables, monkeypatch):
    (group,) = cache.groups(CPU, True, rows=ROWS)
    found = measure(group, CPU, **FAST)
    by_counts, by_use = (found.cases[number].figures for number in (3, 4))
    assert by_counts["hit_share"] == pytest.approx(by_counts["computed_share"], abs=0.02)
    assert 0 < by_use["hit_share"] < 1
    assert cache.describe(found, found.cases[0]) == ""
    assert cache.describe(found, found.cases[4]).endswith("% computed")
    monkeypatch.setattr(cache, "expected_unique", lambda *about: 1e6)
    with pytest.raises(WrongResultError, match=r"hits where 0\.0% are computed"):
        measure(group, CPU, **FAST)
