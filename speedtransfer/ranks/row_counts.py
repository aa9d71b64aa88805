"""How many bytes a row has in a table and on its way to another process, and how many rows a lookup asks of whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speedtransfer.encoding import check_dtypes, codec_for


@dataclass(frozen=True)
class RowForm:
    """Bytes of a row.

    Attributes
    ----------
    stored : int
        Of the weights in the table.
    state : int
        Of the optimizer's state.
    sent : int
        Of the weights on their way from an owner.
    gradient : int
        Of a gradient on its way to the owner.
    """

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
    before they send them.

    Parameters
    ----------
    dim, dtype, storage_dtype, state_dtype, comm_dtype
    state_planes : int
        Tensors of the shape of the weights in the optimizer's state: 2 of AdamW, 1 of SGD with momentum, 0 of SGD.
    idle : {"lazy", "exact"}
    max_norm : bool
        Whether the module has `max_norm`.
    scale_block : int, optional
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
    """Rows of one lookup, from the view of one process.

    Attributes
    ----------
    form : RowForm
    asked : float
        Distinct rows that it looks up.
    asked_of_others : float
        Those of them that other processes own.
    served : float
        Distinct rows that it owns and that any process looks up.
    served_to_others : float
        Rows that other processes ask it for; a row that two of them ask for counts twice.
    """

    form: RowForm
    asked: float
    asked_of_others: float
    served: float
    served_to_others: float


def expected_counts(form: RowForm, unique: float, distinct_share: float, ranks: int) -> RowCounts:
    """Return the counts of a mean process if rows are spread evenly over `ranks` owners.

    Parameters
    ----------
    form : RowForm
    unique : float
        Distinct rows that each process looks up.
    distinct_share : float
        Distinct rows of all processes over the sum of those of each.
    ranks : int
    """
    away = unique * (1 - 1 / ranks)
    return RowCounts(form, unique, away, distinct_share * unique, away)


@dataclass(frozen=True)
class ReplicaCounts:
    """Rows of one ordinary table in a step under `DistributedDataParallel`, from the view of one process.

    Attributes
    ----------
    form : RowForm
    asked : float
        Distinct rows that it looks up.
    largest : float
        Those of the process that looks up most.
    distinct : float
        Distinct rows that any process looks up.
    """

    form: RowForm
    asked: float
    largest: float
    distinct: float
