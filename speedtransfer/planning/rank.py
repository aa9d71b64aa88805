"""Which machine is best for a workload: by the time of a step, by memory bandwidth, or by what the steps cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_size, suggest
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.machine_files import machine_names
from speedtransfer.planning.prices import Price

STEPS = 1e6
_HOUR_S = 3600.0


class StepTime(NamedTuple):
    """What an estimate says of a machine.

    Attributes
    ----------
    seconds : float or None
        Of a step in which each GPU of the machine takes a batch; None: the workload does not fit.
    reason : str
        Why it does not fit.
    """

    seconds: float | None
    reason: str = ""


Estimator = Callable[[Machine], StepTime]


@dataclass(frozen=True)
class Ranked:
    """A machine that the workload fits on.

    Attributes
    ----------
    machine : Machine
        With as many GPUs as are used.
    seconds : float
        Of a step.
    device_price, machine_price, hourly_price : float or None
        Of all GPUs that are used, of the machines that have them, and of an hour of these.
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
        if self.machine.device is None:
            return self.machine.host_bytes_per_s
        rate = self.machine.device_bytes_per_s
        return None if rate is None else rate * self.machine.devices

    def cost(self, steps: float) -> float | None:
        """Return what so many batches cost where the machine is paid by the hour."""
        return None if self.hourly_price is None else self.hourly_price * steps / self.performance / _HOUR_S

    def per(self, price: float | None) -> float | None:
        """Return the performance over a price; None where that is not known."""
        return None if price is None else self.performance / price


# The value of each order, of which more is better.
MEASURES: dict[str, Callable[[Ranked], float | None]] = {
    "time": lambda ranked: ranked.performance,
    "bandwidth": lambda ranked: ranked.bandwidth,
    "device-price": lambda ranked: ranked.per(ranked.device_price),
    "machine-price": lambda ranked: ranked.per(ranked.machine_price),
    "hour": lambda ranked: ranked.per(ranked.hourly_price),
}
PRICED = {"device-price": "device_price", "machine-price": "machine_price", "hour": "hourly_price"}


@dataclass(frozen=True)
class Ranking:
    """Machines in order, the best first.

    Attributes
    ----------
    by : str
        The order, one of `MEASURES`.
    steps : float
        Batches that a cost is of.
    ranked : tuple of Ranked
        Those without a value for the order come last.
    left_out : tuple of (Machine, str)
        Those that the workload does not fit on, or of which too little is known, with the reason.
    currency : str or None
        Of all prices; None where there is none.
    prices : tuple of Price
        Those that were used.
    """

    by: str
    steps: float
    ranked: tuple[Ranked, ...]
    left_out: tuple[tuple[Machine, str], ...]
    currency: str | None = None
    prices: tuple[Price, ...] = ()

    def has(self, measure: str) -> bool:
        """Tell whether any machine has a value for a measure of `MEASURES`."""
        return any(MEASURES[measure](ranked) is not None for ranked in self.ranked)


