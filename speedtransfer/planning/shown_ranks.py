"""What ``speedtransfer plan`` shows of a table in several processes: bytes held and sent by each, and their time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.errors import InvalidValueError, format_bytes
from speedtransfer.nn.sizing import TableSize
from speedtransfer.ranks import Partition
from speedtransfer.ranks.cost import (
    StepCost,
    ddp_dense_step,
    ddp_sparse_step,
    expected_seconds,
    replicas_step,
    sharded_step,
    shared_step,
)
from speedtransfer.ranks.row_counts import ReplicaCounts, RowForm, expected_counts, row_form
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance
from speedtransfer.units import format_seconds


class Rates(NamedTuple):
    """Microseconds of a collective call, and 1e9 bytes a second of the network and of the host bus of a process."""

    call_us: float
    network_gbps: float
    bus_gbps: float


def show_ranks(
    console: Console,
    size: TableSize,
    ranks: int,
    lookups: int,
    unique: float,
    zipf: float,
    distinct_share: float | None,
    comm_dtype: torch.dtype | None,
    rates: Rates,
) -> None:
    """Print the cost of each kind of table.

    Parameters
    ----------
    console : rich.console.Console
    size : TableSize
        Of the table in one process.
    ranks : int
    lookups : int
        Of one process in a step.
    unique : float
        Distinct rows of them.
    zipf : float
        Exponent of the distribution of ids.
    distinct_share : float, optional
        Distinct rows of all processes over the sum of those of each; by default by `zipf`.
    comm_dtype : torch.dtype, optional
        Of gradients sent.
    rates : Rates

    Raises
    ------
    InvalidValueError
        `distinct_share` cannot be.
    """
    rows, dim = size.rows, size.dim
    share = expected_distinct_share(rows, zipf, lookups, ranks) if distinct_share is None else distinct_share
    if not 1 / ranks <= share <= 1:
        raise InvalidValueError(f"--distinct-share is {share} but must be from 1 / --ranks to 1; pass a share between")
    balance = expected_imbalance(Partition(rows, ranks), zipf, lookups)
    console.print(
        Text(
            f"{rows:,} x {dim} in {ranks} processes; each looks up {unique:,.0f} distinct rows a step, {share:.2f} "
            f"of these are distinct over all; the busiest owner has {balance:.2f} times the mean\n"
            f"assumed: {rates.call_us:g} us a call, {rates.network_gbps:g} GB/s of network, {rates.bus_gbps:g} GB/s of host "
            "bus, no overlap\n"
        )
    )
    table = TextTable("", box=None, pad_edge=False)
    for label in ("held", "control", "ids", "rows", "gradients", "calls", "bus up", "bus down", "time"):
        table.add_column(label, justify="right", no_wrap=True)
    for name, held, cost in _kinds(_form_of(size, comm_dtype), rows, dim, ranks, unique, share):
        seconds = expected_seconds(cost, 1e-6 * rates.call_us, 1e9 * rates.network_gbps, 1e9 * rates.bus_gbps)
        sent = (cost.control, cost.ids, cost.rows, cost.gradients)
        moved = (cost.bus_up, cost.bus_down)
        table.add_row(
            name,
            format_bytes(held),
            *map(_shown, sent),
            str(cost.calls),
            *map(_shown, moved),
            format_seconds(seconds),
        )
    console.print(table)
    console.print(
        Text(
            "\nheld: weights and state of one process (of a shared table, which a host has once, its share). Bytes are those "
            "that one process sends, and moves over its bus, in a training step; the time is that of these alone.\n"
            "Rows of torch.nn.Embedding are in device memory, so that there is no bus; sparse ones are trained by SparseAdam."
        )
    )


def _form_of(size: TableSize, comm_dtype: torch.dtype | None) -> RowForm:
    """Return the bytes of a row as processes hold and send it."""
    weights = [plane for plane in size.planes if plane.name.split(".")[0] == "weight"]
    stored = sum(plane.row_bytes for plane in weights)
    form = row_form(size.dim, comm_dtype=comm_dtype, state_planes=0)
    # Owners send rows as they are stored, unless they change them first.
    sent = form.stored if size.exact else stored
    return dataclasses.replace(form, stored=stored, state=size.row_bytes - stored, sent=sent)


def _shown(count: float) -> str:
    return format_bytes(count) if count else ""


def _kinds(
    form: RowForm, rows: int, dim: int, ranks: int, unique: float, share: float
) -> list[tuple[str, float, StepCost]]:
    """Return the name, the bytes that one process holds, and the cost of a step, of each kind of table."""
    counts, whole = expected_counts(form, unique, share, ranks), rows * (form.stored + form.state)
    replica = ReplicaCounts(form, unique, unique, share * unique * ranks)
    plain = row_form(dim, state_planes=2)
    makers: dict[str, tuple[float, Callable[[], StepCost]]] = {
        "sharded": (whole / ranks, lambda: sharded_step([counts], ranks)),
        'memory="shared"': (whole / ranks, lambda: shared_step([counts], ranks)),
        "ordinary table in DDP": (whole, lambda: replicas_step([replica], ranks)),
        "nn.Embedding, sparse, DDP": (
            rows * (plain.stored + plain.state),
            lambda: ddp_sparse_step(unique, plain.gradient, ranks),
        ),
        "nn.Embedding, DDP": (
            rows * (2 * plain.stored + plain.state),
            lambda: ddp_dense_step(rows, plain.stored, ranks),
        ),
    }
    return [(name, held, make()) for name, (held, make) in makers.items()]
