"""Make the part of a table that one process owns, in agreement with the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import resolve_device
from speedtransfer.encoding import check_dtypes
from speedtransfer.errors import InvalidValueError, ProcessGroupError
from speedtransfer.nn.options import TableOptions
from speedtransfer.optim import Handle, Rows, Sharded, SharedOwners
from speedtransfer.ranks import Exchange, Partition, SharedMemory, as_int64, exchange_of
from speedtransfer.tables import Table, check_layout

# What gradients may be sent as.
COMM_DTYPES = (None, torch.bfloat16, torch.int8)


def make_shard(
    weight: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    requires_grad: bool,
    options: TableOptions,
) -> Handle:
    """Make the rows that this process owns of a table of `shape`, and their handle; see `make_handle`.

    Raises
    ------
    ProcessGroupError
        The processes do not make the same table, or one of them could not.
    """
    exchange = exchange_of(options["process_group"])
    partition = Partition(shape[0], exchange.ranks)
    names = ("memory", "idle", "storage_dtype", "state_dtype", "scale_block", "comm_dtype")
    about = f"{shape[0]} x {shape[1]} {dtype}, " + ", ".join(f"{name}={dict(options)[name]}" for name in names)

    def check() -> str:
        check_shard(dtype, options)
        return about

    rows = make_in_all(exchange, check, lambda: _make_rows(shape, device, dtype, options, exchange, partition))
    # The seeds of processes may differ.
    rows.load_state_dict({"seed": int(exchange.agree("makes a table", [as_int64(rows.seed)])[0])})
    handle = Handle(rows.table, requires_grad, options["idle"], rows)
    kind = SharedOwners if options["memory"] == "shared" else Sharded
    handle.owners = kind(handle, exchange, partition, options["comm_dtype"])
    if weight is not None:
        handle.load(weight)
    return handle


def make_in_all(exchange: Exchange, check: Callable[[], str], make: Callable[[], Rows]) -> Rows:
    """Return ``make()`` after ``check()``, which returns what must be the same in all processes. Collective.

    Raises
    ------
    ProcessGroupError
        It is not the same, or another process has raised.
    """
    rows: Rows | None = None
    error: Exception | None = None
    about = ""
    # Checked before there is memory, which processes of one host make together.
    for is_checked in (False, True):
        try:
            if is_checked:
                rows = make()
            else:
                about = check()
        except ProcessGroupError:
            # Raised in all.
            raise
        except Exception as raised:
            error = raised
        exchange.agree_on_error("makes a table", error, about)
    assert rows is not None
    return rows


def check_shard(dtype: torch.dtype, options: TableOptions) -> None:
    """Raise where options do not fit."""
    comm_dtype = options["comm_dtype"]
    check_dtypes(dtype, options["storage_dtype"], options["state_dtype"], options["scale_block"])
    if comm_dtype not in COMM_DTYPES or (comm_dtype is not None and dtype != torch.float32):
        raise InvalidValueError(
            f"comm_dtype is {comm_dtype} for rows of {dtype} but must be torch.bfloat16 or torch.int8, for rows of "
            "torch.float32; leave it out to send gradients as they are"
        )
    if options["cache_counts"] is not None:
        raise InvalidValueError(
            "cache_counts is given for a table with process_group, whose rows lie in another order; pass cache_rows alone"
        )
    if options["memory"] == "shared":
        if options["path"] is not None or options["cache_rows"] is not None:
            raise InvalidValueError(
                "memory='shared' takes no path and no cache_rows; leave them out, or use another memory"
            )
        check_layout(options["layout"])


def _make_rows(
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    options: TableOptions,
    exchange: Exchange,
    partition: Partition,
) -> Rows:
    storage_dtype = options["storage_dtype"]
    stored = dtype if storage_dtype is None else storage_dtype
    if options["memory"] == "shared":
        memory = SharedMemory(resolve_device(device), exchange)
        memory.layout = options["layout"]
        table = Table.over(memory, shape[0], shape[1], stored)
        return Rows(table, storage_dtype, options["state_dtype"], options["scale_block"])
    place: Any = {name: dict(options)[name] for name in ("memory", "layout", "cache_rows")}
    path = None if options["path"] is None else path_of(options["path"], exchange)
    table = Table(partition.size(exchange.rank), shape[1], stored, device=device, path=path, **place)
    return Rows(table, storage_dtype, options["state_dtype"], options["scale_block"])


def path_of(path: str | os.PathLike[str], exchange: Exchange) -> Path:
    """Return the file of this process, where all were given `path`."""
    path = Path(path)
    return path.with_name(f"{path.stem}-{exchange.rank}-of-{exchange.ranks}{path.suffix}")