def rank(
    machines: Sequence[Machine],
    estimate: Estimator,
    *,
    by: str = "time",
    devices: int | None = None,
    prices: Mapping[str, Price] | None = None,
    steps: float = STEPS,
) -> Ranking:
    """Return the machines in the order of what they give for a workload.

    Parameters
    ----------
    machines : sequence of Machine
    estimate : callable
        The `StepTime` of the workload on a machine. An error of this package that it raises is a reason to leave the machine
        out, such as a figure that is not known of it.
    by : {"time", "bandwidth", "device-price", "machine-price", "hour"}
        Performance (batches per second), memory bandwidth, or performance over a price.
    devices : int, optional
        GPUs that are used; by default those of each machine. As many machines are paid for as have them.
    prices : mapping of str to Price, optional
        From :func:`read_prices`. Without it machines have the prices of their own files, if any.
    steps : float, default 1e6
        Batches that the cost of an hour is turned into the cost of, such as those of an epoch.

    Returns
    -------
    Ranking

    Raises
    ------
    InvalidValueError
        There is no such order; there are no machines; the order needs a price that no machine has; a price is of no machine;
        or prices are in several currencies.
    """
    if by not in MEASURES:
        raise InvalidValueError(f"by is {by!r}{suggest(by, MEASURES)}")
    if not machines:
        raise InvalidValueError("there are no machines to rank; name one at least")
    if not (math.isfinite(steps) and steps > 0):
        raise InvalidValueError(f"steps is {steps} but must be finite and above 0; pass for instance 1e6")
    if devices is not None:
        check_size(devices, "devices", 1)
    prices = prices or {}
    _check_names(prices, machines)
    ranked, left_out = list[Ranked](), list[tuple[Machine, str]]()
    for machine in machines:
        used = machine if devices is None else dataclasses.replace(machine, devices=devices)
        seconds, reason = _seconds(estimate, used)
        if seconds is None:
            left_out.append((used, reason))
        else:
            ranked.append(_priced(machine, used, seconds, prices.get(machine.name.lower())))
    measure = MEASURES[by]
    if by in PRICED and ranked and all(measure(each) is None for each in ranked):
        raise InvalidValueError(
            f"by is {by!r} but no machine that fits has a {PRICED[by]}; give one in a file of prices (--prices FILE.yaml)"
        )
    order = sorted(ranked, key=lambda each: (measure(each) is None, -(measure(each) or 0.0), each.seconds))
    used_prices = tuple(prices[key] for key in dict.fromkeys(m.name.lower() for m in machines) if key in prices)
    return Ranking(by, steps, tuple(order), tuple(left_out), _currency(machines, used_prices), used_prices)


def _seconds(estimate: Estimator, machine: Machine) -> tuple[float | None, str]:
    try:
        seconds, reason = estimate(machine)
    except SpeedtransferError as error:
        return None, str(error)
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        return None, f"the estimate of a step is {seconds} s, but must be finite and above 0"
    return seconds, reason


def _priced(machine: Machine, used: Machine, seconds: float, price: Price | None) -> Ranked:
    """Return the machine with what `used.devices` of its GPUs cost: a price given, or else that of the machine's own file."""

    def known(name: str) -> float | None:
        given: float | None = getattr(price, name, None)
        own: float | None = getattr(machine, name)
        return own if given is None else given

    def whole(name: str) -> float | None:
        """Return the price of as many whole machines as have the GPUs that are used."""
        one = known(name)
        of_price = price is not None and getattr(price, name) is not None
        have = (price.devices if price and of_price else None) or machine.devices
        return None if one is None else one * math.ceil(used.devices / have)

    device = known("device_price")
    return Ranked(
        used,
        seconds,
        device_price=None if device is None else device * used.devices,
        machine_price=whole("machine_price"),
        hourly_price=whole("hourly_price"),
    )


def _check_names(prices: Mapping[str, Price], machines: Sequence[Machine]) -> None:
    """Raise for a price that is of no machine: most likely the name is mistyped."""
    names = list(dict.fromkeys([*(machine.name for machine in machines), *machine_names()]))
    known = {name.lower() for name in names}
    for key, price in prices.items():
        if key not in known:
            raise InvalidValueError(
                f"a price is given for {price.name!r}, which is not a machine{suggest(price.name, names)}"
            )


def _currency(machines: Sequence[Machine], prices: Sequence[Price]) -> str | None:
    """Return the currency of all prices; raise where they have several."""
    found = {price.currency: f"the price of {price.name!r}" for price in prices}
    for machine in machines:
        if any(getattr(machine, name) is not None for name in PRICED.values()):
            if machine.currency is None:
                raise InvalidValueError(
                    f"machine {machine.name!r} has a price and no currency; add `currency:` to its file"
                )
            found.setdefault(machine.currency, f"machine {machine.name!r}")
    if len(found) > 1:
        (one, where), (other, elsewhere), *_ = found.items()
        raise InvalidValueError(
            f"{where} is in {one} but {elsewhere} in {other}; convert all prices to one currency before they are compared"
        )
    return next(iter(found), None)
