"""How large the experiments of bench/experiments.py are, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from speedtransfer.system import physical_bytes

DIM = 128
ROW_BYTES = 4 * DIM
HOST_SHARE = 0.4  # of this machine's memory, for the tables of an experiment

# What is measured, and what measures it.
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


class Scale(NamedTuple):
    """How much of everything: rows of a small and a large table, lookups, steps that are timed, gigabytes of memory."""

    small: int = 1_000_000
    large: int = 16_000_000
    lookups: int = 131_072
    steps: int = 20
    gb: tuple[float, ...] = (2, 8)
    product: int = 8192

    def rows(self, wanted: int, planes: int) -> int:
        """Return as many rows as `wanted`, fewer where `planes` of them do not fit."""
        return min(wanted, int(self.room) // (planes * ROW_BYTES))

    @property
    def room(self) -> float:
        """Return the bytes that tables may take."""
        return HOST_SHARE * (physical_bytes() or 8e9)


TINY = Scale(2_000, 4_000, 512, 2, (1 / 256,), 64)
