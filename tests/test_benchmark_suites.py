"""The suites but those of transfers: what they compare is what they say, and their checks notice what is wrong."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speedtransfer.benchmark import cache, lookup, memory, precision, prefetch, step
from speedtransfer.benchmark.cold_tables import DIM as COLD_DIM
from speedtransfer.benchmark.cold_tables import ColdTables, TableFiles, read_page_by_page
from speedtransfer.benchmark.contenders import BY_HAND, PLANES, ROW_BYTES, contenders
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.benchmark.training_step import Batches
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError
from speedtransfer.optim.probe import outcomes
from speedtransfer.page_cache import PAGE, PagesStayError, read_pages

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
OURS = ["speedtransfer, pageable", "speedtransfer, pageable, idle=exact"]
NAMES = [OURS[0], "nn.Embedding(sparse=True) + SparseAdam", "nn.Embedding + AdamW", "speedtransfer, mmap"]


def run_all(groups):
    """Measure every group once; every case must run. Return the names of the cases of each, too."""
    found = [measure(group, CPU, **FAST) for group in groups]
    assert not [case.error for result in found for case in result.cases if case.error]
    assert not any(result.skipped for result in found)
    return found, [[case.name for case in result.ran] for result in found]


@pytest.mark.parametrize("suite", SUITES)
def test_groups_take_options_of_others_and_make_nothing_yet(suite):
    module, few = SUITES[suite].module, SUITES[suite].groups(CPU, True, seed=3, table_bytes=100_000, whatever=1)
    assert len({group.title for group in few}) == len(few) <= len(module.groups(CPU, False, table_bytes=100_000))
    assert module.NOTE
    assert module.groups(CPU, True, rows=500)[0].params["rows"] in (500, 64)  # 64: as many as a call may move
    with pytest.raises(InvalidValueError, match="rows is -1"):
        module.groups(CPU, True, rows=-1)
    with pytest.raises(InvalidTypeError, match=r"rows is 1\.5"):
        module.groups(CPU, True, rows=1.5)


# --- step ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few bytes for the tables of a group, and a short history."""
    monkeypatch.setattr(step, "_QUICK_BYTES", 4_500_000)
    for name in ("HISTORY", "QUICK_HISTORY"):
        monkeypatch.setattr(step, name, 30)


def small_steps(experiment, quick=True):
    """Groups of suite `step` on small tables, of an experiment."""
    return [group for group in step.groups(CPU, quick, rows=300) if group.params["experiment"] == experiment]


def table_of(case):
    return case.run.__self__.model.tables[0].table


def test_sizes():
    assert list(step._sizes(10, 700)) == [10, 40, 160, 640]
    assert list(step._sizes(10, 1300)) == [10, 40, 160, 640, 1280]
    assert list(step._sizes(10, 90)) == [10, 20, 40, 80]
    assert list(step._sizes(10, 5)) == [10]  # too large a size is an error of its cases


