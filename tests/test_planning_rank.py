"""Rankings of machines: orders, prices, several GPUs, tables and data."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.planning.machine import Machine, machine_given, published_machines
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
    read_prices,
)
from speedtransfer.ranks.cost import StepCost

EXAMPLE = Path(__file__).parents[1] / "examples" / "prices.yaml"
BYTES = 1e9
USD = "device_price: 5, currency: USD, date: 2026"


def moved(machine: Machine) -> float:
    """A step that brings bytes over the link and reads them in the GPU's memory; 20 GB must fit."""
    if machine.figure("device_bytes") < 20e9:
        raise InvalidValueError(f"it needs 20 GB but {machine.name} has {machine.figure('device_bytes') / 1e9:g}")
    return BYTES / machine.figure("link_up_bytes_per_s") + BYTES / machine.figure("device_bytes_per_s")


def price(name: str, currency: str = "USD", devices: int | None = None, **prices: float) -> dict[str, Price]:
    known = {"device_price": None, "machine_price": None, "hourly_price": None, **prices}
    return {name.lower(): Price(name, **known, devices=devices, currency=currency, date="2026", source=None)}


SLOW = Machine("slow", "a GPU", 24e9, 1e12, link="bus", link_up_bytes_per_s=1e10, link_down_bytes_per_s=1e10)
FAST = Machine("fast", "a GPU", 24e9, 5e11, link="bus", link_up_bytes_per_s=5e10, link_down_bytes_per_s=5e10)
SMALL = Machine("small", "a GPU", 8e9, 1e11, link_up_bytes_per_s=1e9)
# Seconds of a step: 0.101 and 0.022.
CHEAP = price("slow", device_price=100, machine_price=1000, hourly_price=1) | price(
    "fast", device_price=1000, machine_price=2000, hourly_price=3
)


def names(ranking) -> list[str]:
    return [each.machine.name for each in ranking.ranked]


class TestOrders:
    def test_by_time(self):
        ranking = rank([SLOW, FAST, SMALL], moved)
        assert names(ranking) == ["fast", "slow"]
        assert ranking.ranked[0].seconds == pytest.approx(0.022)
        assert ranking.ranked[0].performance == pytest.approx(1 / 0.022)
        assert [(machine.name, reason) for machine, reason in ranking.left_out] == [
            ("small", "it needs 20 GB but small has 8")
        ]

    @pytest.mark.parametrize(
        ("by", "expected"),
        [
            ("time", ["fast", "slow"]),
            ("bandwidth", ["slow", "fast"]),
            ("device-price", ["slow", "fast"]),  # 9.9 / 100 and 45 / 1000
            ("machine-price", ["fast", "slow"]),
            ("hour", ["fast", "slow"]),
        ],
    )
    def test_each(self, by, expected):
        ranking = rank([SLOW, FAST], moved, by=by, prices=CHEAP)
        assert names(ranking) == expected
        values = [MEASURES[by].value(each) for each in ranking.ranked]
        assert values == sorted(values, reverse=True)

    def test_cost_of_steps(self):
        fast = rank([FAST, SLOW], moved, prices=CHEAP).ranked[0]
        assert fast.cost == pytest.approx(3 * STEPS * 0.022 / 3600)
        assert rank([FAST], moved).ranked[0].cost is None

    def test_what_has_no_price_comes_last_by_time(self):
        third = Machine("third", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e12)
        fourth = Machine("fourth", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e11)
        ranking = rank([fourth, SLOW, third, FAST], moved, by="hour", prices=CHEAP)
        assert names(ranking) == ["fast", "slow", "third", "fourth"]

    def test_a_figure_that_is_not_known_is_a_reason(self):
        ranking = rank([Machine("empty"), FAST], moved)
        assert names(ranking) == ["fast"]
        assert "machine 'empty' has no figure device_bytes" in ranking.left_out[0][1]

    def test_published_machines(self):
        ranking = rank(published_machines(), moved, devices=1)
        assert names(ranking)[0] == "gh200"
        assert {machine.name for machine, _ in ranking.left_out} == {"k80", "v100-pcie", "v100-sxm", "t4"}


