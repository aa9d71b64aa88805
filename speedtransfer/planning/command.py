"""The command ``speedtransfer plan``: what a table takes, in one process or in several, computed and not measured."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.encoding import STATE_DTYPES, STORAGE_DTYPES
from speedtransfer.errors import InvalidValueError, check_size, suggest
from speedtransfer.nn.sizing import table_size
from speedtransfer.planning.optimizer_name import NONE, optimizer_named
from speedtransfer.planning.shown_ranks import Rates, show_ranks
from speedtransfer.planning.shown_size import show_size
from speedtransfer.ranks.zipf import expected_unique

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORAGE_DTYPES}
_STATE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}
_COMM_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
_IDLE = {name: name for name in ("auto", "exact", "lazy")}
# Rates where none is given. Round numbers, not those of a machine.
ASSUMED_CALL_US, ASSUMED_NETWORK_GBPS, ASSUMED_BUS_GBPS = 50.0, 10.0, 20.0


def plan(
    rows: Annotated[float, typer.Option(help="Rows of the table, for instance 1e9.")],
    dim: Annotated[int, typer.Option(help="Columns.")],
    ranks: Annotated[
        int | None, typer.Option(help="Processes; without it the memory of one is shown.", show_default="one")
    ] = None,
    lookups: Annotated[
        int | None, typer.Option(help="Lookups of one process in a step.", show_default="tokens x rows a token")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a step, in place of --lookups.")] = None,
    rows_per_token: Annotated[int | None, typer.Option(help="Lookups of a token.", show_default="1")] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="Of torch.optim, such as SGD(momentum=0.9), or package.Class; none: the table is frozen."),
    ] = "AdamW",
    storage_dtype: Annotated[
        str, typer.Option("--storage-dtype", "--storage", help=f"Of rows in the table: {', '.join(_DTYPES)}.")
    ] = "float32",
    state_dtype: Annotated[
        str, typer.Option("--state-dtype", "--state", help=f"Of state in the table: {', '.join(_STATE_DTYPES)}.")
    ] = "float32",
    scale_block: Annotated[
        int | None, typer.Option(help="Columns that share a scale of float8 rows.", show_default="128")
    ] = None,
    idle: Annotated[str, typer.Option(help="auto, exact or lazy.")] = "auto",
    zipf: Annotated[float, typer.Option(help="Exponent of the distribution of ids; 0: uniform.")] = 1.05,
    unique: Annotated[
        float | None, typer.Option(help="Distinct rows that one process looks up in a step.", show_default="by --zipf")
    ] = None,
    distinct_share: Annotated[
        float | None,
        typer.Option(help="Distinct rows of all processes over the sum of those of each.", show_default="by --zipf"),
    ] = None,
    comm_dtype: Annotated[str, typer.Option(help=f"Of gradients sent: {', '.join(_COMM_DTYPES)}.")] = "float32",
    call_us: Annotated[float, typer.Option(help="Latency of a collective call, microseconds.")] = ASSUMED_CALL_US,
    network_gbps: Annotated[
        float, typer.Option(help="What one process can send to others, 1e9 bytes a second.")
    ] = ASSUMED_NETWORK_GBPS,
    bus_gbps: Annotated[
        float, typer.Option(help="Between host memory and the device of one process, 1e9 bytes a second.")
    ] = ASSUMED_BUS_GBPS,
) -> None:
    """Compute the host memory of a table with its optimizer's state, what a step moves, and what several processes send.

    Nothing is measured. The rates have defaults that are round numbers and no machine's: give those of yours.
    """
    if not rows.is_integer():
        raise InvalidValueError(f"--rows is {rows} but must be a number of rows; pass for instance 1e9")
    count = check_size(int(rows), "--rows", 1)
    check_size(dim, "--dim", 1)
    asked = _lookups(lookups, tokens, rows_per_token)
    stored = _form("--storage-dtype", storage_dtype, _DTYPES)
    _check_scale_block(scale_block, storage_dtype)
    _check_number("--zipf", zipf, zero=True)
    _check_number("--call-us", call_us, zero=True)
    _check_number("--network-gbps", network_gbps)
    _check_number("--bus-gbps", bus_gbps)
    size = table_size(
        count,
        dim,
        optimizer_named(optimizer),
        storage_dtype=stored,
        state_dtype=_form("--state-dtype", state_dtype, _STATE_DTYPES),
        scale_block=scale_block,
        idle=_chosen("--idle", idle, _IDLE),
    )
    rates = Rates(call_us, network_gbps, bus_gbps)
    comm = _chosen("--comm-dtype", comm_dtype, _COMM_DTYPES)
    if asked is not None and unique is None:
        unique = expected_unique(count, zipf, asked)
    if asked is None and unique is not None:
        raise InvalidValueError(f"--unique is {unique} without the lookups of a step; pass --lookups as well")
    if asked is not None and unique is not None and not 0 < unique <= min(asked, count):
        raise InvalidValueError(
            f"--unique is {unique} but must be above 0 and at most --lookups and --rows, {min(asked, count)}; "
            "pass a number between"
        )
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    trained = "frozen" if optimizer.lower() == NONE else optimizer
    if ranks is None:
        show_size(console, size, trained, asked, unique, rates)
        return
    check_size(ranks, "--ranks", 1)
    if asked is None or unique is None:
        raise InvalidValueError("--ranks is given without the lookups of a step; pass --lookups as well")
    if optimizer.lower() == NONE:
        raise InvalidValueError("--ranks shows training steps but --optimizer is none; leave out one of them")
    show_ranks(console, size, ranks, asked, unique, zipf, distinct_share, comm, rates)


def _lookups(lookups: int | None, tokens: int | None, rows_per_token: int | None) -> int | None:
    """Return the lookups of a step, given as they are or by tokens; None where nothing is given."""
    if lookups is not None:
        if tokens is not None or rows_per_token is not None:
            raise InvalidValueError("--lookups is given, and --tokens or --rows-per-token too; pass one or the others")
        return check_size(lookups, "--lookups", 1)
    if tokens is None:
        if rows_per_token is not None:
            raise InvalidValueError("--rows-per-token is given without --tokens; pass both")
        return None
    per_token = 1 if rows_per_token is None else check_size(rows_per_token, "--rows-per-token", 1)
    return check_size(tokens, "--tokens", 1) * per_token


def _check_scale_block(scale_block: int | None, storage_dtype: str) -> None:
    if scale_block is None:
        return
    check_size(scale_block, "--scale-block", 1)
    if _DTYPES[storage_dtype] not in FLOAT8_DTYPES:
        raise InvalidValueError(
            f"--scale-block is {scale_block} but --storage is {storage_dtype!r}, and only float8 rows have blocks; leave it "
            "out, or pass --storage float8_e4m3fn"
        )


def _check_number(option: str, value: float, zero: bool = False) -> None:
    """Raise unless `value` is finite and above 0, or 0 where `zero`."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise InvalidValueError(
            f"{option} is {value} but must be a number {'from 0 on' if zero else 'above 0'}; pass one, or leave it out"
        )


def _chosen(option: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise InvalidValueError(f"{option} is {name!r}{suggest(name, choices)}")
    return choices[name]


def _form(option: str, name: str, choices: dict[str, torch.dtype]) -> torch.dtype | None:
    """Return a dtype to store values in; None: as they are."""
    chosen: torch.dtype = _chosen(option, name, choices)
    return None if chosen == torch.float32 else chosen
