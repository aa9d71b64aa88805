"""The suites but those of transfers: what they compare is what they say, and their checks notice what is wrong."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest
import torch

from speedtransfer.benchmark import memory, precision, step
from speedtransfer.benchmark.contenders import BY_HAND, DIM, PLANES, ROW_BYTES, contenders
from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import headlines
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.benchmark.training_step import Batches
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError
from speedtransfer.optim.probe import outcomes

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


def run_all(groups):
    """Measure every group once; every case must run."""
    found = [measure(group, CPU, **FAST) for group in groups]
    assert not [case.error for result in found for case in result.cases if case.error]
    assert not any(result.skipped for result in found)
    return found


# --- all of them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", [step, precision, memory])
@pytest.mark.parametrize("quick", [True, False])
def test_groups_take_options_of_others_and_make_nothing_yet(suite, quick):
    groups = suite.groups(CPU, quick, seed=3, table_bytes=1000, whatever=1)
    assert len({group.title for group in groups}) == len(groups)
    assert not quick or len(groups) <= len(suite.groups(CPU, False))
    assert suite.NOTE


@pytest.mark.parametrize("suite", [step, precision, memory])
def test_rows_of_the_table(suite):
    assert suite.groups(CPU, True, rows=500)[0].params["rows"] == 500
    with pytest.raises(InvalidValueError, match="rows is -1"):
        suite.groups(CPU, True, rows=-1)
    with pytest.raises(InvalidTypeError, match=r"rows is 1\.5"):
        suite.groups(CPU, True, rows=1.5)


# --- step ---------------------------------------------------------------------------------------------------------------


def test_sizes():
    assert list(step._sizes(10, 700)) == [10, 40, 160, 640]
    assert list(step._sizes(10, 1300)) == [10, 40, 160, 640, 1280]
    assert list(step._sizes(10, 90)) == [10, 20, 40, 80]
    assert list(step._sizes(10, 5)) == [10]  # too large a size is an error of its cases


def table_of(case):
    return case.run.__self__.model.tables[0].table


def test_every_size_sees_the_same_accesses():
    batches = Batches(1000, 300, 0)
    small, large = batches.ids(1000), batches.ids(64_000)
    for a, b in zip(small, large, strict=True):
        assert torch.equal(b // 64, a)
    touched = batches.touched(64_000)
    assert torch.equal(touched, torch.cat(large).unique())
    assert touched.max() < 64_000
    assert len((touched % 64).unique()) > 32  # not at equal distances


def test_a_step_moves_the_same_rows_whatever_the_size():
    rows = []
    for group in step.groups(CPU, True, rows=500, max_bytes=4_000_000)[:-2]:  # a small step and idle rows come last
        # A trial of the optimizer makes the first step read its rows again.
        outcomes._known.clear()
        case = group.make()[0]
        case.run()
        rows.append(table_of(case).stats().gathered_rows)
    assert len(rows) > 2
    assert len(set(rows)) == 1


NAMES = [
    "speedtransfer, pageable",
    "nn.Embedding(sparse=True) + SparseAdam",
    "nn.Embedding + AdamW",
    "speedtransfer, mmap",
]


def test_step_compares_every_contender_that_memory_holds_beside_the_others():
    groups = step.groups(CPU, True, rows=300, max_bytes=4_500_000)
    assert [group.params for group in groups[:-2]] == [
        {"experiment": "size", "rows": rows, "dim": DIM} for rows in (300, 600, 1200, 2400)
    ]
    small, next_one = run_all(groups[:2])
    assert [(case.name, case.role) for case in small.cases] == [
        (name, "ours" if name.startswith("speedtransfer") else "other") for name in NAMES
    ]
    assert [case.name for case in next_one.cases] == NAMES[:3]  # a large file would be on its way to the disk
    middle, large = (measure(group, CPU, **FAST) for group in groups[2:4])
    assert [case.name for case in middle.ran] == NAMES[:2]
    assert [case.name for case in large.ran] == NAMES[:1]
    assert middle.cases[2].error == (
        "takes 2.46 MB but the tables of a comparison may take 4.5 MB of the host's memory together, of which those beside it "
        "leave 814 kB"
    )


def test_a_large_table_in_a_file():
    group = step.groups(CPU, False, rows=300, max_bytes=4_500_000)[-1]
    assert group.params == {"experiment": "file", "rows": 1200, "dim": DIM}
    (found,) = run_all([group])
    assert [case.name for case in found.cases] == NAMES[3:]


def test_all_batches_have_been_taken_before_a_step_is_timed():
    case = step.groups(CPU, True, rows=300)[0].make()[0]
    case.run()
    case.check()
    ids = case.run.__self__.task.touched
    assert (table_of(case).plane("exp_avg_sq")[ids] > 0).any(dim=1).all()


def test_idle_rows_exact_beside_lazy():
    groups = step.groups(CPU, False, rows=300, max_bytes=4_500_000, history=30)
    groups = [group for group in groups if group.params["experiment"] == "idle rows"]
    assert [group.params for group in groups] == [
        {"experiment": "idle rows", "optimizer": optimizer, "rows": 300, "dim": DIM, "history": history}
        for optimizer, history in (("AdamW", 30), *((other, 10) for other in step.OTHERS))
    ]
    ours = ["speedtransfer, pageable", "speedtransfer, pageable, idle=exact"]
    assert [[case.name for case in found.cases] for found in run_all(groups)] == [
        [*ours, *NAMES[1:3]],
        ours,
        ours,
        ours,
    ]
    quick = step.groups(CPU, True, rows=300)
    assert quick[-1].params["history"] == step.QUICK_HISTORY


def test_many_tables():
    groups = step.groups(CPU, False, rows=300, max_bytes=4_500_000, history=4)
    groups = [group for group in groups if group.params["experiment"] == "many tables"]
    ours = ["speedtransfer, pageable", "speedtransfer, pageable, idle=exact"]
    (adamw,) = run_all(groups)
    assert [case.name for case in adamw.ran] == [*ours, *NAMES[1:3]]


def models(history=3):
    """Return a group for a small step, one for many tables and one for a whole table."""
    return list(step.model_groups(CPU, 300, seed=0, history=history))


def test_a_small_step():
    (found,) = run_all(models()[:1])
    ours = ["speedtransfer, pageable", "speedtransfer, pageable, idle=exact"]
    assert [case.name for case in found.ran] == [*ours, NAMES[1], BY_HAND]
    (line,) = headlines(SUITES["step"], [found])
    assert line.startswith("AdamW step, 64 uniform ids in 300 x 32 float32, after 3 steps: speedtransfer, pageable ")
    assert any(group.params["experiment"] == "small step" for group in step.groups(CPU, True, rows=300))


def test_a_table_used_as_a_whole():
    ours = ["speedtransfer, pageable", "speedtransfer, pageable, idle=exact"]
    (whole,) = run_all(models()[-1:])
    assert [case.name for case in whole.ran] == [*ours, NAMES[2]]


@pytest.mark.parametrize(
    ("group", "number"), [(group, number) for group, methods in enumerate((4, 4, 3)) for number in range(methods)]
)
def test_a_wrong_step_of_a_model_is_noticed(group, number):
    case = models(history=1)[group].make()[number]
    case.run()
    with torch.no_grad():
        next(case.run.__self__.model.parameters())[7] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


def idle_case(number):
    """Return a case of the first group of idle rows after its first step."""
    case = step.groups(CPU, True, rows=300, history=30)[-1].make()[number]
    case.run()
    return case, case.run.__self__


def test_idle_rows_have_gaps_and_ids_are_new():
    case, taken = idle_case(1)
    case.check()
    idle = table_of(case).read(torch.arange(300), ["idle.last_step"])["idle.last_step"]  # nothing is caught up
    now = idle.max()
    assert now == 1 + 14 + 30
    assert len(idle.unique()) > 5
    seen = [taken._turn().tolist() for _ in range(20)]
    assert len(set(map(tuple, seen))) == 20
    _, lazy = idle_case(0)
    assert [ids.tolist() for ids in lazy.task.timed[:20]] == seen


@pytest.mark.parametrize("number", range(4))
def test_a_wrong_step_with_idle_rows_is_noticed(number):
    case, taken = idle_case(number)
    row, emb = taken.task.checked[0][0], taken.model.tables[0]
    (emb.table.torch() if number < 2 else emb.weight.data)[row] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


@pytest.mark.parametrize("number", [0, 1])
def test_a_lazy_step_is_not_exact(number):
    case, taken = idle_case(number)
    taken.contender = replace(taken.contender, exact=not taken.contender.exact)
    with pytest.raises(AssertionError, match=r"not close|does not touch"):
        case.check()


def test_files_of_a_step_are_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    case = step.groups(CPU, True, rows=300)[0].make()[3]
    case.run()
    assert len(list(tmp_path.rglob("table.safetensors"))) == 1
    del case
    gc.collect()
    assert not list(tmp_path.iterdir())


def stepped(number):
    """Return a case after its first step, its plane of weights, a row that the step touched and one that it did not."""
    case = step.groups(CPU, True, rows=300)[0].make()[number]
    case.run()
    task, emb = case.run.__self__.task, case.run.__self__.model.tables[0]
    touched, first = task.touched, task.checked[0]
    plane = emb.table.torch() if number in (0, 3) else emb.weight.data
    return case, plane, first[0], touched[~torch.isin(touched, first)][0]


@pytest.mark.parametrize("number", range(4))
def test_a_wrong_step_is_noticed(number):
    case, plane, row, _ = stepped(number)
    plane[row] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()
    case, plane, _, idle = stepped(number)
    plane[idle] += 1e-6
    if number in (0, 3):
        with pytest.raises(AssertionError, match="rows that it does not touch"):
            case.check()
    else:
        case.check()  # a dense optimizer may


# --- precision ----------------------------------------------------------------------------------------------------------


def test_precision_compares_every_form_at_every_batch_size(monkeypatch):
    monkeypatch.setattr(precision, "_QUICK_STEPS", 12)
    found = run_all(precision.groups(CPU, True, rows=3000, seed=1))
    assert [result.params["batch"] for result in found] == [128, 512]
    for result in found:
        assert [case.name for case in result.cases] == [form.name for form in precision.FORMS]
        plain, *others = result.cases
        assert plain.figures["table_bytes"] == 3 * 3000 * ROW_BYTES == plain.memory["host_bytes"]
        shares = [case.figures["moved_bytes"] / plain.figures["moved_bytes"] for case in others]
        assert shares == [0.5, 0.5, 1.0, 0.2578125, 0.2578125, 0.2578125]
        assert all(0.4 < case.figures["loss"] < 0.75 for case in result.cases)


def test_a_training_that_goes_wrong_is_noticed():
    far, more = (precision._cases(CPU, 500, 64, 4, 0)[number] for number in (4, 2))
    far.run()
    far.run.__self__.reached["FP32"] = 0.1
    with pytest.raises(AssertionError, match=r"FP32 with 0\.1000"):
        far.check()
    more.run()
    more.run.__self__.model.rows.table.add_plane("more", 1)
    with pytest.raises(AssertionError, match="holds"):
        more.check()


def test_forms_start_from_the_same_model_and_see_the_same_batches():
    first, last = (case.run.__self__ for case in precision._cases(CPU, 500, 64, 4, 0)[::4])
    assert first.data is last.data
    for training in (first, last):
        training._build()
    assert torch.equal(first.model.mlp[0].weight, last.model.mlp[0].weight)


# --- memory -------------------------------------------------------------------------------------------------------------


def test_memory_of_a_table_in_a_process_of_its_own():
    """With more rows than one step takes."""
    taken = memory.measured("speedtransfer, pageable", "AdamW", 50_000, CPU)
    planes = PLANES["AdamW"] * 50_000 * ROW_BYTES
    assert planes <= taken["host_bytes"] <= planes + memory._BUFFERS_BYTES
    assert taken["device_bytes"] == 0


def test_a_process_of_its_own_leaves_the_fork_server_to_the_program(monkeypatch):
    """What that loads is one list for all processes of the program."""
    asked = []
    monkeypatch.setattr(
        "multiprocessing.context.BaseContext.set_forkserver_preload", lambda *names: asked.append(names)
    )
    assert memory.in_process(dict, {"host_bytes": 1}) == {"host_bytes": 1}
    assert not asked


def test_a_process_that_is_killed():
    with pytest.raises(HostMemoryError, match="the process that trains it ended before it was done"):
        memory.in_process(os._exit, 9)


def test_a_table_without_room():
    with pytest.raises(
        HostMemoryError,
        match=r"the process that trains it failed: plane 'weight' of 1000000000000 x 128 .* asks for 512 TB",
    ):
        memory.measured("speedtransfer, pageable", "AdamW", 10**12, CPU)


@pytest.mark.parametrize(("beyond", "fine"), [(1.0, True), (1.04, True), (1.06, False)])
def test_what_a_large_table_may_take_beyond_its_planes(monkeypatch, beyond, fine):
    asked = []

    def measured(contender, optimizer, rows, device):
        asked.append((contender, optimizer, rows))
        planes = next(one.planes for one in contenders(device, optimizer) if one.name == contender)
        return {"host_bytes": int(beyond * planes * rows * ROW_BYTES), "device_bytes": 0}

    monkeypatch.setattr(memory, "measured", measured)
    cases = memory.groups(CPU, False, rows=10_000_000)[0].make()
    assert [case.name for case in cases] == NAMES
    for case in cases:
        case.run()
        case.run()
        assert case.memory["device_bytes"] == 0
        if case.role == "other" or fine:
            case.check()
        else:
            with pytest.raises(AssertionError, match=r"6\.0% beyond the 15,360,000,000 of its planes"):
                case.check()
    assert asked == [(name, "AdamW", 10_000_000) for name in NAMES]  # once each


@pytest.mark.parametrize("share", [0.0, 0.94])
def test_less_than_its_planes_is_no_measurement(monkeypatch, share):
    def measured(contender, optimizer, rows, device):
        return {"host_bytes": int(share * 3 * rows * ROW_BYTES), "device_bytes": 0}

    monkeypatch.setattr(memory, "measured", measured)
    (found,) = (measure(group, CPU, **FAST) for group in memory.groups(CPU, True, rows=1_000_000))
    assert all("the measurement is wrong" in case.error and not case.samples_s for case in found.cases)
    assert len(found.cases) == 3


def test_page_locked_bytes_count_once():
    assert memory.with_page_locked(150, 1000) == 1150
    assert memory.with_page_locked(1150, 1000) == 1150


def test_groups_of_memory():
    adamw, sgd = memory.groups(CPU, False, rows=1000)
    assert adamw.params == {"rows": 1000, "dim": DIM, "optimizer": "AdamW", "planes_bytes": 3 * 1000 * ROW_BYTES}
    assert sgd.params == {"rows": 1000, "dim": DIM, "optimizer": "SGD", "planes_bytes": 1000 * ROW_BYTES}
    assert len(memory.groups(CPU, True)) == 1


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
    assert [contender.planes for contender in contenders(torch.device("cuda"), "SGD")] == [1, 1, 2, 1, 1, 1]
