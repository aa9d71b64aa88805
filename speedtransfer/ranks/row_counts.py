"""How many bytes a row has in a table and on its way to another process, and how many rows a lookup asks of whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speedtransfer.encoding import check_dtypes, codec_for


@dataclass(frozen=True)
class RowForm:
    """Bytes of a row: its weights in the table and on their way from an owner, its state, its gradient on the way back."""

    stored: int
    state: int
    sent: int
    gradient: int


def row_form(
    dim: int,
    dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    comm_dtype: torch.dtype | None = None,
    *,
    state_planes: int = 2,
    idle: str = "lazy",
    max_norm: bool = False,
    scale_block: int | None = None,
) -> RowForm:
    """Return the bytes of a row of a table made with these arguments of :class:`speedtransfer.Embedding`.

    Owners send rows as they are stored, but decoded (float32) with ``idle="exact"`` or `max_norm`, where they change rows
    before they send them. `state_planes` is the number of tensors of the shape of the weights in the optimizer's state: 2 of
    AdamW, 1 of SGD with momentum, 0 of SGD.
    """
    check_dtypes(dtype, storage_dtype, state_dtype, scale_block)
    computed = dtype if storage_dtype is None else torch.float32
    plain = _bytes_of(dim, computed, computed)
    stored = _bytes_of(dim, computed, storage_dtype or computed, scale_block)
    # Exact rows also keep the step that they were last touched at, an int32.
    state = state_planes * _bytes_of(dim, computed, state_dtype or computed) + 4 * (idle == "exact")
    sent = plain if idle == "exact" or max_norm else stored
    return RowForm(stored, state, sent, _bytes_of(dim, computed, comm_dtype or computed))


def _bytes_of(dim: int, computed: torch.dtype, stored: torch.dtype, scale_block: int | None = None) -> int:
    codec = codec_for(dim, computed, stored, scale_block)
    return sum(part.width * part.dtype.itemsize for part in codec.parts.values())


@dataclass(frozen=True)
class RowCounts:
    """Rows of one lookup, from the view of one process: distinct ones that it looks up, and those of them that others own.

    And what it serves: distinct rows that it owns and that any process looks up, and rows that others ask it for, where a row
    that two of them ask for counts twice.
    """

    form: RowForm
    asked: float
    asked_of_others: float
    served: float
    served_to_others: float


def expected_counts(form: RowForm, unique: float, distinct_share: float, ranks: int) -> RowCounts:
    """Return the counts of a mean process if rows are spread evenly over `ranks` owners.

    `unique` distinct rows are looked up by each; those of all are the `distinct_share` of their sum.
    """
    away = unique * (1 - 1 / ranks)
    return RowCounts(form, unique, away, distinct_share * unique, away)


@dataclass(frozen=True)
class ReplicaCounts:
    """Distinct rows of one ordinary table in a step under `DistributedDataParallel`, from the view of one process.

    Those that it looks up, those of the process that looks up most, and those that any does.
    """

    form: RowForm
    asked: float
    largest: float
    distinct: float
