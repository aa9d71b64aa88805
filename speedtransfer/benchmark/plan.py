"""The command ``speedtransfer plan``: what a table costs several processes, computed and not measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.benchmark.units import format_seconds
from speedtransfer.errors import InvalidValueError, check_size, format_bytes, suggest
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
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance, expected_unique

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
_COMM_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
# Rates where none is given. Round numbers, not those of a machine.
ASSUMED_CALL_US, ASSUMED_NETWORK_GBPS, ASSUMED_BUS_GBPS = 50.0, 10.0, 20.0


def plan(
    rows: Annotated[float, typer.Option(help="Rows of the table, for instance 1e9.")],
    dim: Annotated[int, typer.Option(help="Columns.")],
    ranks: Annotated[int, typer.Option(help="Processes.")],
    lookups: Annotated[int, typer.Option(help="Lookups of one process in a step.")],
    zipf: Annotated[float, typer.Option(help="Exponent of the distribution of ids; 0: uniform.")] = 1.05,
    unique: Annotated[
        float | None, typer.Option(help="Distinct rows that one process looks up in a step.", show_default="by --zipf")
    ] = None,
    distinct_share: Annotated[
        float | None,
        typer.Option(help="Distinct rows of all processes over the sum of those of each.", show_default="by --zipf"),
    ] = None,
    state_planes: Annotated[
        int, typer.Option(help="State of the optimizer: 2 for AdamW, 1 for SGD with momentum, 0 for SGD.")
    ] = 2,
    storage_dtype: Annotated[str, typer.Option(help=f"Of rows in the table: {', '.join(_DTYPES)}.")] = "float32",
    state_dtype: Annotated[str, typer.Option(help=f"Of state in the table: {', '.join(_STATE_DTYPES)}.")] = "float32",
    comm_dtype: Annotated[str, typer.Option(help=f"Of gradients sent: {', '.join(_COMM_DTYPES)}.")] = "float32",
    idle: Annotated[str, typer.Option(help="lazy or exact.")] = "lazy",
    call_us: Annotated[float, typer.Option(help="Latency of a collective call, microseconds.")] = ASSUMED_CALL_US,
    network_gbps: Annotated[
        float, typer.Option(help="What one process can send to others, 1e9 bytes a second.")
    ] = ASSUMED_NETWORK_GBPS,
    bus_gbps: Annotated[
        float, typer.Option(help="Between host memory and the device of one process, 1e9 bytes a second.")
    ] = ASSUMED_BUS_GBPS,
) -> None:
    """Compute what a table costs several processes: bytes held and sent by each, and the time of that at given rates.

    Nothing is measured. The rates have defaults that are round numbers and no machine's: give those of yours.
    """
    if not math.isfinite(rows):
        raise InvalidValueError(f"--rows is {rows} but must be a number of rows; pass for instance 1e9")
    count = check_size(int(rows), "--rows", 1)
    check_size(dim, "--dim", 1), check_size(ranks, "--ranks", 1), check_size(state_planes, "--state-planes")
    check_size(lookups, "--lookups", 1)
    form = row_form(
        dim,
        torch.float32,
        _chosen("--storage-dtype", storage_dtype, _DTYPES),
        _chosen("--state-dtype", state_dtype, _STATE_DTYPES),
        _chosen("--comm-dtype", comm_dtype, _COMM_DTYPES),
        state_planes=state_planes,
        idle=_chosen("--idle", idle, {"lazy": "lazy", "exact": "exact"}),
    )
    if unique is None:
        unique = expected_unique(count, zipf, lookups)
    if distinct_share is None:
        distinct_share = expected_distinct_share(count, zipf, lookups, ranks)
    if not 0 < unique <= min(lookups, count):
        raise InvalidValueError(
            f"--unique is {unique} but must be above 0 and at most --lookups and --rows, {min(lookups, count)}"
        )
    if not 1 / ranks <= distinct_share <= 1:
        raise InvalidValueError(f"--distinct-share is {distinct_share} but must be from 1 / --ranks to 1")
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    balance = expected_imbalance(Partition(count, ranks), zipf, lookups)
    console.print(
        Text(
            f"{count:,} x {dim} in {ranks} processes; each looks up {unique:,.0f} distinct rows a step, {distinct_share:.2f} "
            f"of these are distinct over all; the busiest owner has {balance:.2f} times the mean\n"
            f"assumed: {call_us:g} us a call, {network_gbps:g} GB/s of network, {bus_gbps:g} GB/s of host bus, no overlap\n"
        )
    )
    table = TextTable("", box=None, pad_edge=False)
    for label in ("held", "control", "ids", "rows", "gradients", "calls", "bus up", "bus down", "time"):
        table.add_column(label, justify="right", no_wrap=True)
    for name, held, cost in _kinds(form, count, dim, ranks, unique, distinct_share):
        seconds = expected_seconds(cost, 1e-6 * call_us, 1e9 * network_gbps, 1e9 * bus_gbps)
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


def _chosen(option: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise InvalidValueError(f"{option} is {name!r}{suggest(name, choices)}")
    return choices[name]


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
