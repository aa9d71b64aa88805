"""Count the rows and bytes that a table moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtransfer.cuda import is_capturing
from speedtransfer.once import fork_safe_lock


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
        Of the rows gathered from planes with columns, those that the cache had of every plane, and the others; zero without
        one. A row that does not exist is neither.
    cache_hit_bytes, cache_miss_bytes : int
        Their payload in bytes, all planes: what the cache has kept from crossing the bus, and what has crossed it.
    """

    gathered_rows: int = 0
    gathered_bytes: int = 0
    scattered_rows: int = 0
    scattered_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_hit_bytes: int = 0
    cache_miss_bytes: int = 0

    def __repr__(self) -> str:
        """Return the numbers by name; those of a cache where there was one."""
        shown = {name: number for name, number in vars(self).items() if number or not name.startswith("cache_")}
        return f"TableStats({', '.join(f'{name}={number}' for name, number in shown.items())})"

    def add(self, numbers: Mapping[str, int]) -> None:
        """Add `numbers`, by name."""
        for name, number in numbers.items():
            setattr(self, name, getattr(self, name) + number)


class PaddedStats:
    """Rows and bytes moved by padded ids: counted on the device until they are read."""

    _MAX_COUNTS = 256

    def __init__(self) -> None:
        # By what they count, "gathered" or "scattered", bytes a row, and the device.
        self._counts: dict[tuple[str, int, torch.device], list[Tensor]] = {}
        # Threads that evaluate count as well.
        self._lock = fork_safe_lock()

    def add(self, kind: str, count: Tensor, rows: Sequence[Tensor]) -> None:
        """Count `rows`, each (n, width), moved for padded ids, of which `count` (1,) name one; in a CUDA graph nothing."""
        if is_capturing():
            return
        row_bytes = sum(values.shape[1] * values.element_size() for values in rows)
        with self._lock:
            counts = self._counts.setdefault((kind, row_bytes, count.device), [])
            counts.append(count)
            if len(counts) == self._MAX_COUNTS:
                counts[:] = [torch.cat(counts).sum().view(1)]

    def total(self) -> dict[str, int]:
        """Return the numbers by their name in `TableStats`; the host waits for them."""
        found = dict.fromkeys(("gathered_rows", "gathered_bytes", "scattered_rows", "scattered_bytes"), 0)
        with self._lock:
            numbers = {key: sum(int(count) for count in counts) for key, counts in self._counts.items()}
        for (kind, row_bytes, _), number in numbers.items():
            found[f"{kind}_rows"] += number
            found[f"{kind}_bytes"] += number * row_bytes
        return found


# Held by who counts: threads that train, evaluate or read ahead. One for all tables. Garbage that is collected meanwhile may
# want it too.
counting = fork_safe_lock()
# Held by who adds to the logs of a table, or lists them.
logging = fork_safe_lock()
