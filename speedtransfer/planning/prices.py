"""Prices of machines, from a user's file alone: they change too often to come with a package."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from speedtransfer.errors import InvalidValueError
from speedtransfer.planning.located_yaml import YamlMapping, read_yaml
from speedtransfer.planning.quantities import parse_count, parse_number

_WHAT = "prices of machines"
_PRICES = ("device_price", "machine_price", "hourly_price")
_KEYS = (*_PRICES, "devices", "currency", "date", "source")


@dataclass(frozen=True)
class Price:
    """What a machine costs; a price that is not known is None.

    Attributes
    ----------
    name : str
        Of the machine.
    device_price : float or None
        Of one GPU.
    machine_price, hourly_price : float or None
        Of the whole machine, and of an hour of it.
    devices : int or None
        GPUs of the machine that those two are for; None: as many as the machine of that name has.
    currency, date : str
        The date as YYYY, YYYY-MM or YYYY-MM-DD.
    source : str or None
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
    """Return the prices in a YAML file, by the name of the machine in lower case.

    Parameters
    ----------
    path : str or Path
        A mapping of names of machines to mappings of ``device_price``, ``machine_price``, ``hourly_price`` (one of them at
        least), ``currency`` and ``date``; ``devices`` and ``source`` may be left out.

    Raises
    ------
    StorageError
        The file cannot be read.
    InvalidValueError
        It is wrong, by file and line; or not all prices are in one currency.
    """
    root = read_yaml(Path(path), _WHAT)
    found = dict[str, Price]()
    for name in root.keys:
        price = _price(name, root.mapping(name, f"the price of {name!r}"))
        first = next(iter(found.values()), price)
        if price.currency != first.currency:
            raise root.error(
                name,
                f"the price of {name!r} is in {price.currency} but that of {first.name!r} in {first.currency}; convert all "
                "prices to one currency",
            )
        if name.lower() in found:
            raise root.error(name, f"{name!r} is given again, in other letters; remove one of them")
        found[name.lower()] = price
    if not found:
        raise root.error(None, "no prices are in the file; write a machine's name and its prices below it")
    return found


def _price(name: str, entry: YamlMapping) -> Price:
    entry.check_keys(_KEYS)
    prices = {key: entry.parsed(key, parse_number) for key in _PRICES}
    if all(price is None for price in prices.values()):
        raise entry.error(None, f"the price of {name!r} has no price; write one of {', '.join(_PRICES)}")
    for key in ("currency", "date"):
        if not entry.text(key):
            raise entry.error(None, f"the price of {name!r} has no {key}; write `{key}:`")
    return Price(
        name,
        **prices,
        devices=entry.parsed("devices", parse_count),
        currency=str(entry.text("currency")),
        date=str(entry.parsed("date", _parse_date)),
        source=entry.text("source"),
    )


def _parse_date(text: str) -> str:
    if re.fullmatch(r"\d{4}(-\d\d){0,2}", text):
        try:
            datetime.date.fromisoformat((text + "-01-01")[:10])
            return text
        except ValueError:
            pass
    raise InvalidValueError(f"{text!r} but must be a date; write YYYY-MM-DD, YYYY-MM or YYYY")
