"""Rankings of machines: orders, prices, several GPUs, tables and data."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.machine_files import load_machine, published_machines
from speedtransfer.planning.prices import Price
from speedtransfer.planning.rank import MEASURES, StepTime, rank
from speedtransfer.planning.rank_picture import draw_ranking
from speedtransfer.planning.several import exchange_seconds, one_of, peer_bytes_per_s
from speedtransfer.planning.shown_ranking import HOW_TO_PRICE, ranking_data, show_ranking
from speedtransfer.ranks.cost import StepCost
from speedtransfer.ranks.row_counts import row_form

BYTES = 1e9


def moved(machine: Machine) -> StepTime:
    """A step that brings bytes over the link and reads them in the GPU's memory; 20 GB must fit."""
    if machine.figure("device_bytes") < 20e9:
        return StepTime(None, f"it needs 20 GB but {machine.name} has {machine.figure('device_bytes') / 1e9:g}")
    return StepTime(BYTES / machine.figure("link_up_bytes_per_s") + BYTES / machine.figure("device_bytes_per_s"))


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
        values = [MEASURES[by](each) for each in ranking.ranked]
        assert values == sorted(values, reverse=True)

    def test_cost_of_steps(self):
        fast = rank([FAST, SLOW], moved, prices=CHEAP, steps=1e6).ranked[0]
        assert fast.cost(1e6) == pytest.approx(3 * 1e6 * 0.022 / 3600)
        assert rank([FAST], moved).ranked[0].cost(1e6) is None

    def test_what_has_no_price_comes_last_by_time(self):
        third = Machine("third", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e12)
        fourth = Machine("fourth", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e11)
        ranking = rank([fourth, SLOW, third, FAST], moved, by="hour", prices=CHEAP)
        assert names(ranking) == ["fast", "slow", "third", "fourth"]

    def test_a_figure_that_is_not_known_is_a_reason(self):
        ranking = rank([Machine("empty"), FAST], moved)
        assert names(ranking) == ["fast"]
        assert "machine 'empty' has no figure device_bytes" in ranking.left_out[0][1]

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_an_estimate_that_is_no_time(self, seconds):
        ranking = rank([FAST], lambda machine: StepTime(seconds))
        assert not ranking.ranked
        assert "must be finite and above 0" in ranking.left_out[0][1]

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

    def test_those_of_a_machines_own_file(self):
        own = Machine("own", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e10, devices=2, hourly_price=4, currency="USD")
        found = rank([own, SLOW], moved, by="hour", devices=3, prices=price("slow", hourly_price=1))
        assert {each.machine.name: each.hourly_price for each in found.ranked} == {"own": 8, "slow": 3}
        given = rank([own], moved, prices=price("OWN", hourly_price=5)).ranked[0]
        assert given.hourly_price == 5

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"by": "tim"}, "by is 'tim'; did you mean 'time'?"),
            ({"by": "hour"}, "no machine that fits has a hourly_price; give one in a file of prices (--prices"),
            ({"devices": 0}, "devices is 0 but must be at least 1"),
            ({"steps": 0}, "steps is 0 but must be finite and above 0"),
            ({"steps": float("nan")}, "steps is nan"),
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

    def test_no_machines(self):
        with pytest.raises(InvalidValueError, match="there are no machines to rank"):
            rank([], moved)

    def test_one_currency(self):
        own = Machine("own", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e10, hourly_price=4, currency="EUR")
        message = "the price of 'slow' is in USD but machine 'own' in EUR; convert all prices to one currency"
        with pytest.raises(InvalidValueError, match=message):
            rank([own, SLOW], moved, prices=price("slow", hourly_price=1))
        with pytest.raises(InvalidValueError, match="machine 'own' has a price and no currency"):
            rank([Machine("own", hourly_price=4)], moved)


class TestSeveral:
    FORM = row_form(64)

    def test_what_one_process_has(self):
        machine = Machine(
            "box", devices=4, host_bytes=400e9, pinned_bytes=200e9, host_bytes_per_s=1e11, device_bytes=8e9
        )
        machine = one_of(machine)
        assert (machine.devices, machine.host_bytes, machine.pinned_bytes) == (1, 100e9, 50e9)
        assert (machine.device_bytes, machine.host_bytes_per_s, machine.link_up_bytes_per_s) == (8e9, 2.5e10, None)

    def test_no_link_is_faster_than_its_share_of_host_memory(self):
        machine = one_of(load_machine("gb200"))
        assert machine.link_up_bytes_per_s == machine.host_bytes_per_s == 381e9 / 2

    def test_rate_between_gpus(self):
        assert peer_bytes_per_s(load_machine("h200")) == 380e9
        assert peer_bytes_per_s(Machine("x", link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)) == pytest.approx(
            1e10
        )
        with pytest.raises(InvalidValueError, match="has no figure link_down_bytes_per_s"):
            peer_bytes_per_s(Machine("x"))

    def test_exchange(self):
        cost = StepCost(ids=1e9, rows=2e9, gradients=1e9, calls=10)
        assert exchange_seconds(Machine("x", peer_bytes_per_s=4e9), cost, 1e-3) == pytest.approx(1.01)


