"""Times and bytes of plans: parts by hand, costs as counted, ids as expected, memory as a process takes it."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import take_step
from optimizer_cases import BASE, some
from refusals import check_refused, refusals
from test_planning import gpu
from third_party import Lookahead

import speedtransfer as st
from speedtransfer.encoding import STATE_DTYPES, STORAGE_DTYPES
from speedtransfer.nn.sizing import StepBytes, table_size
from speedtransfer.planning.configurations import make_options
from speedtransfer.planning.estimate import CODEC_US, HOST, Estimate, disk_bytes, estimate_step, served_share
from speedtransfer.planning.footprint import DENSE, DEVICE, MMAP, PINNED, Form, footprint, misfit, moved, sparse_way
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.timed_trial import Draws
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.zipf import draw_ids, expected_cached, expected_unique

COUNTED = Path(__file__).resolve().parents[1] / "bench" / "launches.json"
GPU = replace(gpu(disk=1e12), link_down_bytes_per_s=40e9, disk_bytes_per_s=1e9)


def workload(rows=1_000_000, dim=128, optimizer="AdamW", idle="lazy", zipf=0.0):
    return make_workload((rows, dim), optimizer_given(optimizer), 10_000, 1, zipf, None, idle)


def test_bytes_on_the_bus_over_its_rate():
    work = workload()
    step, found = moved(work, Form()), estimate_step(work, Form(), PINNED, GPU)
    # Weights and two planes of state, of every distinct row, each way.
    assert step.up == step.down == pytest.approx(3 * 4 * 128 * work.unique)
    assert (found.up_s, found.down_s) == (pytest.approx(step.up / 50e9), pytest.approx(step.down / 40e9))
    assert estimate_step(work, Form(), DEVICE, GPU).up_s == 0
    # Rates that are not known.
    assert estimate_step(work, Form(), PINNED, Machine("m", device="GPU", device_bytes=1e9)) is None
    assert estimate_step(work, Form(), "pageable", Machine("m", host_bytes=1e9)) is None


def test_what_goes_on_at_once():
    work = workload()
    found, step = estimate_step(work, Form(), PINNED, GPU), moved(work, Form())
    assert found.both_ways_s == pytest.approx(2 / 3 * step.up / 50e9)
    device_s = found.compute_s + step.up / 3 / 50e9 + step.down / 40e9
    assert found.seconds == pytest.approx(max(found.host_s, device_s))
    assert replace(found, host_s=0).seconds == pytest.approx(device_s)
    others = [workload(optimizer=name) for name in ("Adagrad", "SGD", None)]
    for other in (*others, workload(idle="exact")):
        assert estimate_step(other, Form(), PINNED, GPU).both_ways_s == 0
    assert estimate_step(work, Form("bfloat16"), PINNED, GPU).both_ways_s == 0
    found = Estimate(host_s=1, up_s=2, down_s=3, compute_s=4)
    assert (found.seconds, found.ahead_s, found.bound) == (10, 4, "bus")
    queued = Estimate(host_s=20, up_s=2, down_s=3, compute_s=4, queued=True)
    assert (queued.seconds, queued.ahead_s, queued.bound) == (20, 20, "host")


def test_pages_that_memory_does_not_hold():
    work = workload(rows=1_000_000_000)
    assert disk_bytes(workload(), Form(), GPU) == 0
    most = disk_bytes(work, Form(), GPU)
    need = footprint(work, Form(), MMAP, GPU)
    assert need.disk == footprint(work, Form(), PINNED, GPU).host
    assert 0 < most <= work.unique * 3 * 4096 * 2
    assert disk_bytes(work, Form(), Machine("m", host_bytes=need.host + need.disk)) == 0
    found = estimate_step(work, Form(), MMAP, GPU)
    assert (found.disk_s, found.bound) == (pytest.approx(most / 1e9), "disk")


def test_shares_that_a_cache_serves():
    (nothing, some, most, everything) = served_share(workload(zipf=1.05), [0.0, 0.01, 0.5, 1.0])
    assert nothing == 0 < 0.01 < some < most < everything == pytest.approx(1)
    assert served_share(workload(zipf=0.0), [0.25]) == [pytest.approx(0.25)]


def test_the_host_costs_what_was_counted():
    forms = json.loads(COUNTED.read_text(encoding="utf-8"))["forms"]
    for name, kind in (("dense", DENSE), ("lazy", "lazy"), ("exact", "exact")):
        one, many, cost = forms[name], forms[f"{name}, 26 tables"], HOST[kind]
        assert cost.first_us == pytest.approx(one["host_us"], rel=0.1)
        assert cost.first_us + 25 * cost.other_us == pytest.approx(many["host_us"], rel=0.1)
        assert cost.first_launches == pytest.approx(sum(one["launches"].values()), rel=0.1)
        launches = cost.first_launches + 25 * cost.other_launches
        assert launches == pytest.approx(sum(many["launches"].values()), rel=0.1)
    assert HOST["frozen"].first_us == pytest.approx(forms["evaluation"]["host_us"], rel=0.1)
    assert pytest.approx(forms["lazy, bfloat16"]["host_us"] - forms["lazy"]["host_us"], rel=0.1) == CODEC_US


def test_what_does_not_fit_is_said_in_words():
    work = workload(rows=1_000_000_000)
    for machine, tables in ((GPU, ["device", "pinned"]), (Machine("m", host_bytes=1e9), [])):
        options = make_options(workload(), [Form()], machine)
        assert [option.memory for option in options if option.is_table] == [*tables, "pageable", "mmap"]
    reason = misfit(footprint(work, Form(), PINNED, GPU), GPU)
    assert reason == "needs 1.54 TB of host memory, 500 GB are available"
    reason = misfit(footprint(work, Form(), DEVICE, GPU), GPU)
    assert reason.endswith("of memory on the GPU, 80 GB are available")
    unknown = Machine("m", device="GPU", device_bytes=1e12)
    assert "how much 'm' has is not known" in misfit(footprint(work, Form(), PINNED, unknown), unknown)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [("AdamW", ("SparseAdam", False)), ("SGD", ("SGD", True)), ("Adagrad", ("Adagrad", True)), ("Rprop", None),
     ("SGD(momentum=0.9)", None), ("SparseAdam", ("SparseAdam", True)), (None, None)],
)  # fmt: skip
def test_how_torch_trains_sparse_gradients(optimizer, found):
    way = sparse_way(workload(optimizer=optimizer))
    assert (None if way is None else (way.name, way.same)) == found


# --- ids of trials -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "zipf"), [(5000, 1.05), (2_000_000, 0.8)])
def test_rows_that_a_cache_serves(rows, zipf):
    cached = [0, rows // 100, rows // 3, rows]
    found = expected_cached(rows, zipf, 10_000, cached)
    assert found[0] == 0
    assert found[-1] == pytest.approx(expected_unique(rows, zipf, 10_000))
    draw = np.random.default_rng(2)
    drawn = [np.unique(draw_ids(rows, zipf, 10_000, draw)) for _ in range(5)]
    for count, expected in zip(cached, found, strict=True):
        assert np.mean([(ids < count).sum() for ids in drawn]) == pytest.approx(expected, rel=0.05, abs=5)


@pytest.mark.parametrize("zipf", [0.0, 1.1])
@pytest.mark.parametrize(("rows", "kept"), [(10_000, 10_000), (10_000_019, 10_000)])
def test_a_smaller_table_has_as_many_distinct_rows(rows, kept, zipf):
    draws = Draws(rows, kept, 2000, zipf, 1.0, None, 0)
    steps = [draws.step() for _ in range(8)]
    assert all(len(ids) == 2000 and ids.min() >= 0 and ids.max() < kept for ids in steps)
    found = np.mean([len(np.unique(ids)) for ids in steps])
    assert found == pytest.approx(expected_unique(rows, zipf, 2000), rel=0.03)


def test_a_share_of_distinct_rows_with_their_lookups():
    whole, part = Draws(5000, 5000, 4000, 1.05, 1.0, None, 3), Draws(5000, 5000, 4000, 1.05, 0.25, None, 3)
    counts = [[(len(ids), len(np.unique(ids))) for ids in (draws.step() for _ in range(20))] for draws in (whole, part)]
    (all_ids, all_rows), (ids, rows) = (np.mean(count, axis=0) for count in counts)
    assert (rows, ids) == (pytest.approx(0.25 * all_rows, rel=0.02), pytest.approx(0.25 * all_ids, rel=0.25))
    ids = Draws(10_000, 500, 300, 1.05, 1.0, 40.0, 0).step()  # as many as were given
    assert (len(ids), len(np.unique(ids))) == (300, 40)


# --- computed bytes of tables are those of tables that are made and trained -------------------------------------------


ROWS = 1000


def trained(optimizer, dim, steps, sparse=False, **options):
    """A table after some steps, and the bytes that the last one moved of how many distinct rows."""
    emb = st.Embedding(ROWS, dim, sparse=sparse, device="cpu", memory="pageable", **options)
    opt = optimizer(emb.parameters())
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        emb.table.reset_stats()
        ids = torch.randint(0, ROWS, (300,), generator=draw)
        take_step(opt, emb(ids).square().sum())
    stats = emb.table.stats()
    return emb.table, len(ids.unique()), StepBytes(stats.gathered_bytes, stats.scattered_bytes)


def assert_right(size, table, distinct, moved):
    assert size.total_bytes == table.nbytes
    assert {plane.name: plane.row_bytes * ROWS for plane in size.planes} == {
        name: table.stored(name).nbytes for name in table.planes
    }
    assert [plane.dtype for plane in size.planes] == [table.stored(name).dtype for name in table.planes]
    parts = size.weight_bytes, size.scale_bytes, size.state_bytes, size.last_step_bytes
    assert sum(parts) == size.total_bytes
    assert size.weight_bytes == sum(table.stored(n).nbytes for n in table.planes if n in ("weight", "weight.low"))
    assert size.last_step_bytes == 4 * ROWS * size.exact
    assert size.step(distinct) == moved


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [1, 160, 300])
@pytest.mark.parametrize("storage", [None, *STORAGE_DTYPES])
@pytest.mark.parametrize("state", [None, *STATE_DTYPES])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_every_form(dim, storage, state, idle):
    options = {"storage_dtype": storage, "state_dtype": state, "idle": idle}
    assert_right(size := table_size(ROWS, dim, **options), *trained(torch.optim.AdamW, dim, 3, **options))
    assert size.exact == (idle == "exact")


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_every_optimizer(case):
    assert_right(table_size(ROWS, 24, case.make), *trained(case.make, 24, 3))


class Unknown(torch.optim.AdamW):
    """An optimizer that nothing is known of but what a probe finds."""


def test_state_that_is_made_late_counts():
    size = table_size(ROWS, 8, Lookahead)
    assert [plane.name for plane in size.planes] == ["weight", "slow"]
    assert_right(size, *trained(Lookahead, 8, 6, idle="lazy"))


def test_float64_frozen_tables_and_optimizers_of_sparse_gradients():
    assert_right(table_size(ROWS, 24, dtype=torch.float64), *trained(torch.optim.AdamW, 24, 2, dtype=torch.float64))
    size = table_size(ROWS, 24, torch.optim.SparseAdam)
    assert not size.exact
    assert_right(size, *trained(torch.optim.SparseAdam, 24, 2, sparse=True, idle="lazy"))
    assert not table_size(10, 8, Unknown).exact
    assert table_size(10, 8, functools.partial(torch.optim.SGD, momentum=0.9)).state_bytes == 320
    size = table_size(ROWS, 160, None, storage_dtype=torch.int8)
    assert (size.weight_bytes, size.scale_bytes, size.state_bytes) == (160_000, 4_000, 0)
    assert size.step(7) == (7 * 164, 0)


def test_nothing_outside_changes():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        size = table_size(ROWS, 8)
    assert torch.equal(torch.rand(3), wanted)
    assert size.total_bytes == ROWS * (3 * 32 + 4)
    if torch.__version__ >= "2.13":  # torch's own optimizers counted their steps on the default device
        with torch.device("meta"):
            assert table_size(ROWS, 8) == size


REFUSED = r"""
table_size(0, 8) -> InvalidValueError: rows is 0
table_size(10, 1.5) -> InvalidTypeError: dim is 1\.5
table_size(10, 8, storage_dtype=torch.int32) -> InvalidTypeError: storage_dtype is torch\.int32
table_size(10, 8, torch.optim.LBFGS) -> OptimizerError: LBFGS .*closure
table_size(10, 8, Unknown, idle="exact") -> OptimizerError: idle='exact' does not know what Unknown does
table_size(10, 8).step(11) -> InvalidValueError: distinct is 11 but must be from 0 to the number of rows, 10
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_what_cannot_be_is_refused(refusal):
    check_refused(refusal, table_size=table_size, torch=torch, Unknown=Unknown)
