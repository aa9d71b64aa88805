"""Times that follow from figures: parts by hand, and the assumed costs of the host against what was counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtransfer.planning.estimate import CODEC_US, HOST, Estimate, disk_bytes, estimate_step, served_share
from speedtransfer.planning.footprint import (
    DENSE,
    DEVICE,
    MMAP,
    PINNED,
    Form,
    bytes_of,
    footprint,
    forms_for,
    memories,
    misfit,
    moved,
    sparse_way,
)
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import make_workload

COUNTED = Path(__file__).resolve().parents[1] / "bench" / "launches.json"
GPU = Machine(
    "gpu",
    device="GPU",
    device_bytes=80e9,
    device_bytes_per_s=2e12,
    link_up_bytes_per_s=50e9,
    link_down_bytes_per_s=40e9,
    host_bytes=500e9,
    host_bytes_per_s=200e9,
    disk_bytes=1e12,
    disk_bytes_per_s=1e9,
)


def workload(rows=1_000_000, dim=128, optimizer="AdamW", idle="lazy", **given):
    sizes = given.pop("sizes", (rows, dim))
    return make_workload(
        sizes, optimizer_given(optimizer), given.get("batch", 10_000), 1, given.get("zipf", 0.0), None, idle
    )


def test_bytes_on_the_bus_over_its_rate():
    work = workload()
    step, found = moved(work, Form()), estimate_step(work, Form(), PINNED, GPU)
    # Weights and two planes of state, of every distinct row, each way.
    assert step.up == step.down == pytest.approx(3 * 4 * 128 * work.unique)
    assert (found.up_s, found.down_s) == (pytest.approx(step.up / 50e9), pytest.approx(step.down / 40e9))
    half = estimate_step(work, Form(), PINNED, GPU, cached=0.5)
    assert half.up_s == pytest.approx(found.up_s / 2)
    assert estimate_step(work, Form(), DEVICE, GPU).up_s == 0


def test_overlap():
    found = Estimate(host_s=1, up_s=2, down_s=3, compute_s=4)
    assert (found.seconds, found.ahead_s, found.bound) == (10, 4, "bus")
    queued = Estimate(host_s=20, up_s=2, down_s=3, compute_s=4, queued=True)
    assert (queued.seconds, queued.ahead_s, queued.bound) == (20, 20, "host")


def test_a_dense_step_reads_and_writes_all_rows():
    work = workload(rows=50_000_000, optimizer="Adam")
    held = bytes_of(work, Form())
    found = estimate_step(work, Form(), DENSE, GPU)
    assert found.compute_s >= (4 * held.weight + 2 * held.state) / 2e12
    small = estimate_step(workload(rows=10_000, optimizer="Adam"), Form(), DENSE, GPU)
    assert found.compute_s > 100 * small.compute_s


def test_pages_that_memory_does_not_hold():
    work = workload(rows=1_000_000_000)
    assert disk_bytes(workload(), Form(), GPU) == 0
    most = disk_bytes(work, Form(), GPU)
    need = footprint(work, Form(), MMAP, GPU)
    assert 0 < most <= work.unique * 3 * 4096 * 2
    assert disk_bytes(work, Form(), Machine("m", host_bytes=need.host + need.disk)) == 0
    found = estimate_step(work, Form(), MMAP, GPU)
    assert (found.disk_s, found.bound) == (pytest.approx(most / 1e9), "disk")


def test_rates_that_are_not_known():
    assert estimate_step(workload(), Form(), PINNED, Machine("m", device="GPU", device_bytes=1e9)) is None
    assert estimate_step(workload(), Form(), "pageable", Machine("m", host_bytes=1e9)) is None
    cpu = estimate_step(workload(), Form(), "pageable", Machine("m", host_bytes=1e9, host_bytes_per_s=1e10))
    assert cpu.compute_s > 0
    assert cpu.up_s == 0


def test_shares_that_a_cache_serves():
    (nothing, some, most, everything) = served_share(workload(zipf=1.05), [0.0, 0.01, 0.5, 1.0])
    assert nothing == 0
    assert 0.01 < some < most < everything == pytest.approx(1)
    assert served_share(workload(zipf=0.0), [0.25]) == [pytest.approx(0.25)]


@pytest.mark.parametrize(
    ("kind", "one", "many"), [(DENSE, "dense", "dense, 26 tables"), ("lazy",) * 2 + ("lazy, 26 tables",),
                              ("exact",) * 2 + ("exact, 26 tables",)]
)  # fmt: skip
def test_the_host_costs_what_was_counted(kind, one, many):
    forms = json.loads(COUNTED.read_text(encoding="utf-8"))["forms"]
    cost = HOST[kind]
    launches = {name: sum(forms[name]["launches"].values()) for name in (one, many)}
    assert cost.first_us == pytest.approx(forms[one]["host_us"], rel=0.1)
    assert cost.first_us + 25 * cost.other_us == pytest.approx(forms[many]["host_us"], rel=0.1)
    assert cost.first_launches == pytest.approx(launches[one], rel=0.1)
    assert cost.first_launches + 25 * cost.other_launches == pytest.approx(launches[many], rel=0.1)


def test_the_host_costs_of_lookups_and_codecs_are_those_counted():
    forms = json.loads(COUNTED.read_text(encoding="utf-8"))["forms"]
    assert HOST["frozen"].first_us == pytest.approx(forms["evaluation"]["host_us"], rel=0.1)
    assert pytest.approx(forms["lazy, bfloat16"]["host_us"] - forms["lazy"]["host_us"], rel=0.1) == CODEC_US


def test_what_does_not_fit_is_said_in_words():
    work = workload(rows=1_000_000_000)
    assert memories(GPU) == ("device", "pinned", "pageable", "mmap")
    assert memories(Machine("m", host_bytes=1e9)) == ("pageable", "mmap")
    reason = misfit(footprint(work, Form(), PINNED, GPU), GPU)
    assert reason == "needs 1.54 TB of host memory, 500 GB are available"
    reason = misfit(footprint(work, Form(), DEVICE, GPU), GPU)
    assert reason.endswith("of memory on the GPU, 80 GB are available")
    unknown = Machine("m", device="GPU", device_bytes=1e12)
    assert "how much 'm' has is not known" in misfit(footprint(work, Form(), PINNED, unknown), unknown)
    locked = Machine("m", device="GPU", device_bytes=1e12, host_bytes=2e12, pinned_bytes=1e12)
    assert misfit(footprint(work, Form(), PINNED, locked), locked).startswith(
        "needs 1.54 TB of page-locked host memory"
    )


def test_forms_that_differ():
    assert [form.level for form in forms_for(workload(), None, None)] == [0, 1, 1, 1, 2, 2]
    assert {form.state for form in forms_for(workload(optimizer="SGD"), None, None)} == {"float32"}
    assert forms_for(workload(), "float16", None) == [Form("float16")]


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [("AdamW", ("SparseAdam", False)), ("SGD", ("SGD", True)), ("Adagrad", ("Adagrad", True)), ("Rprop", None),
     ("SGD(momentum=0.9)", None), ("SparseAdam", ("SparseAdam", True)), (None, None)],
)  # fmt: skip
def test_how_torch_trains_sparse_gradients(optimizer, found):
    way = sparse_way(workload(optimizer=optimizer))
    assert (None if way is None else (way.name, way.same)) == found
