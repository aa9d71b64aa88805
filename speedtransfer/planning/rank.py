"""Which machine is best for tables: by the time of a step, by memory bandwidth, or by what the steps cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_choice, check_size, suggest
from speedtransfer.planning.configurations import Option, best_option, make_options
from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.footprint import DEVICE, PAGEABLE, PINNED, Form
from speedtransfer.planning.hosts import counts_of, one_share
from speedtransfer.planning.machine import (
    Machine,
    mapping_of,
    parse_count,
    parse_text,
    parsed,
    published_machines,
    read_yaml,
)
from speedtransfer.planning.workload import Workload
from speedtransfer.ranks.cost import StepCost, sharded_step
from speedtransfer.text_table import text_table
from speedtransfer.units import format_ratio, format_seconds, parse_bytes

CALL_S = 50e-6  # of a collective call; a round number, and no machine's
_PRICES = ("device_price", "machine_price", "hourly_price")
_PARSERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_PRICES, parse_bytes),
    "devices": parse_count,
    **dict.fromkeys(("currency", "date", "source"), parse_text),
}
_SHARED = ("host_bytes", "disk_bytes", "host_bytes_per_s", "disk_bytes_per_s")


@dataclass(frozen=True)
class Price:
    """What a machine costs, from a user's file: prices change too often to come with a package.

    The prices are those of one GPU, of the whole machine, and of an hour of it; the last two are for a machine with so many
    `devices`, None: as many as the machine of that name has. The date is YYYY, YYYY-MM or YYYY-MM-DD.
    """

    name: str
    device_price: float | None
    machine_price: float | None
    hourly_price: float | None
    devices: int | None
    currency: str
    date: str
    source: str | None


def read_prices(path: str | Path) -> Mapping[str, Price]:
    """Return the prices in a YAML file by the name of the machine in lower case; each needs a price, currency and date."""
    found: dict[str, Price] = {}
    for name, given in read_yaml(Path(path), "prices of machines").items():
        label = f"{path}, {name!r}"
        entry = mapping_of(given, label, _PARSERS)
        price = Price(name, **{key: parsed(entry, key, parse, label) for key, parse in _PARSERS.items()})
        if not any(getattr(price, key) for key in _PRICES) or not price.currency:
            raise InvalidValueError(
                f"{label} has no price or no currency; write one of {', '.join(_PRICES)}, and currency"
            )
        if not re.fullmatch(r"\d{4}(-\d\d){0,2}", str(price.date)):
            raise InvalidValueError(
                f"{label}: date is {price.date!r} but must be one; write YYYY-MM-DD, YYYY-MM or YYYY"
            )
        found[name.lower()] = price
    currencies = {price.currency for price in found.values()}
    if len(currencies) != 1:
        raise InvalidValueError(f"{path} has the currencies {sorted(currencies)}; convert all prices to one")
    return found


# --- ranking ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked:
    """A machine that the workload fits on, with as many GPUs as are used, and the seconds of a step: a batch on each GPU.

    The prices are those of all GPUs that are used, of the machines that have them, and of an hour of these.
    """

    machine: Machine
    seconds: float
    device_price: float | None = None
    machine_price: float | None = None
    hourly_price: float | None = None

    @property
    def performance(self) -> float:
        """Batches per second: one of each GPU a step."""
        return self.machine.devices / self.seconds

    @property
    def bandwidth(self) -> float | None:
        """Bandwidth of the memory in which rows are computed, bytes per second: of all GPUs, or of the host without one."""
        machine = self.machine
        rate = machine.host_bytes_per_s if machine.device is None else machine.device_bytes_per_s
        return None if rate is None else rate * (1 if machine.device is None else machine.devices)


class Measure(NamedTuple):
    """An order, in words and in a picture: by a figure of `Ranked` of which more is better, or by performance over a price."""

    figure: str
    words: str
    title: str

    def value(self, each: Ranked) -> float | None:
        """Return what machines are ordered by; None where it is not known."""
        found: float | None = getattr(each, self.figure)
        return each.performance / found if found and self.figure in _PRICES else found


MEASURES = {
    "time": Measure("performance", "the time of a step", "batches/s"),
    "bandwidth": Measure("bandwidth", "memory bandwidth", ""),
    "device-price": Measure("device_price", "performance over the price of the GPUs", "per GPU price"),
    "machine-price": Measure("machine_price", "performance over the price of the machine", "per machine price"),
    "hour": Measure("hourly_price", "the cost of the steps, by the hour", "per hour"),
}


@dataclass(frozen=True)
class Ranking:
    """Machines in the order `by`, the best first, those without a value for it last; and those left out, with the reason."""

    by: str
    ranked: tuple[Ranked, ...]
    left_out: tuple[tuple[Machine, str], ...]
    prices: tuple[Price, ...] = ()

    def relative(self, measure: str) -> list[float | None]:
        """Return the values of a measure over the best of them, in the order of the ranking."""
        values = [MEASURES[measure].value(each) for each in self.ranked]
        best = max((value for value in values if value is not None), default=None)
        return [None if value is None or best is None else value / best for value in values]

    def data(self) -> dict[str, Any]:
        """Return it as plain data: rates in bytes per second, times in seconds, None for what is not known."""
        shares = {measure: self.relative(measure) for measure in MEASURES}
        ranked = [
            {
                "machine": each.machine.name,
                "device": each.machine.device,
                "devices": each.machine.devices,
                "step_s": each.seconds,
                "batches_per_s": each.performance,
                "bandwidth_bytes_per_s": each.bandwidth,
                **{price: getattr(each, price) for price in _PRICES},
                "relative": {measure: values[number] for measure, values in shares.items()},
                "sources": dict(each.machine.sources),
            }
            for number, each in enumerate(self.ranked)
        ]
        left_out = [{"machine": one.name, "devices": one.devices, "reason": reason} for one, reason in self.left_out]
        return {"by": self.by, "ranked": ranked, "left_out": left_out, "prices": list(map(asdict, self.prices))}

    def draw(self, path: Path) -> None:
        """Draw the values relative to the best as a PNG."""
        from speedtransfer.planning.plan_picture import draw_ranking  # drawing is loaded where it is wanted

        titled = {each.title: self.relative(name) for name, each in MEASURES.items() if each.title}
        columns = {title: values for title, values in titled.items() if any(value is not None for value in values)}
        draw_ranking(path, [f"{each.machine.name} ({each.machine.devices})" for each in self.ranked], columns)


def rank(
    machines: Sequence[Machine],
    estimate: Callable[[Machine], float],
    *,
    by: str = "time",
    devices: int | None = None,
    prices: Mapping[str, Price] | None = None,
) -> Ranking:
    """Return the machines in the order `by`, a key of `MEASURES`.

    `estimate` returns the time of a step on a machine; an error of this package that it raises is a reason to leave the
    machine out. Of each so many `devices` are used, by default its own; as many machines are paid for as have them.
    """
    check_choice(by, "by", MEASURES)
    if devices is not None:
        check_size(devices, "devices", 1)
    prices = prices or {}
    names = [machine.name.lower() for machine in [*machines, *published_machines().values()]]
    for key, price in prices.items():
        if key not in names:
            raise InvalidValueError(f"a price is given for {price.name!r}, which is not a machine{suggest(key, names)}")
    ranked, left_out = list[Ranked](), list[tuple[Machine, str]]()
    for machine in machines:
        used = machine if devices is None else replace(machine, devices=devices)
        try:
            seconds = estimate(used)
        except SpeedtransferError as error:
            left_out.append((used, str(error)))
            continue
        found = prices.get(machine.name.lower())
        whole = math.ceil(used.devices / ((found and found.devices) or machine.devices))  # machines
        counts = dict(zip(_PRICES, (used.devices, whole, whole), strict=True))
        paid = {name: each * counts[name] for name in _PRICES if (each := getattr(found, name, None)) is not None}
        ranked.append(Ranked(used, seconds, **paid))
    measure = MEASURES[by]
    if measure.figure in _PRICES and ranked and all(measure.value(each) is None for each in ranked):
        raise InvalidValueError(
            f"by is {by!r} but no machine that fits has a {measure.figure}; give one in a file of prices (--prices FILE.yaml)"
        )
    order = sorted(ranked, key=lambda each: (measure.value(each) is None, -(measure.value(each) or 0.0), each.seconds))
    return Ranking(by, tuple(order), tuple(left_out), tuple(prices.values()))


# --- by the best configuration ------------------------------------------------------------------------------------------


def step_seconds(workload: Workload, forms: Sequence[Form], machine: Machine, dense_s: float = 0.0) -> float:
    """Return the time of a step in the configuration that is best on a machine, with rows read ahead where that can be.

    On several GPUs each takes a batch, and the rows of every table are shared out (``process_group=``), so that torch's own
    modules are left out there. `dense_s` are the seconds of a step of the rest of the model.
    """
    ranks, one = machine.devices, one_of(machine) if machine.devices > 1 else machine
    owned = one_share(workload, ranks) if ranks > 1 else workload
    found = [
        replace(option, estimate=estimate_step(owned, option.form, option.memory, one))
        for option in make_options(owned, forms, one, dense_s)
        if ranks == 1 or option.is_table
    ]
    best, seconds = _best(found)
    if ranks == 1:
        return seconds
    cost = sharded_step(counts_of(workload, best.form, ranks), ranks, training=workload.trainer.make is not None)
    return seconds + exchange_seconds(machine, cost)


def one_of(machine: Machine) -> Machine:
    """Return what each of the processes of a machine has, one for each GPU: its GPU, its link and its share of the rest.

    Host memory has to feed all links at once: none is faster than its share of the host's bandwidth.
    """
    share: dict[str, Any] = {name: value / machine.devices for name in _SHARED if (value := getattr(machine, name))}
    host = share.get("host_bytes_per_s")
    for name in ("link_up_bytes_per_s", "link_down_bytes_per_s"):
        rate = getattr(machine, name)
        share[name] = rate if rate is None or host is None else min(rate, host)
    return replace(machine, devices=1, **share)


def exchange_seconds(machine: Machine, cost: StepCost) -> float:
    """Return the time of what the processes send one another in a step, nothing overlapping.

    Without a figure of its own it goes by way of host memory: down one link and up the other.
    """
    peer = machine.peer_bytes_per_s
    if peer is None:
        one = one_of(machine)
        peer = 1 / (1 / one.figure("link_down_bytes_per_s") + 1 / one.figure("link_up_bytes_per_s"))
    return cost.calls * CALL_S + cost.sent / peer


def _best(options: Sequence[Option]) -> tuple[Option, float]:
    """Return the best configuration and its time; raise with why the smallest of each memory does not fit."""
    best = best_option(options)
    if best is None:
        tables = sorted((option for option in options if option.is_table), key=lambda option: -option.total_bytes)
        reasons = {option.memory: option.reason for option in tables}
        host = PINNED if PINNED in reasons else PAGEABLE
        kept = (f"{memory}: {reasons[memory]}" for memory in (DEVICE, host) if memory in reasons)
        raise InvalidValueError("; ".join(kept))
    seconds = best.ahead_s or best.step_s
    if not seconds:
        raise InvalidValueError(f"a rate that rows in {best.memory!r} memory need is not known")
    return best, seconds


# --- as a table -----------------------------------------------------------------------------------------------------------


def as_table(ranking: Ranking) -> RenderableType:
    """Return what a console prints: the ranking, below it what was left out and why, and of when the prices are."""
    words = MEASURES[ranking.by].words
    parts: list[RenderableType] = [Text(f"by {words}; a step is a batch on each GPU; x: times the best\n")]
    if ranking.ranked:
        columns = {"": [_name(each.machine) for each in ranking.ranked], **_columns(ranking)}
        columns = {label: cells for label, cells in columns.items() if any(cells)}
        parts.append(text_table([*columns], zip(*columns.values(), strict=True), no_wrap=False))
    else:
        parts.append(Text("the workload fits on none of the machines"))
    lines = [f"  {_name(machine)}: {reason}" for machine, reason in ranking.left_out]
    parts += map(Text, ["\nleft out:", *lines] if lines else [])
    about = "prices are left out: give yours with --prices FILE.yaml; examples/prices.yaml shows how"
    if ranking.prices:
        dates = sorted(price.date for price in ranking.prices)
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        currency = ranking.prices[0].currency
        about = f"prices in {currency}, of {when}, as given; their sources are in the data (--json)"
    return Group(*parts, Text(f"\n{about}"))


def _columns(ranking: Ranking) -> dict[str, list[str]]:
    """Return the label and the cells of each column."""

    def cells(values: Iterable[float | None], show: Callable[[float], str]) -> list[str]:
        return ["" if value is None else show(value) for value in values]

    ranked, shares = ranking.ranked, {name: cells(ranking.relative(name), format_ratio) for name in MEASURES}
    return {
        "step": cells((each.seconds for each in ranked), format_seconds),
        "batches/s": cells((each.performance for each in ranked), lambda x: f"{x:,.3g}" if x < 1e3 else f"{x:,.0f}"),
        "x": shares["time"],
        "memory, GB/s": cells((each.bandwidth for each in ranked), lambda rate: f"{rate / 1e9:,.0f}"),
        "GPUs": cells((each.device_price for each in ranked), _money),
        "x per GPU price": shares["device-price"],
        "machine": cells((each.machine_price for each in ranked), _money),
        "x per machine price": shares["machine-price"],
        "hour": cells((each.hourly_price for each in ranked), _money),
    }


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:,.2f}" if value >= 0.0095 else f"{value:.2g}"


def _name(machine: Machine) -> str:
    return machine.name if machine.devices == 1 else f"{machine.name}, {machine.devices} GPUs"