def test_every_size_sees_the_same_accesses():
    batches = Batches(1000, 300, 0)
    large = batches.ids(64_000)
    for a, b in zip(batches.ids(1000), large, strict=True):
        assert torch.equal(b // 64, a)
    touched = batches.touched(64_000)
    assert torch.equal(touched, torch.cat(large).unique())
    assert touched.max() < 64_000
    assert len((touched % 64).unique()) > 32  # not at equal distances
    rows = []
    for group in small_steps("size"):
        outcomes._known.clear()  # a trial of the optimizer makes the first step read its rows again
        case = group.make()[0]
        case.run()
        rows.append(table_of(case).stats().gathered_rows)
    assert len(rows) > 2
    assert len(set(rows)) == 1


def test_step_compares_every_contender_that_memory_holds_beside_the_others():
    groups = small_steps("size")
    assert [group.params["rows"] for group in groups] == [300, 600, 1200, 2400]
    (small, _), names = run_all(groups[:2])
    assert [case.role for case in small.cases] == ["ours", "other", "other", "ours"]
    assert names == [NAMES, NAMES[:3]]  # a large file would be on its way to the disk
    middle, large = (measure(group, CPU, **FAST) for group in groups[2:4])
    assert [[case.name for case in found.ran] for found in (middle, large)] == [NAMES[:2], NAMES[:1]]
    assert middle.cases[2].error == (
        "takes 2.46 MB but the tables of a comparison may take 4.5 MB of the host's memory together, of which those beside it "
        "leave 814 kB"
    )
    (in_file,) = small_steps("file", quick=False)
    assert in_file.params["rows"] == 1200
    assert run_all([in_file])[1] == [NAMES[3:]]


def test_the_other_experiments_of_a_step():
    assert run_all(small_steps("small step"))[1] == [[*OURS, NAMES[1], BY_HAND]]
    assert run_all(small_steps("many tables", quick=False))[1] == [[*OURS, *NAMES[1:3]]]
    assert run_all(small_steps("whole table", quick=False))[1] == [[*OURS, NAMES[2]]]
    idle = small_steps("idle rows", quick=False)
    assert [(group.params["optimizer"], group.params["history"]) for group in idle] == [
        ("AdamW", 30),
        *((other, 10) for other in step.OTHERS),
    ]
    assert run_all(idle)[1] == [[*OURS, *NAMES[1:3]], OURS, OURS, OURS]


@pytest.mark.parametrize(
    ("experiment", "number"),
    [
        (experiment, number)
        for experiment, methods in (
            ("size", 4),
            ("small step", 4),
            ("many tables", 4),
            ("whole table", 3),
            ("idle rows", 4),
        )
        for number in range(methods)
    ],
)
def test_a_wrong_step_is_noticed(experiment, number):
    case = small_steps(experiment, quick=experiment in ("size", "idle rows"))[0].make()[number]
    case.run()
    taken = case.run.__self__
    row, emb = taken.task.checked[0].flatten()[0], taken.model.tables[0]
    (emb.table.torch() if case.role == "ours" else emb.weight.data)[row] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


@pytest.mark.parametrize("number", range(4))
def test_a_step_that_changes_other_rows_is_noticed(number):
    case = small_steps("size")[0].make()[number]
    case.run()
    taken = case.run.__self__
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
    case = small_steps("size")[0].make()[0]
    case.run()
    case.check()
    assert (table_of(case).plane("exp_avg_sq")[case.run.__self__.task.touched] > 0).any(dim=1).all()
    small = small_steps("small step")[0].make()[1]
    small.run()
    small.check()
    assert table_of(small).read(torch.arange(300), ["idle.last_step"])["idle.last_step"].max() == 9 + 30
    lazy, exact = small_steps("idle rows")[0].make()[:2]
    for one in (lazy, exact):
        one.run()
    exact.check()
    idle = table_of(exact).read(torch.arange(300), ["idle.last_step"])["idle.last_step"]  # nothing is caught up
    assert idle.max() == 1 + 14 + 30
    assert len(idle.unique()) > 5
    seen = [exact.run.__self__._turn().tolist() for _ in range(20)]
    assert len(set(map(tuple, seen))) == 20
    assert [ids.tolist() for ids in lazy.run.__self__.task.timed[:20]] == seen


@pytest.mark.parametrize("number", [0, 1])
def test_a_lazy_step_is_not_exact(number):
    case = small_steps("idle rows")[0].make()[number]
    case.run()
    taken = case.run.__self__
    taken.contender = replace(taken.contender, exact=not taken.contender.exact)
    with pytest.raises(AssertionError, match=r"not close|does not touch"):
        case.check()


def test_files_of_a_step_are_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    case = small_steps("size")[0].make()[3]
    case.run()
    assert len(list(tmp_path.rglob("table.safetensors"))) == 1
    del case
    gc.collect()
    assert not list(tmp_path.iterdir())


# --- precision ----------------------------------------------------------------------------------------------------------


def test_precision_compares_every_form_at_every_batch_size(monkeypatch):
    monkeypatch.setattr(precision, "_QUICK_STEPS", 12)
    results, names = run_all(precision.groups(CPU, True, rows=3000, seed=1))
    assert [result.params["batch"] for result in results] == [128, 512]
    assert names == [[form.name for form in precision.FORMS]] * 2
    for result in results:
        plain, *others = result.cases
        assert plain.figures["table_bytes"] == 3 * 3000 * ROW_BYTES == plain.memory["host_bytes"]
        shares = [case.figures["moved_bytes"] / plain.figures["moved_bytes"] for case in others]
        assert shares == [0.5, 0.5, 1.0, 0.2578125, 0.2578125, 0.2578125]
        assert all(0.4 < case.figures["loss"] < 0.75 for case in result.cases)


def test_a_training_that_goes_wrong_is_noticed():
    """All forms begin with the same model and see the same batches."""
    plain, _, more, _, far, *_ = precision._cases(CPU, 500, 64, 4, 0)
    for case in (plain, more, far):
        case.run.__self__._build()
    assert plain.run.__self__.data is far.run.__self__.data
    assert torch.equal(plain.run.__self__.model.mlp[0].weight, far.run.__self__.model.mlp[0].weight)
    far.run()
    far.run.__self__.reached["FP32"] = 0.1
    with pytest.raises(AssertionError, match=r"FP32 with 0\.1000"):
        far.check()
    more.run()
    more.run.__self__.model.rows.table.add_plane("more", 1)
    with pytest.raises(AssertionError, match="holds"):
        more.check()


# --- memory -------------------------------------------------------------------------------------------------------------


def test_memory_of_a_table_in_a_process_of_its_own():
    """With more rows than one step takes."""
    taken = memory.measured("speedtransfer, pageable", "AdamW", 50_000, CPU)
    planes = PLANES["AdamW"] * 50_000 * ROW_BYTES
    assert planes <= taken["host_bytes"] <= planes + memory._BUFFERS_BYTES
    assert taken["device_bytes"] == 0
    with pytest.raises(HostMemoryError, match=r"failed: plane 'weight' of 1000000000000 x 128 .* asks for 512 TB"):
        memory.measured("speedtransfer, pageable", "AdamW", 10**12, CPU)


def test_a_process_that_is_killed_and_the_fork_server_of_the_program(monkeypatch):
    """What that loads is one list for all processes of the program."""
    preload = "multiprocessing.context.BaseContext.set_forkserver_preload"
    monkeypatch.setattr(preload, lambda *names: pytest.fail("it changes the fork server"))
    with pytest.raises(HostMemoryError, match="the process that trains it ended before it was done"):
        memory.in_process(os._exit, 9)


def interrupt_parent():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)


