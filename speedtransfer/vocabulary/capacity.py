"""How many ids a table may have rows for."""

from __future__ import annotations

import math
import numbers
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.system import physical_bytes
from speedtransfer.tables import Table
from speedtransfer.units import parse_bytes

MaxCapacity = int | str | float | None


def check_max_capacity(limit: Any) -> MaxCapacity:
    """Return a valid limit of the number of ids; raise for anything else."""
    if limit is None or (isinstance(limit, float) and limit == math.inf):
        return limit
    if isinstance(limit, str):
        bytes_of(limit)
        return limit
    if isinstance(limit, bool) or not isinstance(limit, numbers.Integral):
        raise InvalidTypeError(
            f"max_capacity is {limit!r} but must be a number of ids, bytes such as '48 GB', or math.inf; pass one of them"
        )
    return check_size(limit, "max_capacity", 1)


def bytes_of(text: str) -> int:
    """Return the bytes that a limit such as "48 GB" or "16GiB" names."""
    try:
        num_bytes = int(parse_bytes(text))
    except InvalidValueError as error:
        raise InvalidValueError(f"max_capacity is {error}") from None
    if not num_bytes or not text.strip().upper().endswith("B"):
        raise InvalidValueError(f"max_capacity is {text!r} but must be a size such as '48 GB' or '16 GiB'; pass one")
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
    return f"{bytes_of(limit) // ranks} B" if isinstance(limit, str) else limit


def rows_within(limit: MaxCapacity, table: Table, reserved: int) -> int | None:
    """Return the number of ids that `table` may have rows for, by its planes as they are now; None: as the memory allows."""
    capacity = table.num_rows - reserved
    if limit is None:
        return capacity
    if isinstance(limit, str):
        row_bytes = max(table.nbytes // max(table.num_rows, 1), 1)
        return max(bytes_of(limit) // row_bytes - reserved, capacity)
    return None if limit == math.inf else max(int(limit), capacity)


def most_rows(limit: MaxCapacity, num_rows: int, reserved: int, row_bytes: int) -> int | None:
    """Return the number of rows to keep addresses for in a table that may grow from `num_rows`; None: it does not grow."""
    if limit is None:
        return None
    if isinstance(limit, int):
        return max(limit + reserved, num_rows)
    num_bytes = bytes_of(limit) if isinstance(limit, str) else physical_bytes() or 1 << 40
    return max(num_bytes // max(row_bytes, 1), num_rows)
