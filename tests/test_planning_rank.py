"""Machines in order: by a step's time, bandwidth or price, one GPU or several, each with the best configuration on it."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.footprint import Form
from speedtransfer.planning.machine import Machine, machine_given, published_machines
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.plan_picture import draw_ranking
from speedtransfer.planning.rank import (
    HOW_TO_PRICE,
    MEASURES,
    STEPS,
    Price,
    as_table,
    exchange_seconds,
    one_of,
    rank,
    rank_machines,
)
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.cost import StepCost, sharded_step
from speedtransfer.ranks.row_counts import expected_counts, row_form


def moved(machine: Machine) -> float:
    """A step that brings bytes over the link and reads them in the GPU's memory; 20 GB must fit."""
    if machine.figure("device_bytes") < 20e9:
        raise InvalidValueError(f"it needs 20 GB but {machine.name} has {machine.figure('device_bytes') / 1e9:g}")
    return 1e9 / machine.figure("link_up_bytes_per_s") + 1e9 / machine.figure("device_bytes_per_s")


def price(name: str, devices: int | None = None, *prices: float | None) -> dict[str, Price]:
    return {name.lower(): Price(name, *prices, devices=devices, currency="USD", date="2026", source=None)}


SLOW = Machine("slow", "a GPU", 24e9, 1e12, link="bus", link_up_bytes_per_s=1e10, link_down_bytes_per_s=1e10)
FAST = Machine("fast", "a GPU", 24e9, 5e11, link="bus", link_up_bytes_per_s=5e10, link_down_bytes_per_s=5e10)
SMALL = Machine("small", "a GPU", 8e9, 1e11, link_up_bytes_per_s=1e9)
CHEAP = price("slow", None, 100, 1000, 1) | price("fast", None, 1000, 2000, 3)  # steps of 0.101 and 0.022 s


def names(ranking) -> list[str]:
    return [each.machine.name for each in ranking.ranked]


def test_by_time():
    ranking = rank([SLOW, FAST, SMALL, Machine("empty")], moved)
    assert names(ranking) == ["fast", "slow"]
    assert ranking.ranked[0].seconds == pytest.approx(0.022)
    assert ranking.ranked[0].performance == pytest.approx(1 / 0.022)
    (small, reason), (_, unknown) = ranking.left_out
    assert (small, reason) == (SMALL, "it needs 20 GB but small has 8")
    assert "machine 'empty' has no figure device_bytes" in unknown
    ranking = rank(published_machines(), moved, devices=1)
    assert names(ranking)[0] == "gh200"
    assert {machine.name for machine, _ in ranking.left_out} == {"k80", "v100-pcie", "v100-sxm", "t4"}


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("bandwidth", ["slow", "fast"]),
        ("device-price", ["slow", "fast"]),  # 9.9 / 100 and 45 / 1000
        ("machine-price", ["fast", "slow"]),
        ("hour", ["fast", "slow"]),
    ],
)
def test_by_another_measure(by, expected):
    ranking = rank([SLOW, FAST], moved, by=by, prices=CHEAP)
    assert names(ranking) == expected
    values = [MEASURES[by].value(each) for each in ranking.ranked]
    assert values == sorted(values, reverse=True)


def test_what_has_no_price_comes_last_by_time():
    others = [Machine(name, "a GPU", 24e9, 1e12, link_up_bytes_per_s=up) for name, up in (("d", 1e11), ("c", 1e12))]
    ranking = rank([others[0], SLOW, others[1], FAST], moved, by="hour", prices=CHEAP)
    assert names(ranking) == ["fast", "slow", "c", "d"]
    assert ranking.ranked[0].cost == pytest.approx(3 * STEPS * 0.022 / 3600)
    assert ranking.ranked[2].cost is None


def test_as_many_machines_as_have_the_gpus():
    box = price("slow", 4, 10, 100, 1)
    for devices, machines in ((1, 1), (4, 1), (5, 2), (8, 2)):
        found = rank([SLOW], moved, devices=devices, prices=box).ranked[0]
        paid = (found.device_price, found.machine_price, found.hourly_price)
        assert paid == (10 * devices, 100 * machines, machines)
        assert found.performance == pytest.approx(devices / 0.101)
        assert found.bandwidth == devices * 1e12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "tim"}, "by is 'tim'; did you mean 'time'?"),
        ({"by": "hour"}, "no machine that fits has a hourly_price; give one in a file of prices (--prices"),
        ({"devices": 0}, "devices is 0 but must be at least 1"),
        (
            {"prices": price("fst", None, 1, None, None)},
            "a price is given for 'fst', which is not a machine; did you mean 'fast'",
        ),
    ],
)
def test_what_makes_no_sense(options, words):
    with pytest.raises(InvalidValueError, match=re.escape(words)):
        rank([SLOW, FAST], moved, **options)


def shown(ranking) -> tuple[str, list[list[str]]]:
    written = io.StringIO()
    Console(width=140, file=written).print(as_table(ranking))
    return " ".join(written.getvalue().split()), [line.split() for line in written.getvalue().splitlines()]


