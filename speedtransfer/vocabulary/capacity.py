"""How many ids a table may have rows for."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.system import physical_bytes
from speedtransfer.tables import Table

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

MaxCapacity = int | str | float | None


def check_max_capacity(limit: Any, capacity: int | None) -> MaxCapacity:
    """Return a valid limit of the number of ids; raise for anything else."""
    if limit is None or (isinstance(limit, float) and limit == math.inf):
        return limit
    if isinstance(limit, str):
        parse_bytes(limit)
        return limit
    if isinstance(limit, bool) or not isinstance(limit, numbers.Integral):
        raise InvalidTypeError(
            f"max_capacity is {limit!r} but must be a number of ids, bytes such as '48 GB', or math.inf; pass one of them"
        )
    number = check_size(limit, "max_capacity", 1)
    if capacity is not None and number < capacity:
        raise InvalidValueError(
            f"max_capacity is {number} but capacity is {capacity}; pass at least as many, or leave it out"
        )
    return number


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "48 GB" or "16GiB" names."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B\s*", text.upper())
    if found is None or found[2] == "I":
        raise InvalidValueError(f"max_capacity is {text!r} but must be a size such as '48 GB' or '16 GiB'; pass one")
    num_bytes = int(float(found[1]) * _UNITS[found[2]])
    if not num_bytes:
        raise InvalidValueError(
            f"max_capacity is {text!r}, which is less than one byte; pass more, or None for a table that does not grow"
        )
    return num_bytes


def share_of(capacity: int, ranks: int) -> int:
    """Return the number of ids that each of `ranks` processes has rows for, where there are to be rows for `capacity`.

    A hash spreads ids over processes: four standard deviations more than an even share, so that nearly always all fit.
    """
    even = -(-capacity // ranks)
    return min(capacity, even + math.ceil(4 * math.sqrt(even)))


def limit_of_each(limit: MaxCapacity, ranks: int) -> MaxCapacity:
    """Return the limit of each of `ranks` processes, where `limit` is that of all."""
    if isinstance(limit, int):
        return share_of(limit, ranks)
    return f"{parse_bytes(limit) // ranks} B" if isinstance(limit, str) else limit


def rows_within(limit: MaxCapacity, table: Table, reserved: int) -> int | None:
    """Return the number of ids that `table` may have rows for, by its planes as they are now; None: as the memory allows."""
    capacity = table.num_rows - reserved
    if limit is None:
        return capacity
    if isinstance(limit, str):
        row_bytes = max(table.nbytes // max(table.num_rows, 1), 1)
        return max(parse_bytes(limit) // row_bytes - reserved, capacity)
    return None if limit == math.inf else max(int(limit), capacity)


def most_rows(limit: MaxCapacity, num_rows: int, reserved: int, row_bytes: int) -> int | None:
    """Return the number of rows to keep addresses for in a table that may grow from `num_rows`; None: it does not grow."""
    if limit is None:
        return None
    if isinstance(limit, int):
        return max(limit + reserved, num_rows)
    num_bytes = parse_bytes(limit) if isinstance(limit, str) else physical_bytes() or 1 << 40
    return max(num_bytes // max(row_bytes, 1), num_rows)
