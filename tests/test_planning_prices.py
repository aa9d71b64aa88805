"""Prices from a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.planning.machine_files import machine_names
from speedtransfer.planning.prices import Price, read_prices

EXAMPLE = Path(__file__).parents[1] / "examples" / "prices.yaml"


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "prices.yaml"
        path.write_text(text)
        return path

    return write


def test_all_of_a_price(file):
    text = (
        "H200:\n  device_price: 32_000\n  hourly_price: 3.79\n  machine_price: 2.5e5\n  devices: 8\n  currency: EUR\n"
    )
    found = read_prices(
        file(text + "  date: 2026-05-07\n  source: a list\nl4: {device_price: 1, currency: EUR, date: 2026}")
    )
    assert found["h200"] == Price("H200", 32_000, 2.5e5, 3.79, 8, "EUR", "2026-05-07", "a list")
    assert found["l4"] == Price("l4", 1, None, None, None, "EUR", "2026", None)


def test_the_example_is_what_it_says():
    found = read_prices(EXAMPLE)
    assert {price.name for price in found.values()} <= set(machine_names())
    assert all(price.source and "://" in price.source and len(price.date) >= 4 for price in found.values())
    text = EXAMPLE.read_text()
    assert "examples" in text.split("\n\n")[0]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "the file is empty but must hold prices of machines"),
        ("{}", 1, "no prices are in the file"),
        ("- h200", 1, "prices of machines is a list"),
        ("h200: 5", 1, "the price of 'h200' is a single value but must be a mapping"),
        ("h200:\n  price: 5", 2, "'price' is not a key of the price of 'h200'; choose from 'device_price'"),
        ("h200:\n  device_price: 0", 2, "device_price is '0' but must be finite and above 0"),
        ("h200:\n  device_price: -1", 2, "device_price is '-1'"),
        ("h200:\n  device_price: .inf", 2, "device_price is '.inf'"),
        ("h200:\n  device_price: 5 USD", 2, "must be a number without a unit"),
        ("h200:\n  device_price: true", 2, "device_price is true"),
        ("h200:\n  date: 2026", 2, "has no price; write one of device_price, machine_price, hourly_price"),
        ("h200:\n  device_price: 5\n  date: 2026", 2, "has no currency; write `currency:`"),
        ("h200:\n  device_price: 5\n  currency: USD", 2, "has no date; write `date:`"),
        ("h200: {device_price: 5, currency: USD, date: May}", 1, "date is 'May' but must be a date"),
        ("h200: {device_price: 5, currency: USD, date: 2026-13}", 1, "date is '2026-13' but must be a date"),
        (
            "h200: {hourly_price: 5, currency: USD, date: 2026, devices: 0}",
            1,
            "devices is '0' but must be a whole number",
        ),
        ("a: {device_price: 5, currency: USD, date: 2026}\na: 1", 2, "'a' is given again, first on line 1"),
        (
            "a: {device_price: 5, currency: USD, date: 2026}\nA: {device_price: 5, currency: USD, date: 2026}",
            2,
            "'A' is given again, in other letters",
        ),
        (
            "a: {device_price: 5, currency: USD, date: 2026}\nb: {device_price: 5, currency: EUR, date: 2026}",
            2,
            "the price of 'b' is in EUR but that of 'a' in USD; convert all prices to one currency",
        ),
    ],
)
def test_every_mistake_names_file_and_line_in_one(file, text, line, words):
    path = file(text)
    with pytest.raises(InvalidValueError) as caught:
        read_prices(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ")
    assert words in message
    assert "\n" not in message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="is no file that is there; check the path"):
        read_prices(tmp_path / "prices.yaml")
