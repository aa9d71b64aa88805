"""Formatting of numbers: three significant digits, with units."""

from __future__ import annotations


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


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
