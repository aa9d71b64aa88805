"""Sizes and rates as people write them: "80 GB", "94 GiB", "55.6 GB/s", 80e9."""

from __future__ import annotations

import math
import re

from speedtransfer.errors import InvalidValueError, suggest

_UNITS = {"B": 1.0, **{f"{letter}B": 1e3**n for n, letter in enumerate("kMGTP", 1)}}
_UNITS |= {f"{letter}iB": 1024.0**n for n, letter in enumerate("KMGTP", 1)}
_RATES = {f"{unit}/s": factor for unit, factor in _UNITS.items()}
_NUMBER = re.compile(
    r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?\.?(?:nan|inf(?:inity)?))\s*(.*)", re.IGNORECASE
)


def parse_bytes(text: str) -> float:
    """Return the bytes that `text` says: a number, or a number and a unit such as GB (1e9) or GiB (2**30), in any case.

    Raises
    ------
    InvalidValueError
        It is no such text, or no number above 0. The message begins with the text and names the rule, without a subject.
    """
    return _parse(text, _UNITS, "a size", "80 GB")


def parse_rate(text: str) -> float:
    """Return the bytes per second that `text` says: a number, or a number and a unit such as GB/s (1e9).

    Small letters are no units here: Gb/s is bits, to many.

    Raises
    ------
    InvalidValueError
        It is no such text, or no number above 0.
    """
    return _parse(text, _RATES, "a rate", "55.6 GB/s")


def parse_number(text: str) -> float:
    """Return a number above 0, as :func:`parse_bytes` does, without a unit."""
    return _parse(text, {}, "a number", "1599")


def parse_count(text: str) -> int:
    """Return a whole number from 1 on; raises as :func:`parse_bytes` does."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not int(text):
        raise InvalidValueError(f"{text!r} but must be a whole number from 1 on, below 1e9; write for instance 8")
    return int(text)


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise InvalidValueError(f"{text!r} but must be {what}; write for instance {example}")
    number, unit = found.groups()
    unit = next((each for each in units if units is _UNITS and each.lower() == unit.lower()), unit)
    if unit and unit not in units:
        if not units:
            raise InvalidValueError(f"{text!r} but must be a number without a unit; write for instance {example}")
        raise InvalidValueError(f"{text!r}, which has the unit {unit!r}{suggest(unit, units)}")
    value = float(number.lstrip("+").replace("_", "") if number[-1].isdigit() or number[-1] == "." else "nan")
    value *= units.get(unit, 1.0)
    if not math.isfinite(value) or value <= 0:
        raise InvalidValueError(f"{text!r} but must be finite and above 0; leave it out where it is not known")
    return value
