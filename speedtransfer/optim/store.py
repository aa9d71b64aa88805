"""Rows of a table as an optimizer computes with them: the one way in and out that handles and their state use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speedtransfer.tables import Table

# Encoding -> function from raw rows, by part, to the values they stand for. A checkpoint is decoded without a store.
DECODERS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {"plain": lambda parts: parts[""]}


class RowStore:
    """Reads and writes rows of a table's planes.

    Parameters
    ----------
    table : Table
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._tails: dict[str, tuple[int, ...]] = {"weight": (table.dim,)}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the weights are computed with."""
        return self.table.dtype

    def read(self, ids: Tensor, planes: Sequence[str]) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), known to be good, of each plane: ``(n, *tail)`` on the compute device."""
        rows = self.table.gather(ids, planes, check=False)
        return {name: values.view(len(ids), *self._tails[name]) for name, values in rows.items()}

    def write(self, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Set the rows `ids` (n,), none twice, of each plane to ``(n, *tail)`` values on the compute device."""
        flat = {name: v.reshape(len(ids), math.prod(self._tails[name])).contiguous() for name, v in rows.items()}
        self.table.scatter(ids, flat, check=False)

    def add(self, name: str, tail: tuple[int, ...], dtype: torch.dtype, start: float | None) -> None:
        """Add a plane of `tail` values a row, each `start`; None: a copy of the weights."""
        fill = self.table.plane("weight") if start is None else start
        self.table.add_plane(name, math.prod(tail), dtype, fill=fill)
        self._tails[name] = tail

    def drop(self, name: str) -> None:
        """Forget a plane."""
        self.table.drop_plane(name)
        del self._tails[name]

    def whole(self, name: str) -> Tensor:
        """Return the whole of a plane, ``(num_rows, *tail)``: what a state dict shows. It lives where the memory is."""
        return self.table.plane(name).view(self.table.num_rows, *self._tails[name])

    # --- how planes are stored: what a checkpoint copies --------------------------------------------------------------

    def encoding(self, name: str) -> str:
        """Return the name of the way in which a plane is stored."""
        return "plain"

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the raw whole planes that make up a plane, each of `num_rows` rows; rows written to them are there."""
        return {"": self.whole(name)}

    def decode(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        """Return the values ``(n, *tail)`` of raw rows of a plane, given by part."""
        return DECODERS[self.encoding(name)](parts)

    def encode(self, name: str, values: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Return the raw rows, by part, that stand for `values` ``(n, *tail)`` in the rows `ids` (n,)."""
        return {"": values}

    def state_dict(self) -> dict[str, int]:
        """Return the counters that the next writes depend on, beside the planes themselves."""
        return {}

    def load_state_dict(self, counters: dict[str, int]) -> None:
        """Go on from the `counters` of a state dict."""
