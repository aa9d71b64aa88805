"""Machines ranked for tables: the best configuration on each, one GPU or several."""

from __future__ import annotations

import dataclasses

import pytest

from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.footprint import Form
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.rank import exchange_seconds, one_of, rank_machines
from speedtransfer.planning.workload import Workload, make_workload
from speedtransfer.ranks.cost import sharded_step
from speedtransfer.ranks.row_counts import expected_counts, row_form

BIG = Machine(
    "big",
    device="Test GPU",
    device_bytes=90e9,
    device_bytes_per_s=2e12,
    link_up_bytes_per_s=2e10,
    link_down_bytes_per_s=2e10,
    host_bytes=500e9,
    host_bytes_per_s=1e11,
    peer_bytes_per_s=1e11,
)


def of(rows: int, optimizer: object = "AdamW", batch: int = 1_000_000) -> Workload:
    return make_workload((rows, 64), optimizer_given(optimizer), batch, 4, 0.0, None, "exact")


def test_the_best_configuration_counts():
    narrow = dataclasses.replace(BIG, name="narrow", device_bytes=20e9, link_up_bytes_per_s=1e10)
    ranking = rank_machines(of(100_000_000), [Form()], [narrow, BIG])
    assert [each.machine.name for each in ranking.ranked] == ["big", "narrow"]
    # 77 GB of planes: on the device of the one, in host memory of the other.
    for memory, machine, found in (("device", BIG, ranking.ranked[0]), ("pinned", narrow, ranking.ranked[1])):
        wanted = estimate_step(of(100_000_000), Form(), memory, machine)
        assert wanted is not None
        assert found.seconds == pytest.approx(wanted.ahead_s)


def test_what_does_not_fit_is_left_out_with_the_reasons():
    small = Machine("small", device="Small GPU", device_bytes=1e9, device_bytes_per_s=1e11)
    ranking = rank_machines(of(100_000_000, batch=1000), [Form(), Form("int8", "uint8")], [small, BIG])
    assert [machine.name for machine, _ in ranking.left_out] == ["small"]
    reason = ranking.left_out[0][1]
    assert reason.startswith("device: needs 20.8 GB of memory on the Small GPU, 1 GB are available; pinned: ")
    assert "how much 'small' has is not known" in reason


def test_several_gpus_share_the_rows_out():
    workload, four = of(100_000_000), dataclasses.replace(BIG, name="four", devices=4)
    found = rank_machines(workload, [Form()], [four]).ranked[0]
    table = workload.tables[0]
    form = row_form(64, idle="exact")
    # Uniform ids: 16 million lookups of 4 processes, and of one 4 million.
    together = 1e8 * (1 - (1 - 1e-8) ** 16e6)
    share = together / (4 * table.unique)
    cost = sharded_step([expected_counts(form, table.unique, share, 4)], 4)
    owned = dataclasses.replace(
        workload,
        tables=(
            dataclasses.replace(
                table, rows=25_000_000, features=((25_000_000, 4_000_000),), unique=share * table.unique
            ),
        ),
    )
    alone = estimate_step(owned, Form(), "device", one_of(four))
    assert alone is not None
    assert found.seconds == pytest.approx(alone.ahead_s + exchange_seconds(four, cost), rel=1e-6)
    assert found.performance == pytest.approx(4 / found.seconds)


def test_frozen_tables_send_no_gradients():
    four = dataclasses.replace(BIG, devices=4)
    trained, frozen = (rank_machines(of(1_000_000, how), [Form()], [four]).ranked[0] for how in ("SGD", None))
    assert frozen.seconds < trained.seconds
