"""The values of a memory layer: a module of rows, of which some are read and added by weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn import DrawnRows, EmbeddingBag


class MemoryValues(DrawnRows, EmbeddingBag):
    """The values that a `MemoryLayer` makes where it is given none."""

    def __init__(self, num_values: int, dim: int, std: float, **options: Any) -> None:
        self.std = std
        super().__init__(num_values, dim, mode="sum", **options)


def check_values(values: Any, num_values: int, dim: int) -> None:
    """Raise unless `values` has the rows ``(num_values, dim)`` and adds no others than it reads."""
    if not isinstance(values, nn.Embedding | nn.EmbeddingBag):
        raise InvalidTypeError(
            f"values is a {type(values).__name__} but must be an EmbeddingBag or an Embedding; pass one of these"
        )
    if isinstance(values, nn.EmbeddingBag) and (values.mode != "sum" or values.include_last_offset):
        raise InvalidValueError(
            f"values has mode={values.mode!r} and include_last_offset={values.include_last_offset} but must add all that it "
            "reads; make it with mode='sum' and without include_last_offset"
        )
    if values.embedding_dim != dim:
        raise InvalidValueError(
            f"values are {values.embedding_dim} wide but value_dim is {dim}; pass value_dim={values.embedding_dim}"
        )
    # One with a vocabulary has as many as were used.
    if getattr(values, "vocabulary", None) is None and values.num_embeddings != num_values:
        raise InvalidValueError(
            f"values has {values.num_embeddings} rows but num_values is {num_values}; pass a module of {num_values} rows"
        )


def weighted_sum(values: Any, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of rows of `values` by weights, ``(b, dim)``, where `rows` and `weights` are ``(b, m)``."""
    if isinstance(values, nn.EmbeddingBag):
        bags: Tensor = values(rows, per_sample_weights=weights.to(values.weight.dtype))
        return bags
    return _weigh(_each(values, rows), weights).sum(1)


@uncompiled
def masked_sum(values: Any, rows: Tensor, weights: Tensor, trained: Tensor) -> Tensor:
    """Return what :func:`weighted_sum` does, with a gradient for all weights, and in `values` for the rows `trained`.

    The table gets a gradient for no other rows, zero neither, so that no optimizer counts them as used. How many are trained
    is known only when it runs, and so this is no part of a compiled graph.
    """
    chosen = torch.isin(rows, trained)
    others = weights.masked_fill(chosen, 0)
    with torch.no_grad():
        found = _each(values, rows) if weights.requires_grad else weighted_sum(values, rows, others)
    if weights.requires_grad:
        found = _weigh(found, others).sum(1)
    return found.index_add(0, chosen.nonzero()[:, 0], _weigh(_each(values, rows[chosen]), weights[chosen]))


def _each(values: Any, rows: Tensor) -> Tensor:
    """Return each row, ``(*rows.shape, dim)``."""
    found: Tensor = values(rows.reshape(-1, 1) if isinstance(values, nn.EmbeddingBag) else rows)
    return found.reshape(*rows.shape, values.embedding_dim)


def _weigh(found: Tensor, weights: Tensor) -> Tensor:
    return found * weights[..., None].to(found.dtype)
