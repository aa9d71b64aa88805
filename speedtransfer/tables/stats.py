"""What a table has moved so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TableStats:
    """Rows and bytes moved since the table was made or `Table.reset_stats` was called; every plane's rows count.

    Attributes
    ----------
    gathered_rows, scattered_rows : int
        Rows moved to and from the compute device (a row of three planes moved in one call counts once).
    gathered_bytes, scattered_bytes : int
        Their payload in bytes, all planes.
    cache_hits, cache_misses : int
        Rows served by a device cache, and not; zero without one.
    """

    gathered_rows: int = 0
    gathered_bytes: int = 0
    scattered_rows: int = 0
    scattered_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