def test_how_it_is_shown():
    odd = Machine("[red]odd[/]", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e10)
    text, lines = shown(rank([SLOW, FAST, SMALL, odd], moved))
    assert ["fast", "22.0", "ms", "45.5", "1.00x", "500"] in lines
    assert ["slow", "101", "ms", "9.9", "0.22x", "1,000"] in lines
    for words in ("small: it needs 20 GB but small has 8", HOW_TO_PRICE, "[red]odd[/]"):
        assert words in text
    assert "USD" not in text
    text, lines = shown(rank([SLOW, FAST], moved, prices=CHEAP, by="hour", devices=2))
    assert "fast, 2 GPUs 22.0 ms" in text
    # Two machines of one GPU each, 6 USD an hour, 11,000 s for a million batches.
    fast = next(line for line in lines if line[:1] == ["fast,"])
    assert fast[-6:] == ["2,000", "0.46x", "4,000", "1.00x", "6.00", "18.33"]
    assert "by the cost of the steps, by the hour" in text
    assert HOW_TO_PRICE not in text
    assert "prices in USD, of 2026, as given" in text
    assert "the workload fits on none of the machines" in shown(rank([SMALL], moved))[0]


def test_data_and_a_picture(tmp_path):
    ranking = rank([SLOW, FAST, SMALL], moved, prices=CHEAP)
    data = ranking.data()
    assert json.loads(json.dumps(data)) == data
    fast, slow = data["ranked"]
    assert (fast["machine"], fast["devices"], fast["hourly_price"]) == ("fast", 1, 3)
    relative = {"time": 1, "bandwidth": 0.5, "device-price": 0.4591, "machine-price": 1, "hour": 1}
    assert fast["relative"] == pytest.approx(relative, rel=1e-3)
    assert slow["cost"] == pytest.approx(STEPS * 0.101 / 3600)
    assert data["left_out"] == [{"machine": "small", "devices": 1, "reason": "it needs 20 GB but small has 8"}]
    assert data["prices"][0]["name"] == "slow"
    draw_ranking(tmp_path / "a.png", ranking)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StorageError):
        draw_ranking(tmp_path / "none" / "a.png", rank([SLOW], moved))


# --- by the best configuration ------------------------------------------------------------------------------------------

BIG = Machine("big", "Test GPU", 90e9, 2e12, host_bytes=500e9, host_bytes_per_s=1e11, peer_bytes_per_s=1e11)
BIG = dataclasses.replace(BIG, link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)
FOUR = dataclasses.replace(BIG, name="four", devices=4)


def of(rows: int, optimizer: object = "AdamW", batch: int = 1_000_000):
    return make_workload((rows, 64), optimizer_given(optimizer), batch, 4, 0.0, None, "exact")


def test_the_best_configuration_counts():
    narrow = dataclasses.replace(BIG, name="narrow", device_bytes=20e9, link_up_bytes_per_s=1e10)
    ranking = rank_machines(of(100_000_000), [Form()], [narrow, BIG])
    assert names(ranking) == ["big", "narrow"]
    # 77 GB of planes: on the device of the one, in host memory of the other.
    for memory, machine, found in zip(("device", "pinned"), (BIG, narrow), ranking.ranked, strict=True):
        wanted = estimate_step(of(100_000_000), Form(), memory, machine)
        assert found.seconds == pytest.approx(wanted.ahead_s)


def test_what_does_not_fit_is_left_out_with_the_reasons():
    small = Machine("small", device="Small GPU", device_bytes=1e9, device_bytes_per_s=1e11)
    ranking = rank_machines(of(100_000_000, batch=1000), [Form(), Form("int8", "uint8")], [small, BIG])
    ((machine, reason),) = ranking.left_out
    assert machine == small
    assert reason.startswith("device: needs 20.8 GB of memory on the Small GPU, 1 GB are available; pinned: ")
    assert "how much 'small' has is not known" in reason


def test_several_gpus_share_the_rows_out():
    workload = of(100_000_000)
    found = rank_machines(workload, [Form()], [FOUR]).ranked[0]
    table = workload.tables[0]
    # Uniform ids: 16 million lookups of 4 processes, and of one 4 million.
    share = 1e8 * (1 - (1 - 1e-8) ** 16e6) / (4 * table.unique)
    cost = sharded_step([expected_counts(row_form(64, idle="exact"), table.unique, share, 4)], 4)
    features, unique = ((25_000_000, 4_000_000),), share * table.unique
    owned = dataclasses.replace(table, rows=25_000_000, features=features, unique=unique)
    alone = estimate_step(dataclasses.replace(workload, tables=(owned,)), Form(), "device", one_of(FOUR))
    assert found.seconds == pytest.approx(alone.ahead_s + exchange_seconds(FOUR, cost), rel=1e-6)
    assert found.performance == pytest.approx(4 / found.seconds)
    trained, frozen = (rank_machines(of(1_000_000, how), [Form()], [FOUR]).ranked[0] for how in ("SGD", None))
    assert frozen.seconds < trained.seconds, "frozen tables send no gradients"


def test_what_one_process_has():
    box = Machine("box", devices=4, host_bytes=400e9, pinned_bytes=200e9, host_bytes_per_s=1e11, device_bytes=8e9)
    machine = one_of(box)
    assert (machine.devices, machine.host_bytes, machine.pinned_bytes) == (1, 100e9, 50e9)
    assert (machine.device_bytes, machine.host_bytes_per_s, machine.link_up_bytes_per_s) == (8e9, 2.5e10, None)
    machine = one_of(machine_given("gb200"))  # no link is faster than its share of host memory
    assert machine.link_up_bytes_per_s == machine.host_bytes_per_s == 381e9 / 2


def test_rate_between_gpus():
    cost = StepCost(ids=1e9, rows=2e9, gradients=1e9, calls=10)
    assert exchange_seconds(Machine("x", peer_bytes_per_s=4e9), cost) == pytest.approx(1.0005)
    by_host = Machine("x", link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)
    assert exchange_seconds(by_host, cost) == pytest.approx(0.4005)
    with pytest.raises(InvalidValueError, match="has no figure link_down_bytes_per_s"):
        exchange_seconds(Machine("x"), cost)
