"""What ``speedtransfer plan --ranks`` shows of a table in several processes: bytes held, sent and moved by each."""

from __future__ import annotations

import dataclasses

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
    replicas_step,
    sharded_step,
    shared_step,
)
from speedtransfer.ranks.row_counts import ReplicaCounts, expected_counts, row_form
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance

_NOTE = """
held: weights and state of one process (of a shared table, which a host has once, its share). Bytes are those that one \
process sends, and moves between host memory and its device, in a training step.
Rows of torch.nn.Embedding are in device memory, so that there is no bus; sparse ones are trained by SparseAdam."""


def show_ranks(
    console: Console,
    size: TableSize,
    ranks: int,
    lookups: int,
    unique: float,
    zipf: float,
    distinct_share: float | None,
    comm_dtype: torch.dtype | None,
) -> None:
    """Print the cost of each kind of table of that `size` in one process; raises if `distinct_share` cannot be.

    `lookups`, `unique` of them distinct, are those of one process in a step; `distinct_share` are the distinct rows of all
    processes over the sum of those of each, by default by `zipf`. Gradients are sent in `comm_dtype`.
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
        )
    )
    table = TextTable("", box=None, pad_edge=False)
    for label in ("held", "control", "ids", "rows", "gradients", "calls", "bus up", "bus down"):
        table.add_column(label, justify="right", no_wrap=True)
    for name, (held, cost) in _kinds(size, ranks, unique, share, comm_dtype).items():
        sent = (cost.control, cost.ids, cost.rows, cost.gradients)
        cells = [format_bytes(count) if count else "" for count in (held, *sent, cost.bus_up, cost.bus_down)]
        table.add_row(name, *cells[:5], str(cost.calls), *cells[5:])
    console.print(table)
    console.print(Text(_NOTE))


def _kinds(
    size: TableSize, ranks: int, unique: float, share: float, comm_dtype: torch.dtype | None
) -> dict[str, tuple[float, StepCost]]:
    """Return the bytes that one process holds, and the cost of a step, of each kind of table."""
    stored = sum(plane.row_bytes for plane in size.planes if plane.name.split(".")[0] == "weight")
    form = row_form(size.dim, comm_dtype=comm_dtype, state_planes=0)
    # Owners send rows as they are stored, unless they change them first.
    sent = form.stored if size.exact else stored
    form = dataclasses.replace(form, stored=stored, state=size.row_bytes - stored, sent=sent)
    counts, plain = expected_counts(form, unique, share, ranks), row_form(size.dim, state_planes=2)
    replica = ReplicaCounts(form, unique, unique, share * unique * ranks)
    dense, whole = size.rows * plain.stored, size.total_bytes
    return {
        "sharded": (whole / ranks, sharded_step([counts], ranks)),
        'memory="shared"': (whole / ranks, shared_step([counts], ranks)),
        "ordinary table in DDP": (whole, replicas_step([replica], ranks)),
        "nn.Embedding, sparse, DDP": (3 * dense, ddp_sparse_step(unique, plain.gradient, ranks)),
        "nn.Embedding, DDP": (4 * dense, ddp_dense_step(size.rows, plain.stored, ranks)),
    }
