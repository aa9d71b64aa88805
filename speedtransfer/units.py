"""Numbers with units: formatted with three significant digits, and sizes and rates as people write them."""

from __future__ import annotations

import math
import re
from typing import Any

from speedtransfer.errors import InvalidValueError, suggest

_UNITS = {"B": 1.0, **{f"{letter}B": 1e3**n for n, letter in enumerate("kMGTP", 1)}}
_UNITS |= {f"{letter}iB": 1024.0**n for n, letter in enumerate("KMGTP", 1)}
_NUMBER = re.compile(r"([+-]?[\d_.]+(?:e[+-]?\d+)?|[+-]?\.?(?:nan|inf)) *(.*)", re.IGNORECASE)


def format_seconds(seconds: float | None) -> str:
    """Return a time such as "12.3 ms"; "" for None."""
    if seconds is None:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def format_rate(gb_per_s: float | None) -> str:
    """Return GB/s as a number; "" for None."""
    return "" if gb_per_s is None else _digits(gb_per_s)


def format_share(share: float | None) -> str:
    """Return a share as a percentage; "" for None."""
    return "" if share is None else f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def format_ratio(ratio: float) -> str:
    """Return "2.50x"."""
    return f"{_digits(ratio)}x"


def format_count(count: float) -> str:
    """Return a count such as "10M"."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return f"{count:,.0f}"


def parse_bytes(value: Any, per: str = "") -> float:
    """Return bytes: a number, or text such as "80 GB" (1e9) or "94 GiB" (2**30); with ``per="/s"`` a rate, "55 GB/s".

    Raises `InvalidValueError` if it is none, or not above 0; the message begins with the value, without a subject.
    """
    example = f"80 GB{per}"
    found = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    try:
        number, unit = float(found[1].replace("_", "")), found[2]  # type: ignore[index]
    except (TypeError, ValueError):
        what = "a rate" if per else "a size"
        raise InvalidValueError(f"{value!r} but must be {what}; write for instance {example}") from None
    # Gb/s is bits, to many.
    exact = {f"{name}{per}": factor for name, factor in _UNITS.items()}
    by_case = exact if per else {name.lower(): factor for name, factor in exact.items()}
    if unit and (unit if per else unit.lower()) not in by_case:
        raise InvalidValueError(f"{value!r}, which has the unit {unit!r}{suggest(unit, exact)}")
    number *= by_case[unit if per else unit.lower()] if unit else 1.0
    if not (math.isfinite(number) and number > 0):
        raise InvalidValueError(f"{value!r} but must be finite and above 0; leave it out where it is not known")
    return number


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
