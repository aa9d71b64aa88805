"""The suites: each runs small, with what it says that it compares, and its checks notice what is wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from speedtransfer.benchmark import cache, lookup, memory, precision, prefetch, step
from speedtransfer.benchmark.cold_tables import DIM, ColdTables, TableFiles
from speedtransfer.benchmark.contenders import BY_HAND, PLANES, ROW_BYTES, contenders
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.benchmark.training_step import Batches
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError
from speedtransfer.optim.probe import outcomes
from speedtransfer.page_cache import PagesStayError

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ROWS = 4096  # of tables in files
LAZY, EXACT, SPARSE, DENSE, MAPPED = (
    "speedtransfer, pageable",
    "speedtransfer, pageable, idle=exact",
    "nn.Embedding(sparse=True) + SparseAdam",
    "nn.Embedding + AdamW",
    "speedtransfer, mmap",
)
READS = ["reads of the same pages on 1 thread", "reads of the same pages on 32 threads"]
AHEAD = ["without prefetch", *(f"prefetch, depth {depth}" for depth in (1, 2, 4)), "table in memory", *READS]
OURS, COPIES = (
    ["speedtransfer", "speedtransfer, check=False", "engine: host", "engine: reference"],
    ["memcpy", "copy past the cache"],
)
MOVES = {
    "gather": [*OURS, "index_select(out=)", "t[idx]", *COPIES],
    "scatter": [*OURS, "index_copy_", "t[idx] = rows", *COPIES],
}
# The options of a small run, and the cases of each group. What fits beside the others in little memory depends on the rows.
RUNS = {
    "step": ({"rows": 300}, [[LAZY, SPARSE, DENSE, MAPPED], [LAZY, SPARSE], [LAZY], [LAZY, EXACT, SPARSE, BY_HAND],
             [LAZY, EXACT, SPARSE, DENSE]]),
    "memory": ({"rows": 20_000}, [[LAZY, SPARSE, DENSE]]),
    "precision": ({"rows": 300}, [[form.name for form in precision.FORMS[::3]]]),
    "lookup": ({"rows": 500}, [[lookup.OURS, lookup.MODULE, lookup.FUNCTION]] * 3),
    "prefetch": ({"rows": ROWS}, [AHEAD] * 2),
    "transfer": ({"rows": 200, "table_bytes": 1 << 18}, [MOVES["gather"], MOVES["scatter"]] * 5),
}  # fmt: skip


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


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(memory, "in_process", lambda function, *arguments: function(*arguments))


def drops_pages():
    """Skip a test where pages of files cannot be dropped."""
    try:
        ColdTables(ROWS, seed=0).files.drop()
    except PagesStayError as error:
        pytest.skip(str(error))


def run_all(groups):
    """Measure every group once; return the names of the cases that ran in each."""
    assert len({group.title for group in groups}) == len(groups)
    return [[case.name for case in measure(group, CPU, **FAST).ran] for group in groups]


@pytest.mark.parametrize("suite", RUNS)
def test_each_runs_small(suite, in_this_process, monkeypatch):
    """Contenders run and pass their checks; groups take options of others."""
    options, names = RUNS[suite]
    monkeypatch.setattr(precision, "FORMS", precision.FORMS[::3])
    if suite == "prefetch":
        drops_pages()
    assert run_all(SUITES[suite].groups(CPU, True, **options, seed=1, whatever=1)) == names


@pytest.mark.parametrize("suite", SUITES)
def test_sizes_are_checked(suite):
    module = SUITES[suite].module
    groups = module.groups(CPU, False, rows=1000, table_bytes=100_000)
    assert len({group.title for group in groups}) == len(groups)
    assert module.NOTE
    with pytest.raises(InvalidValueError, match="rows is -1"):
        module.groups(CPU, True, rows=-1)
    with pytest.raises(InvalidTypeError, match=r"rows is 1\.5"):
        module.groups(CPU, True, rows=1.5)


# --- step ---------------------------------------------------------------------------------------------------------------


def small_steps(experiment, quick=True):
    return [group for group in step.groups(CPU, quick, rows=300) if group.params["experiment"] == experiment]


def taken_of(experiment, number, quick=True):
    """A case of an experiment after its first step, and the step."""
    case = small_steps(experiment, quick)[0].make()[number]
    case.run()
    return case, case.run.__self__


def table_of(taken):
    return taken.model.tables[0].table


def test_sizes():
    assert list(step._sizes(10, 700)) == [10, 40, 160, 640]
    assert list(step._sizes(10, 1300)) == [10, 40, 160, 640, 1280]
    assert list(step._sizes(10, 90)) == [10, 20, 40, 80]


def test_every_size_sees_the_same_accesses():
    batches = Batches(1000, 300, 0)
    large = batches.ids(64_000)
    for a, b in zip(batches.ids(1000), large, strict=True):
        assert torch.equal(b // 64, a)
    touched = batches.touched(64_000)
    assert torch.equal(touched, torch.cat(large).unique())
    assert len((touched % 64).unique()) > 32  # not at equal distances
    outcomes._known.clear()  # a trial of the optimizer makes the first step read its rows again
    rows = []
    for group in small_steps("size"):
        case = group.make()[0]
        for _ in range(2):
            case.run()
        rows.append(table_of(case.run.__self__).stats().gathered_rows)
        outcomes._known.clear()
    assert len(rows) > 2
    assert len(set(rows)) == 1


@pytest.mark.slow
def test_the_experiments_of_a_full_run():
    groups = [g for g in step.groups(CPU, False, rows=300) if g.params["experiment"] not in ("size", step.SMALL)]
    idle = [[LAZY, EXACT, SPARSE, DENSE], *[[LAZY, EXACT]] * len(step.OTHERS)]
    assert run_all(groups) == [[LAZY, EXACT, SPARSE, DENSE], [LAZY, EXACT, DENSE], *idle, [MAPPED]]


@pytest.mark.parametrize(
    ("experiment", "number"),
    [("size", 0), ("size", 2), ("small step", 3), ("many tables", 1), ("whole table", 0), ("idle rows", 1)],
)
def test_a_wrong_step_is_noticed(experiment, number):
    case, taken = taken_of(experiment, number, quick=experiment not in ("many tables", "whole table"))
    row, emb = taken.task.checked[0].flatten()[0], taken.model.tables[0]
    (emb.table.torch() if case.role == "ours" else emb.weight.data)[row] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


@pytest.mark.parametrize("number", [0, 2])
def test_a_step_that_changes_other_rows_is_noticed(number):
    case, taken = taken_of("size", number)
    touched, emb = taken.task.touched, taken.model.tables[0]
    idle = touched[~torch.isin(touched, taken.task.checked[0])][0]
    (emb.table.torch() if case.role == "ours" else emb.weight.data)[idle] += 1e-6
    if case.role == "ours":
        with pytest.raises(AssertionError, match="rows that it does not touch"):
            case.check()
    else:
        case.check()  # a dense optimizer may


def test_steps_before_those_that_are_timed():
    """All batches have been taken before; with new ids, rows have been idle for long, and exact ones have missed steps."""

    def last_steps(taken):  # nothing is caught up
        return table_of(taken).read(torch.arange(300), ["idle.last_step"])["idle.last_step"]

    case, taken = taken_of("size", 0)
    case.check()
    assert (table_of(taken).plane("exp_avg_sq")[taken.task.touched] > 0).any(dim=1).all()
    case, taken = taken_of("small step", 1)
    case.check()
    assert last_steps(taken).max() == 9 + 30
    lazy, exact = small_steps("idle rows")[0].make()[:2]
    for one in (lazy, exact):
        one.run()
    exact.check()
    assert last_steps(exact.run.__self__).max() == 1 + 14 + 30
    assert len(last_steps(exact.run.__self__).unique()) > 5
    seen = [exact.run.__self__._turn().tolist() for _ in range(20)]
    assert len(set(map(tuple, seen))) == 20
    assert [ids.tolist() for ids in lazy.run.__self__.task.timed[:20]] == seen


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
    lookups = lookup.Lookups(lambda ids: torch.zeros(2, 3), [(torch.tensor([1, 2]), torch.ones(2, 3))])
    with pytest.raises(AssertionError, match="not those"):
        lookups.check()


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_a_table_in_a_process_of_its_own():
    """With more rows than one step takes."""
    taken = memory.measured(LAZY, "AdamW", 50_000, CPU)
    planes = PLANES["AdamW"] * 50_000 * ROW_BYTES
    assert planes <= taken["host_bytes"] <= planes + memory._BUFFERS_BYTES
    assert taken["device_bytes"] == 0
    with pytest.raises(HostMemoryError, match=r"failed: plane 'weight' of 1000000000000 x 128 .* asks for 512 TB"):
        memory.measured(LAZY, "AdamW", 10**12, CPU)


@pytest.mark.slow
def test_a_process_that_is_killed_and_the_fork_server_of_the_program(monkeypatch):
    """What that loads is one list for all processes of the program."""
    preload = "multiprocessing.context.BaseContext.set_forkserver_preload"
    monkeypatch.setattr(preload, lambda *names: pytest.fail("it changes the fork server"))
    with pytest.raises(HostMemoryError, match="the process that trains it ended before it was done"):
        memory.in_process(os._exit, 9)


def interrupt_parent():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_signals")
def test_interrupting_the_parent_alone_ends_the_process():
    with pytest.raises(KeyboardInterrupt):
        memory.in_process(interrupt_parent)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("rows", "taken", "problem"),
    [
        (10_000_000, 1.06, r"6\.0% beyond the 15,360,000,000 of its planes"),
        (1_000_000, 0.94, "the measurement is wrong"),
    ],
)
def test_what_a_table_may_take(monkeypatch, rows, taken, problem):
    asked = []

    def measured(contender, optimizer, rows, device):
        asked.append(contender)
        planes = next(one.planes for one in contenders(device, optimizer) if one.name == contender)
        return {"host_bytes": int(taken * planes * rows * ROW_BYTES), "device_bytes": 0}

    def run_and_check(case):
        case.run()
        case.run()
        case.check()

    monkeypatch.setattr(memory, "measured", measured)
    for case in memory.groups(CPU, False, rows=rows)[0].make():
        if problem and (case.role == "ours" or taken < 1) and (taken > 1 or "mmap" not in case.name):
            with pytest.raises((AssertionError, memory.MeasurementError), match=problem):
                run_and_check(case)
        else:
            run_and_check(case)
    assert asked == [LAZY, SPARSE, DENSE, MAPPED]  # once each
    assert memory.with_page_locked(150, 1000) == memory.with_page_locked(1150, 1000) == 1150


# --- tables in files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Small ones, where pages can be dropped."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    drops_pages()
    return ColdTables(ROWS, seed=0)


def test_pages_of_all_planes_are_dropped_and_nothing_is_lost(tables, tmp_path, monkeypatch):
    file, in_memory = tables.in_file[0].table, tables.in_memory[0].table
    assert tables.files.names == file.planes == in_memory.planes == ("weight", "exp_avg", "exp_avg_sq")
    for table in (file, in_memory):
        table.scatter([5], torch.full((1, DIM), 3.0))
    assert tables.files.share_in_memory() > 0.9
    tables.drop_pages()
    assert tables.files.share_in_memory() < 0.01
    assert all(torch.equal(file.stored(name), in_memory.stored(name)) for name in file.planes)
    assert not list(tmp_path.glob("speedtransfer-*")), "nothing stays behind, whatever happens"
    monkeypatch.setattr(TableFiles, "share_in_memory", lambda self: 0.5)
    with pytest.raises(PagesStayError, match=r"50% of the pages .* TMPDIR"):
        tables.drop_pages()
    with pytest.raises(PagesStayError, match="'weight' lies in no file"):
        TableFiles(in_memory)


def test_no_page_is_wanted_twice():
    ids = ColdTables(ROWS, seed=0).ids(5, 16, 2)
    assert ids.shape == (5, 16, 2)
    assert len((ids // 16).unique()) == 160
    assert 0 <= ids.min() <= ids.max() < ROWS
    assert ColdTables(10, seed=0).ids(100).max() < 10, "more ids than pages"


def test_training_by_prefetch_and_without_is_the_same(tables, monkeypatch):
    """The dense part and the rows: one method on the file, the other in memory, with the same ids."""
    monkeypatch.setattr(tables, "drop_pages", lambda: None)
    sizes, batches = prefetch.Sizes(4, 3, 5, 1), tables.ids(10, 4, prefetch.FIELDS)
    monkeypatch.setattr(tables, "ids", lambda count, *rest: batches[:count])
    ends = []
    for depth, in_file in ((2, True), (0, False)):
        dense = prefetch._Dense(8, sizes.examples)
        method = prefetch._Runs(tables, dense, sizes, True, depth, in_file)
        method.before()
        method.run()
        ends.append([parameter.detach() for parameter in dense.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    file, in_memory = tables.in_file[0].table, tables.in_memory[0].table
    assert all(torch.equal(file.stored(name), in_memory.stored(name)) for name in file.planes)


def test_as_many_batches_are_read_ahead_as_are_taken_and_a_wrong_row_is_noticed(tables, monkeypatch):
    asked, used = [], SimpleNamespace(is_waiting=False, is_changed=lambda: False, part=None)
    emb = type(tables.in_file[0])
    monkeypatch.setattr(emb, "prefetch", lambda self, ids: asked.append(ids) or used)
    method = prefetch._Runs(tables, prefetch._Dense(8, 4), prefetch.Sizes(4, 5, 6, 1), True, depth=4)
    method.before()
    assert len(asked) == 9
    method.run()
    assert len(asked) == 15
    monkeypatch.setattr(emb, "forward", lambda self, ids: torch.zeros(4, prefetch.FIELDS, DIM))
    with pytest.raises(AssertionError, match="not those of the table"):
        method.check()


def test_what_is_hidden_is_said():
    for ahead, said in ((30e-3, "50%"), (51e-3, "none")):
        times = {prefetch.WITHOUT: 50e-3, f"{prefetch.AHEAD}1": ahead, prefetch.IN_MEMORY: 10e-3}
        group = GroupResult("a step", {}, [CaseResult(name, "ours", 0, [each] * 5) for name, each in times.items()])
        described = [prefetch.describe(group, case) for case in group.cases]
        assert described == ["", f"{said} of the waiting hidden", ""]


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
