"""The command ``speedtransfer plan``: what tables take, where they fit, how long a step is; in one process or several.

What needs torch is imported when the command runs: ``--help`` answers without it.
"""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from speedtransfer.errors import InvalidValueError, check_size

if TYPE_CHECKING:
    from speedtransfer.planning.machine import Machine

# For the help, which is shown without torch.
STORAGE_NAMES = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"
STATE_NAMES = "float32", "bfloat16", "uint8"
MEASURE_NAMES = "time", "bandwidth", "device-price", "machine-price", "hour"
COMM_NAMES = "float32", "bfloat16", "int8"
_IDLE = {name: name for name in ("auto", "exact", "lazy")}
# Rates where none is given. Round numbers, not those of a machine.
ASSUMED_CALL_US, ASSUMED_NETWORK_GBPS, ASSUMED_BUS_GBPS = 50.0, 10.0, 20.0


def plan(
    rows: Annotated[list[float], typer.Option(help="Rows of the table, for instance 1e9; again for each other table.")],
    dim: Annotated[list[int], typer.Option(help="Columns of all tables, or again for each.")],
    batch: Annotated[
        int | None,
        typer.Option(help="Samples of a step; --lookups are then those of a sample.", show_default="1"),
    ] = None,
    lookups: Annotated[
        float | None,
        typer.Option(
            help="Lookups of one process in a step, in each table; of a sample with --batch.",
            show_default="tokens x rows a token",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a step, in place of --lookups.")] = None,
    rows_per_token: Annotated[int | None, typer.Option(help="Lookups of a token.", show_default="1")] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="Of torch.optim, such as SGD(momentum=0.9), or package.Class; none: the table is frozen."),
    ] = "AdamW",
    storage_dtype: Annotated[
        str | None,
        typer.Option(
            "--storage-dtype", "--storage", help=f"Of rows: {', '.join(STORAGE_NAMES)}.", show_default="several"
        ),
    ] = None,
    state_dtype: Annotated[
        str | None,
        typer.Option("--state-dtype", "--state", help=f"Of state: {', '.join(STATE_NAMES)}.", show_default="several"),
    ] = None,
    scale_block: Annotated[
        int | None, typer.Option(help="Columns that share a scale of float8 rows.", show_default="128")
    ] = None,
    idle: Annotated[str, typer.Option(help="auto, exact or lazy.")] = "auto",
    zipf: Annotated[float, typer.Option(help="Exponent of the distribution of ids; 0: uniform.")] = 1.05,
    unique: Annotated[
        float | None, typer.Option(help="Distinct rows that one process looks up in a step.", show_default="by --zipf")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="A name, such as h200, or a YAML file.", show_default="this one")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="In place of the machine's own, for instance 512GB.", show_default="machine's")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Room for files, for instance 4TB.", show_default="machine's")
    ] = None,
    dense_ms: Annotated[float, typer.Option(help="Milliseconds of a step of the rest of the model, added.")] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure on this machine, or estimate only.")
    ] = True,
    json: Annotated[
        str | None, typer.Option(help="Write the plan to this file, or - for the screen.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the time of a step by size of the tables, a PNG.", show_default=False)
    ] = None,
    rank: Annotated[
        bool,
        typer.Option(
            "--rank", help="Rank the machines that are known, and those of --machine FILE, for this workload."
        ),
    ] = False,
    by: Annotated[
        str | None, typer.Option(help=f"Order of --rank: {', '.join(MEASURE_NAMES)}.", show_default="time")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="GPUs of each machine ranked.", show_default="its own")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="YAML file of prices for --rank; examples/prices.yaml is one.", show_default=False),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes; computed and not measured.", show_default="one")] = None,
    distinct_share: Annotated[
        float | None,
        typer.Option(help="Distinct rows of all processes over the sum of those of each.", show_default="by --zipf"),
    ] = None,
    comm_dtype: Annotated[str, typer.Option(help=f"Of gradients sent: {', '.join(COMM_NAMES)}.")] = "float32",
    call_us: Annotated[float, typer.Option(help="Latency of a collective call, microseconds.")] = ASSUMED_CALL_US,
    network_gbps: Annotated[
        float, typer.Option(help="What one process can send to others, 1e9 bytes a second.")
    ] = ASSUMED_NETWORK_GBPS,
    bus_gbps: Annotated[
        float, typer.Option(help="Between host memory and the device of one process, 1e9 bytes a second.")
    ] = ASSUMED_BUS_GBPS,
) -> None:
    """Tell what tables take with their optimizer's state, where they fit, how long a step is, and what to use.

    On this machine a step is measured, with large tables cut to fewer rows; for
    another machine it is estimated from that machine's figures. With --ranks the
    command computes what several processes hold and send; the default rates of
    links between processes are round numbers, not those of a machine.
    """
    import torch
    from rich.console import Console

    from speedtransfer.nn.sizing import table_size
    from speedtransfer.planning.command_checks import (
        check_kind,
        check_lookups,
        check_number,
        check_ranks,
        check_scale_block,
        check_unique,
        chosen,
        whole_rows,
    )
    from speedtransfer.planning.forms import FLOAT32, STATE, STORAGE, Form, forms_for
    from speedtransfer.planning.optimizer_name import named, optimizer_given, optimizer_named
    from speedtransfer.planning.plan_files import check_writable
    from speedtransfer.planning.plan_text import WIDTH, as_renderable
    from speedtransfer.planning.planner import plan as make_plan
    from speedtransfer.planning.prices import read_prices
    from speedtransfer.planning.rank import MEASURES
    from speedtransfer.planning.ranked_workload import rank_machines
    from speedtransfer.planning.shown_ranking import ranking_data, show_ranking
    from speedtransfer.planning.shown_ranks import Rates, show_ranks
    from speedtransfer.planning.shown_size import show_size
    from speedtransfer.planning.workload import make_workload

    comm_dtypes = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
    counts = [whole_rows(each) for each in rows]
    dims = [check_size(each, "--dim", 1) for each in dim]
    if len(dims) not in (1, len(counts)):
        raise InvalidValueError(
            f"--dim is given {len(dims)} times and --rows {len(counts)}; pass one --dim, or one for each"
        )
    dims *= len(counts) if len(dims) == 1 else 1
    per_sample, samples = check_lookups(lookups, tokens, rows_per_token, batch)
    chosen("--idle", idle, _IDLE)
    for option, name, choices in (("--storage-dtype", storage_dtype, STORAGE), ("--state-dtype", state_dtype, STATE)):
        if name is not None:
            chosen(option, name, choices)
    check_scale_block(scale_block, storage_dtype or FLOAT32)
    check_number("--zipf", zipf, zero=True)
    check_number("--call-us", call_us, zero=True)
    check_number("--dense-ms", dense_ms, zero=True)
    check_number("--network-gbps", network_gbps)
    check_number("--bus-gbps", bus_gbps)
    comm = chosen("--comm-dtype", comm_dtype, comm_dtypes)
    make = optimizer_named(optimizer)
    asked = None if per_sample is None else round(per_sample * samples)
    unique = check_unique(unique, asked, counts, zipf)
    given = None if ranks is None else check_ranks(ranks, counts, asked, unique, optimizer)
    form = Form(storage_dtype or FLOAT32, state_dtype or FLOAT32, scale_block)
    sizes = [
        table_size(count, width, make, **form.arguments, idle=idle) for count, width in zip(counts, dims, strict=True)
    ]
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    rates = Rates(call_us, network_gbps, bus_gbps)
    check_kind(ranks is not None, rank, {"--by": by, "--devices": devices, "--prices": prices}, json, picture)
    if given is not None and asked is not None and unique is not None:
        show_ranks(console, sizes[0], given, asked, unique, zipf, distinct_share, comm, rates)
        return
    if by is not None:
        chosen("--by", by, MEASURES)
    # Before anything is measured.
    for path in (picture, None if json in (None, "-") else Path(str(json))):
        check_writable(path)
    names = ["table"] if len(counts) == 1 else [f"table{number}" for number in range(len(counts))]
    tables = dict(zip(names, zip(counts, dims, strict=True), strict=True))
    trainer = make if make is None else named(make, optimizer)
    given_unique = None if len(counts) > 1 else unique
    if rank:
        if asked is None:
            raise InvalidValueError("--rank is given without the lookups of a step; pass --lookups as well")
        workload = make_workload(tables, optimizer_given(trainer), samples, per_sample, zipf, given_unique, idle)
        ranking = rank_machines(
            workload,
            forms_for(workload, storage_dtype, state_dtype, scale_block),
            _machines(machine, host_memory, disk),
            dense_s=dense_ms / 1e3,
            by=by or "time",
            devices=devices,
            prices=None if prices is None else read_prices(prices),
        )
        _write(json, ranking_data(ranking), lambda: show_ranking(console, ranking))
        if picture is not None:
            from speedtransfer.planning.rank_picture import draw_ranking  # drawing is loaded where it is wanted

            draw_ranking(ranking, picture)
        return
    found = make_plan(
        tables,
        trainer,
        samples,
        1 if per_sample is None else per_sample,
        zipf=zipf,
        unique=given_unique,
        machine=machine,
        host_memory=host_memory,
        disk=disk,
        idle=cast(Any, idle),
        storage_dtype=storage_dtype,
        state_dtype=state_dtype,
        scale_block=scale_block,
        dense_ms=dense_ms,
        measure=measure and asked is not None,
    )

    def show() -> None:
        if len(sizes) == 1:
            show_size(console, sizes[0], "frozen" if make is None else optimizer, asked, unique, rates)
            console.print()
        console.print(as_renderable(found, heading=len(sizes) > 1, steps=asked is not None))

    _write(json, found.data(), show)
    if picture is not None:
        found.draw(picture)


def _write(json: str | None, data: dict[str, Any], show: Callable[[], None]) -> None:
    """Show what was found, or write it as JSON to the screen alone; and to a file if one is named."""
    text = dumps(data, indent=1)
    if json == "-":
        typer.echo(text)
        return
    show()
    if json is not None:
        from speedtransfer.planning.plan_files import write_text

        write_text(Path(json), text + "\n")


def _machines(machine: str | None, host_memory: str | None, disk: str | None) -> list[Machine]:
    """Return the machines to rank, those known and those of a file; what is given is for those whose own is not known."""
    from speedtransfer.planning.given_machine import machine_given
    from speedtransfer.planning.machine_files import load_machines, published_machines

    more = [] if machine is None else load_machines(machine)
    found = {each.name: each for each in [*published_machines(), *more]}
    given = []
    for each in found.values():
        host = host_memory if each.host_bytes is None else None
        given.append(machine_given(each, host, disk if each.disk_bytes is None else None)[0])
    return given
