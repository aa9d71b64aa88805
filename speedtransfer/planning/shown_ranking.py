"""What a ranking of machines looks like in a terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.planning.rank import MEASURES, PRICED, Ranked, Ranking
from speedtransfer.units import format_count, format_ratio, format_seconds

HOW_TO_PRICE = (
    "prices are left out: give them with --prices FILE.yaml (machine: device_price, machine_price, hourly_price, currency, "
    "date, source); examples/prices.yaml shows how"
)
_BY = {
    "time": "the time of a step",
    "bandwidth": "memory bandwidth",
    "device-price": "performance over the price of the GPUs",
    "machine-price": "performance over the price of the machine",
    "hour": "the cost of the steps, by the hour",
}


def relative(ranking: Ranking, measure: str) -> list[float | None]:
    """Return the values of a measure over the best of them, in the order of the ranking."""
    values = [MEASURES[measure](each) for each in ranking.ranked]
    best = max((value for value in values if value is not None), default=None)
    return [None if value is None or best is None else value / best for value in values]


def show_ranking(console: Console, ranking: Ranking) -> None:
    """Print the ranking as a table; below it what was left out and why, and where the prices are from.

    Parameters
    ----------
    console : rich.console.Console
    ranking : Ranking
    """
    columns = _columns(ranking)
    console.print(Text(f"by {_BY[ranking.by]}; a step is a batch on each GPU; x: times the best\n"))
    table = TextTable("", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for label in columns:
        table.add_column(label, justify="right")
    cells = zip(*(make() for make in columns.values()), strict=True)
    for ranked, row in zip(ranking.ranked, cells, strict=True):
        table.add_row(Text(_name(ranked)), *row)
    if ranking.ranked:
        console.print(table)
    else:
        console.print(Text("the workload fits on none of the machines"))
    if ranking.left_out:
        console.print(Text("\nleft out:"))
        for machine, reason in ranking.left_out:
            console.print(Text(f"  {_count(machine.name, machine.devices)}: {reason}"))
    if not any(map(ranking.has, PRICED)):
        console.print(Text(f"\n{HOW_TO_PRICE}"))
    if ranking.prices:
        dates = sorted(price.date for price in ranking.prices)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        console.print(
            Text(f"\nprices in {ranking.currency}, of {when}, as given; their sources are in the data (--json)")
        )


def ranking_data(ranking: Ranking) -> dict[str, Any]:
    """Return the ranking as plain data: rates in bytes per second, times in seconds, None for what is not known."""
    shares = {measure: relative(ranking, measure) for measure in MEASURES}
    return {
        "by": ranking.by,
        "steps": ranking.steps,
        "currency": ranking.currency,
        "ranked": [
            {
                "machine": each.machine.name,
                "device": each.machine.device,
                "devices": each.machine.devices,
                "step_s": each.seconds,
                "batches_per_s": each.performance,
                "bandwidth_bytes_per_s": each.bandwidth,
                "device_price": each.device_price,
                "machine_price": each.machine_price,
                "hourly_price": each.hourly_price,
                "cost": each.cost(ranking.steps),
                "relative": {measure: values[number] for measure, values in shares.items()},
                "sources": dict(each.machine.sources),
            }
            for number, each in enumerate(ranking.ranked)
        ],
        "left_out": [
            {"machine": machine.name, "devices": machine.devices, "reason": reason}
            for machine, reason in ranking.left_out
        ],
        "prices": [vars(price) for price in ranking.prices],
    }


def _columns(ranking: Ranking) -> dict[str, Callable[[], list[str]]]:
    """Return what makes the cells of each column that has something to show."""
    money = ranking.currency or ""

    def shares(measure: str) -> Callable[[], list[str]]:
        return lambda: ["" if share is None else format_ratio(share) for share in relative(ranking, measure)]

    def figures(value: Callable[[Ranked], float | None], show: Callable[[float], str]) -> Callable[[], list[str]]:
        values = map(value, ranking.ranked)
        found = ["" if each is None else show(each) for each in values]
        return lambda: found

    columns = {
        "step": figures(lambda each: each.seconds, format_seconds),
        "batches/s": figures(
            lambda each: each.performance, lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        ),
        "x": shares("time"),
        "memory, GB/s": figures(lambda each: each.bandwidth, lambda value: f"{value / 1e9:,.0f}"),
    }
    if ranking.has("device-price"):
        columns[f"GPUs, {money}"] = figures(lambda each: each.device_price, _money)
        columns["x per GPU price"] = shares("device-price")
    if ranking.has("machine-price"):
        columns[f"machine, {money}"] = figures(lambda each: each.machine_price, _money)
        columns["x per machine price"] = shares("machine-price")
    if ranking.has("hour"):
        columns[f"hour, {money}"] = figures(lambda each: each.hourly_price, _money)
        columns[f"{format_count(ranking.steps)} batches, {money}"] = figures(
            lambda each: each.cost(ranking.steps), _money
        )
    return columns


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:,.2f}" if value >= 0.0095 else f"{value:.2g}"


def _name(ranked: Ranked) -> str:
    return _count(ranked.machine.name, ranked.machine.devices)


def _count(name: str, devices: int) -> str:
    return name if devices == 1 else f"{name}, {devices} GPUs"
