"""Count how n-grams share the rows of a hashed table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NgramStatistics(NamedTuple):
    """How the n-grams of some tokens share the rows of a table.

    Attributes
    ----------
    lookups : int
        Row numbers of all positions, those of padding too.
    rows_used : int
        Different rows among them.
    unique_share : float
        `rows_used` / `lookups`: the share of rows that a step of these tokens moves.
    ngrams : tuple of int
        Different n-grams of each order.
    collisions : tuple of float
        For each order, the share of different n-grams that share their row with another, mean of its heads.
    """

    lookups: int
    rows_used: int
    unique_share: float
    ngrams: tuple[int, ...]
    collisions: tuple[float, ...]


def count_rows(rows: Tensor, columns: Tensor, places: Sequence[Sequence[Tensor]], heads: int) -> NgramStatistics:
    """Count the rows of n-grams.

    Parameters
    ----------
    rows : Tensor
        ``(..., time, orders * heads)``, the row numbers.
    columns : Tensor
        ``(n, orders * heads)``, those of positions that have n-grams: not of padding.
    places : sequence of sequence of Tensor
        For each order the token in each place of the n-grams, ``(n,)``.
    heads : int
        Of each order.
    """
    ngrams, collisions = [], []
    for order, parts in enumerate(places):
        keys = torch.stack(list(parts), 1)
        different, which = torch.unique(keys, dim=0, return_inverse=True)
        ngrams.append(len(different))
        # A position of each different n-gram: all have the same rows.
        position = torch.empty(len(different), dtype=torch.int64, device=rows.device)
        position[which] = torch.arange(len(keys), device=rows.device)
        shared = 0.0
        for head in range(order * heads, (order + 1) * heads):
            _, inverse, counts = torch.unique(columns[position, head], return_inverse=True, return_counts=True)
            shared += float((counts[inverse] > 1).double().mean()) if len(position) else 0.0
        collisions.append(shared / heads)
    used = len(torch.unique(rows))
    return NgramStatistics(rows.numel(), used, used / max(rows.numel(), 1), tuple(ngrams), tuple(collisions))