@pytest.mark.usefixtures("fresh_signals")
def test_interrupting_the_parent_alone_ends_the_process():
    with pytest.raises(KeyboardInterrupt):
        memory.in_process(interrupt_parent)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("rows", "taken", "problem"),
    [
        (10_000_000, 1.0, ""),
        (10_000_000, 1.04, ""),
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
    cases = memory.groups(CPU, False, rows=rows)[0].make()
    for case in cases:
        if problem and (case.role == "ours" or taken < 1) and (taken > 1 or "mmap" not in case.name):
            with pytest.raises((AssertionError, memory.MeasurementError), match=problem):
                run_and_check(case)
        else:
            run_and_check(case)
    assert asked == NAMES  # once each
    assert memory.with_page_locked(150, 1000) == 1150
    assert memory.with_page_locked(1150, 1000) == 1150


def test_contenders_of_a_gpu_live_where_they_say():
    """Their names and places; nothing is made."""
    found = [(contender.name, contender.place, contender.planes) for contender in contenders(torch.device("cuda"))]
    assert found == [
        ("speedtransfer, pinned", "host", 3),
        ("nn.Embedding(sparse=True) + SparseAdam", "device", 3),
        ("nn.Embedding + AdamW", "device", 4),
        ("speedtransfer, device", "device", 3),
        ("speedtransfer, pageable", "host", 3),
        ("speedtransfer, mmap", "host", 3),
    ]


# --- lookup -------------------------------------------------------------------------------------------------------------


def test_every_lookup_runs_and_wrong_rows_are_noticed():
    _, names = run_all(lookup.groups(CPU, True, rows=500))
    assert names == [[lookup.OURS, lookup.MODULE, lookup.FUNCTION]] * 3
    lookups = lookup.Lookups(lambda ids: torch.zeros(2, 3), [(torch.tensor([1, 2]), torch.ones(2, 3))])
    with pytest.raises(AssertionError, match="not those"):
        lookups.check()


# --- tables in files ----------------------------------------------------------------------------------------------------

ROWS = 4096


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Small ones, where pages can be dropped."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ColdTables(ROWS, seed=0)
    try:
        made.files.drop()
    except PagesStayError as error:
        pytest.skip(str(error))
    return made


def test_pages_of_all_planes_are_dropped_and_nothing_is_lost(tables, tmp_path, monkeypatch):
    file, in_memory = tables.in_file[0].table, tables.in_memory[0].table
    assert tables.files.names == file.planes == in_memory.planes == ("weight", "exp_avg", "exp_avg_sq")
    assert all(torch.equal(file.stored(name), in_memory.stored(name)) for name in file.planes)
    for table in (file, in_memory):
        table.scatter([5], torch.full((1, COLD_DIM), 3.0))
    assert tables.files.share_in_memory() > 0.9
    tables.drop_pages()
    assert tables.files.share_in_memory() < 0.01
    assert all(torch.equal(file.stored(name), in_memory.stored(name)) for name in file.planes)
    assert not list(tmp_path.iterdir()), "nothing stays behind, whatever happens"
    monkeypatch.setattr(TableFiles, "share_in_memory", lambda self: 0.5)
    with pytest.raises(PagesStayError, match=r"50% of the pages .* TMPDIR"):
        tables.drop_pages()
    with pytest.raises(PagesStayError, match="'weight' lies in no file"):
        TableFiles(in_memory)


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_reads_bring_the_pages_of_the_rows(tables, threads):
    table, rows = tables.in_file[0].table, tables.ids(50)
    names = ["weight", "exp_avg_sq"]
    tables.drop_pages()
    read_pages(tables.files.pages(rows, names), threads)
    brought = tables.files.share_in_memory()
    pages = 3 * math.ceil((4 * COLD_DIM * ROWS + 128) / PAGE)
    assert round(brought * pages) == pytest.approx(2 * 50, abs=2), "single rows bring single pages"
    table.read(rows, names)
    assert brought == tables.files.share_in_memory()
    ((descriptor, pages),) = tables.files.pages(torch.tensor([17]), ["exp_avg"])
    page = np.frombuffer(os.pread(descriptor, PAGE, int(pages[0]) * PAGE), dtype=np.float32)
    assert table.stored("exp_avg")[17, 0].item() in page


def test_memory_is_only_pretended(monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", "5e9")
    with read_page_by_page(4000):
        assert os.environ["SPEEDTRANSFER_HOST_BYTES"] == "1000"
    assert os.environ["SPEEDTRANSFER_HOST_BYTES"] == "5e9"


def test_no_page_is_wanted_twice():
    made = ColdTables(ROWS, seed=0)
    for _ in range(3):
        ids = made.ids(5, 16, 2)
        assert ids.shape == (5, 16, 2)
        assert len((ids // 16).unique()) == 160
        assert 0 <= ids.min() <= ids.max() < ROWS
        assert ((128 + ids % 16 * 256) // PAGE == (128 + ids % 16 * 256 + 255) // PAGE).all()
    assert ColdTables(10, seed=0).ids(100).max() < 10, "more ids than pages"


def small_prefetch(monkeypatch):
    monkeypatch.setattr(prefetch, "QUICK", prefetch.Sizes(examples=4, warm=5, steps=2, turns=1))
    return prefetch.groups(CPU, True, rows=ROWS, seed=1)


def test_every_method_on_a_file_is_measured(tables, monkeypatch):
    results, names = run_all(small_prefetch(monkeypatch))
    ahead = [f"prefetch, depth {depth}" for depth in (1, 2, 4)]
    reads = ["reads of the same pages on 1 thread", "reads of the same pages on 32 threads"]
    assert names == [["without prefetch", *ahead, "table in memory", *reads]] * 2
    assert [group.ran[0].payload_bytes for group in results] == [planes * 32 * PAGE for planes in (3, 1)]


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


def test_a_wrong_row_is_noticed(tables, monkeypatch):
    method = small_prefetch(monkeypatch)[0].make()[2].run.__self__
    method.before()
    method.run()
    method.check()
    emb = method.tables.in_file[0]
    monkeypatch.setattr(type(emb), "forward", lambda self, ids: torch.zeros(4, prefetch.FIELDS, COLD_DIM))
    with pytest.raises(AssertionError, match="not those of the table"):
        method.check()


def test_as_many_batches_are_read_ahead_as_are_taken(tables, monkeypatch):
    asked, used = [], SimpleNamespace(is_waiting=False, is_changed=lambda: False, part=None)
    monkeypatch.setattr(type(tables.in_file[0]), "prefetch", lambda self, ids: asked.append(ids) or used)
    method = prefetch._Runs(tables, prefetch._Dense(8, 4), prefetch.Sizes(4, 5, 6, 1), True, depth=4)
    method.before()
    assert len(asked) == 9
    method.run()
    assert len(asked) == 15


def test_what_is_hidden_is_said():
    for without, in_memory, ahead, said in (
        (50e-3, 10e-3, 30e-3, "50%"),
        (50e-3, 10e-3, 51e-3, "none"),
        (10e-3, 10e-3, 9e-3, "none"),
    ):
        times = {prefetch.WITHOUT: without, f"{prefetch.AHEAD}1": ahead, prefetch.IN_MEMORY: in_memory}
        group = GroupResult("a step", {}, [CaseResult(name, "ours", 0, [each] * 5) for name, each in times.items()])
        described = [prefetch.describe(group, case) for case in group.cases]
        assert described == ["", f"{said} of the waiting hidden", ""]


def test_hits_of_a_cache_are_those_computed(tables, monkeypatch):
    monkeypatch.setattr(cache, "_QUICK_LOOKUPS", 1000)
    (group,) = cache.groups(CPU, True, rows=ROWS)
    (found,), _ = run_all([group])
    by_counts, by_use = (found.cases[number].figures for number in (3, 4))
    assert by_counts["hit_share"] == pytest.approx(by_counts["computed_share"], abs=0.02)
    assert 0 < by_use["hit_share"] < 1
    assert cache.describe(found, found.cases[0]) == ""
    assert cache.describe(found, found.cases[4]).endswith("% computed")
    monkeypatch.setattr(cache, "expected_unique", lambda *about: 1e6)
    with pytest.raises(WrongResultError, match=r"hits where 0\.0% are computed"):
        measure(group, CPU, **FAST)