def shown(ranking) -> str:
    written = io.StringIO()
    show_ranking(Console(width=140, file=written), ranking)
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
        data = ranking_data(rank([SLOW, FAST, SMALL], moved, prices=CHEAP, steps=100))
        assert json.loads(json.dumps(data)) == data
        fast, slow = data["ranked"]
        assert (fast["machine"], fast["devices"], fast["hourly_price"]) == ("fast", 1, 3)
        assert fast["relative"] == pytest.approx(
            {"time": 1, "bandwidth": 0.5, "device-price": 0.4591, "machine-price": 1, "hour": 1}, rel=1e-3
        )
        assert slow["cost"] == pytest.approx(100 * 0.101 / 3600)
        assert data["left_out"] == [{"machine": "small", "devices": 1, "reason": "it needs 20 GB but small has 8"}]
        assert data["prices"][0]["name"] == "slow"
        assert data["currency"] == "USD"


class TestPicture:
    def test_columns_are_those_that_are_known(self):
        pytest.importorskip("matplotlib")
        from speedtransfer.planning.rank_picture import _figure

        plain, priced = (_figure(rank([SLOW, FAST], moved, prices=prices)) for prices in (None, CHEAP))
        assert [axes.get_title(loc="left").split("\n")[0] for axes in plain.axes] == ["batches"]
        assert len(priced.axes) == 4
        widths = [[bar.get_width() for bar in axes.patches] for axes in priced.axes]
        assert widths[0] == pytest.approx([1, 0.022 / 0.101])
        assert all(max(each) == 1 for each in widths)

    def test_letters_do_not_overlap_and_are_large_enough_for_a_phone(self):
        pytest.importorskip("matplotlib")
        from speedtransfer.planning.rank_picture import _figure

        long = Machine(
            "a-machine-with-a-name-that-never-ends", "a GPU", 24e9, 1e12, link_up_bytes_per_s=1e10, devices=8
        )
        figure = _figure(rank([*published_machines(), long, SLOW, FAST], moved, prices=CHEAP))
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        letters = [*figure.axes[0].get_yticklabels(), *(axes.title for axes in figure.axes)]
        letters += [axes._left_title for axes in figure.axes]
        letters += [text for axes in figure.axes for text in axes.texts]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in letters if text.get_text()]
        page = figure.bbox
        for number, (text, box) in enumerate(boxes):
            assert page.x0 <= box.x0, text
            assert box.x1 <= page.x1, text
            assert page.y0 <= box.y0, text
            assert box.y1 <= page.y1, text
            for other, beside in boxes[number + 1 :]:
                apart = box.x1 <= beside.x0 or beside.x1 <= box.x0 or box.y1 <= beside.y0 or beside.y1 <= box.y0
                assert apart, (text, other)
        on_a_phone = 390 / figure.get_figwidth() / 72  # pixels of a point
        assert min(text.get_fontsize() for text in letters) * on_a_phone > 9

    def test_is_written(self, tmp_path):
        pytest.importorskip("matplotlib")
        ranking = rank([SLOW, FAST], moved, prices=CHEAP)
        for name in ("a.png", "a.svg"):
            draw_ranking(ranking, tmp_path / name)
            assert (tmp_path / name).stat().st_size > 1000
        width = int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big")
        assert 1195 <= width <= 1210

    def test_what_cannot_be_drawn(self, tmp_path):
        pytest.importorskip("matplotlib")
        ranking = rank([FAST], moved)
        with pytest.raises(InvalidValueError, match="there is nothing to draw"):
            draw_ranking(rank([SMALL], moved), tmp_path / "a.png")
        with pytest.raises(InvalidValueError, match=r"'a\.docx', whose ending is no format of pictures"):
            draw_ranking(ranking, tmp_path / "a.docx")
        with pytest.raises(StorageError, match="cannot write"):
            draw_ranking(ranking, tmp_path / "missing" / "a.png")
