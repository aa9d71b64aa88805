"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

from speedtransfer.errors import InvalidValueError
from speedtransfer.planning.quantities import parse_bytes, parse_count, parse_number, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80 GB", 80e9),
        ("80GB", 80e9),
        (" 94 GiB ", 94 * 2**30),
        ("1.5 TB", 1.5e12),
        ("80e9", 80e9),
        ("8.0e+10", 80e9),
        ("80_000", 80_000),
        (".5 kB", 500),
        ("5. MB", 5e6),
        ("+7 B", 7),
        ("2 TiB", 2**41),
        ("16gib", 2**34),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("55.6 GB/s", 55.6e9), ("4.8TB/s", 4.8e12), ("2e10", 2e10)])
def test_rates(text, expected):
    assert parse_rate(text) == expected


def test_numbers():
    assert parse_number("1599") == 1599
    with pytest.raises(InvalidValueError, match="a number without a unit"):
        parse_number("1599 USD")


@pytest.mark.parametrize("text", ["0", "-1", "nan", ".nan", "inf", "-.inf", "1e999"])
@pytest.mark.parametrize(("parse", "unit"), [(parse_bytes, " GB"), (parse_rate, "GB/s"), (parse_number, "")])
def test_no_number_above_0(parse, unit, text):
    for written in (text, text + unit):
        with pytest.raises(InvalidValueError, match="must be finite and above 0; leave it out"):
            parse(written)


def test_counts():
    assert parse_count("8") == 8


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "", "x", "9" * 5000, "\u0663"])
def test_what_is_no_count(text):
    with pytest.raises(InvalidValueError, match="must be a whole number from 1 on"):
        parse_count(text)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_bytes, "much", "'much' but must be a size; write for instance 80 GB"),
        (parse_bytes, "", "'' but must be a size"),
        (parse_rate, "80 gb/s", "has the unit 'gb/s'; did you mean"),
        (parse_bytes, "80 GB/s", "has the unit 'GB/s'; did you mean"),
        (parse_rate, "80 GB", "has the unit 'GB'; did you mean"),
        (parse_rate, "80 Gb/s", "has the unit 'Gb/s'; did you mean"),  # bits
        (parse_rate, "0x10", "has the unit 'x10'"),
        (parse_bytes, "1_", "must be finite"),
        (parse_bytes, "1 2", "has the unit '2'"),
    ],
)
def test_what_is_no_quantity(parse, text, words):
    with pytest.raises(InvalidValueError) as caught:
        parse(text)
    assert words in str(caught.value)