class TestPrices:
    def test_as_many_machines_as_have_the_gpus(self):
        box = price("slow", device_price=10, machine_price=100, hourly_price=1, devices=4)
        for devices, machines in ((1, 1), (4, 1), (5, 2), (8, 2)):
            found = rank([SLOW], moved, devices=devices, prices=box).ranked[0]
            assert (found.device_price, found.machine_price, found.hourly_price) == (
                10 * devices,
                100 * machines,
                machines,
            )
            assert found.performance == pytest.approx(devices / 0.101)
            assert found.bandwidth == devices * 1e12

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"by": "tim"}, "by is 'tim'; did you mean 'time'?"),
            ({"by": "hour"}, "no machine that fits has a hourly_price; give one in a file of prices (--prices"),
            ({"devices": 0}, "devices is 0 but must be at least 1"),
            (
                {"prices": price("fst", device_price=1)},
                "a price is given for 'fst', which is not a machine; did you mean 'fast'",
            ),
        ],
    )
    def test_what_makes_no_sense(self, options, words):
        with pytest.raises(InvalidValueError) as caught:
            rank([SLOW, FAST], moved, **options)
        assert words in str(caught.value)

    def test_of_a_file(self, tmp_path):
        path = tmp_path / "prices.yaml"
        path.write_text(
            "H200: {device_price: 32_000, hourly_price: 3.79, machine_price: 2.5e5, devices: 8, currency: EUR, "
            "date: 2026-05-07, source: a list}\nl4: {device_price: 1, currency: EUR, date: 2026}"
        )
        found = read_prices(path)
        assert found["h200"] == Price("H200", 32_000, 2.5e5, 3.79, 8, "EUR", "2026-05-07", "a list")
        assert found["l4"] == Price("l4", 1, None, None, None, "EUR", "2026", None)
        found = read_prices(EXAMPLE)
        assert {each.name for each in found.values()} <= {machine.name for machine in published_machines()}
        assert all(each.source and "://" in each.source and len(each.date) >= 4 for each in found.values())

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "prices of machines must be a mapping"),
            ("{}", "has the currencies []"),
            ("h200: 5", "'h200' must be a mapping"),
            ("h200: {price: 5}", "has a key 'price'; choose from 'device_price'"),
            ("h200: {device_price: 0}", "device_price is 0 but must be finite and above 0"),
            ("h200: {device_price: true}", "device_price is True"),
            ("h200: {date: 2026}", "has no price or no currency; write one of device_price, machine_price, hourly"),
            ("h200: {device_price: 5, date: 2026}", "has no price or no currency"),
            ("h200: {device_price: 5, currency: USD}", "date is None but must be one"),
            ("h200: {device_price: 5, currency: USD, date: May}", "date is 'May' but must be one"),
            ("h200: {hourly_price: 5, currency: USD, date: 2026, devices: 0}", "devices is 0 but must be a whole"),
            (f"a: {{{USD}}}\nb: {{{USD.replace('USD', 'EUR')}}}", "['EUR', 'USD']; convert all prices to one"),
        ],
    )
    def test_every_mistake_in_a_file_names_it(self, tmp_path, text, words):
        path = tmp_path / "prices.yaml"
        path.write_text(text)
        with pytest.raises(InvalidValueError) as caught:
            read_prices(path)
        assert str(caught.value).startswith(str(path))
        assert words in str(caught.value)
        with pytest.raises(StorageError, match="is no file that is there; check the path"):
            read_prices(tmp_path / "none.yaml")


class TestSeveral:
    def test_what_one_process_has(self):
        machine = Machine(
            "box", devices=4, host_bytes=400e9, pinned_bytes=200e9, host_bytes_per_s=1e11, device_bytes=8e9
        )
        machine = one_of(machine)
        assert (machine.devices, machine.host_bytes, machine.pinned_bytes) == (1, 100e9, 50e9)
        assert (machine.device_bytes, machine.host_bytes_per_s, machine.link_up_bytes_per_s) == (8e9, 2.5e10, None)

    def test_no_link_is_faster_than_its_share_of_host_memory(self):
        machine = one_of(machine_given("gb200"))
        assert machine.link_up_bytes_per_s == machine.host_bytes_per_s == 381e9 / 2

    def test_rate_between_gpus(self):
        cost = StepCost(ids=1e9, rows=2e9, gradients=1e9, calls=10)
        assert exchange_seconds(Machine("x", peer_bytes_per_s=4e9), cost) == pytest.approx(1.0005)
        by_host = Machine("x", link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)
        assert exchange_seconds(by_host, cost) == pytest.approx(0.4005)
        with pytest.raises(InvalidValueError, match="has no figure link_down_bytes_per_s"):
            exchange_seconds(Machine("x"), cost)


def shown(ranking) -> str:
    written = io.StringIO()
    Console(width=140, file=written).print(as_table(ranking))
    return written.getvalue()


class TestShown:
    def test_without_prices(self):
        text = shown(rank([SLOW, FAST, SMALL], moved))
        lines = [line.split() for line in text.splitlines()]
        assert ["fast", "22.0", "ms", "45.5", "1.00x", "500"] in lines
        assert ["slow", "101", "ms", "9.9", "0.22x", "1,000"] in lines
        assert "small: it needs 20 GB but small has 8" in text
        assert HOW_TO_PRICE in " ".join(text.split())
        assert "USD" not in text

    def test_with_prices(self):
        text = shown(rank([SLOW, FAST], moved, prices=CHEAP, by="hour", devices=2))
        lines = [line.split() for line in text.splitlines()]
        assert "fast, 2 GPUs  22.0 ms" in text
        # Two machines of one GPU each, 6 USD an hour, 11,000 s for a million batches.
        fast = next(line for line in lines if line[:1] == ["fast,"])
        assert fast[-6:] == ["2,000", "0.46x", "4,000", "1.00x", "6.00", "18.33"]
        assert "by the cost of the steps, by the hour" in text
        assert HOW_TO_PRICE not in " ".join(text.split())
        assert "prices in USD, of 2026, as given" in text

    def test_nothing_fits(self):
        text = shown(rank([SMALL], moved))
        assert "the workload fits on none of the machines" in text

    def test_names_are_no_markup(self):
        odd = Machine("[red]odd[/]", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e10)
        assert "[red]odd[/]" in shown(rank([odd], moved))

    def test_data(self):
        data = rank([SLOW, FAST, SMALL], moved, prices=CHEAP).data()
        assert json.loads(json.dumps(data)) == data
        fast, slow = data["ranked"]
        assert (fast["machine"], fast["devices"], fast["hourly_price"]) == ("fast", 1, 3)
        assert fast["relative"] == pytest.approx(
            {"time": 1, "bandwidth": 0.5, "device-price": 0.4591, "machine-price": 1, "hour": 1}, rel=1e-3
        )
        assert slow["cost"] == pytest.approx(STEPS * 0.101 / 3600)
        assert data["left_out"] == [{"machine": "small", "devices": 1, "reason": "it needs 20 GB but small has 8"}]
        assert data["prices"][0]["name"] == "slow"


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    ranking = rank([SLOW, FAST], moved, prices=CHEAP)
    draw_ranking(tmp_path / "a.png", ranking)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StorageError):
        draw_ranking(tmp_path / "none" / "a.png", rank([SLOW], moved))
