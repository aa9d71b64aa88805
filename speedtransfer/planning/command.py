"""The command ``speedtransfer plan``: what tables take, where they fit, how long a step is; in one process or several.

What needs torch is imported when the command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import math
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from speedtransfer.errors import InvalidValueError, check_choice, check_number, check_png, check_size

# For the help, which is shown without torch.
STORAGE_NAMES = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "split24"
STATE_NAMES = "float32", "bfloat16", "uint8"
MEASURE_NAMES = "time", "bandwidth", "device-price", "machine-price", "hour"
COMM_NAMES = "float32", "bfloat16", "int8"
LINK_NAMES = "10GbE", "25GbE", "100GbE", "IB"


def plan(
    rows: Annotated[list[float], typer.Option(help="Rows of the table, for instance 1e9; repeat for more tables.")],
    dim: Annotated[list[int], typer.Option(help="Embedding dimension; repeat to set one per table.")],
    batch: Annotated[
        int | None, typer.Option(help="Samples per step; --lookups are then per sample.", show_default="1")
    ] = None,
    lookups: Annotated[
        float | None,
        typer.Option(
            help="Lookups per step of one process in each table; with --batch per sample.",
            show_default="tokens x rows per token",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per step, in place of --lookups.")] = None,
    rows_per_token: Annotated[int | None, typer.Option(help="Lookups per token.", show_default="1")] = None,
    optimizer: Annotated[
        str, typer.Option(help="A class of torch.optim, such as SGD(momentum=0.9), or package.Class; none: frozen.")
    ] = "AdamW",
    storage_dtype: Annotated[
        str | None,
        typer.Option(
            "--storage-dtype", "--storage", help=f"Rows are one of {', '.join(STORAGE_NAMES)}.", show_default="several"
        ),
    ] = None,
    state_dtype: Annotated[
        str | None,
        typer.Option(
            "--state-dtype", "--state", help=f"State is one of {', '.join(STATE_NAMES)}.", show_default="several"
        ),
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
        str | None, typer.Option(help="Host memory to plan for, for instance 512GB.", show_default="the machine's")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Room for files, for instance 4TB.", show_default="the machine's")
    ] = None,
    dense_ms: Annotated[float, typer.Option(help="Milliseconds per step of the rest of the model, added.")] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure on this machine, or estimate only.")
    ] = True,
    json: Annotated[
        str | None, typer.Option(help="Write the plan to this file, or - for the screen.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan, or the ranking, a PNG.", show_default=False)
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
        typer.Option(help="Distinct rows of all --ranks over the sum of those of each.", show_default="by --zipf"),
    ] = None,
    comm_dtype: Annotated[
        str | None,
        typer.Option(help=f"How gradients are sent, with --ranks: {', '.join(COMM_NAMES)}.", show_default="float32"),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Hosts that share the rows out; with --link.", show_default="one")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help=f"Between --hosts: {', '.join(LINK_NAMES)}, or a rate and a delay: 10Gbit,0.05ms.", show_default=False
        ),
    ] = None,
) -> None:
    """Tell what tables take with their optimizer's state, where they fit, how long a step is, and what to use.

    On this machine a step is measured, with large tables cut to fewer rows; for
    another machine it is estimated from that machine's figures. With --hosts it
    is the plan of one of several hosts, and of what they send one another; with
    --ranks the command computes what several processes hold and send.
    """
    import torch
    from rich.console import Console

    from speedtransfer.planning.footprint import forms_for
    from speedtransfer.planning.hosts import show_ranks
    from speedtransfer.planning.machine import load_machines, published_machines, with_memory
    from speedtransfer.planning.optimizer_name import optimizer_given
    from speedtransfer.planning.plan_result import WIDTH, as_renderable
    from speedtransfer.planning.planner import hosts_given, plan_workload
    from speedtransfer.planning.rank import as_table, read_prices, step_seconds
    from speedtransfer.planning.rank import rank as in_order
    from speedtransfer.planning.workload import make_workload
    from speedtransfer.system import check_writable, replace_file

    if len(dim) not in (1, len(rows)):
        raise InvalidValueError(
            f"--dim is given {len(dim)} times and --rows {len(rows)}; pass one --dim, or one for each"
        )
    sizes = list(zip(rows, dim * len(rows) if len(dim) == 1 else dim, strict=True))
    per_sample, samples = _lookups(lookups, tokens, rows_per_token, batch)
    if comm_dtype is not None:
        check_choice(comm_dtype, "--comm-dtype", COMM_NAMES)
    check_number(dense_ms, "--dense-ms")
    trainer = optimizer_given(optimizer, "--optimizer")
    asked = None if per_sample is None else round(per_sample * samples)
    shared = hosts_given(hosts, link, "--")
    wanting: dict[str, Any] = {"--unique": unique, "--ranks": ranks, "--hosts": shared, "--rank": rank or None}
    for option, value in wanting.items():
        if value is not None and asked is None:
            raise InvalidValueError(f"{option} is given without the lookups of a step; pass --lookups as well")
    options_of: dict[str, tuple[Any, dict[str, Any]]] = {
        "--rank": (rank, {"--by": by, "--devices": devices, "--prices": prices}),
        "--ranks": (ranks, {"--comm-dtype": comm_dtype, "--distinct-share": distinct_share}),
    }
    for whole, (there, options) in options_of.items():
        for option, value in options.items():
            if value is not None and not there:
                raise InvalidValueError(
                    f"{option} is {str(value)!r} without {whole}, which it is for; pass {whole} too"
                )
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    given = sizes if len(sizes) > 1 else sizes[0]
    workload = make_workload(given, trainer, samples, 1 if per_sample is None else per_sample, zipf, unique, idle)
    if ranks is not None and asked is not None:
        check_size(ranks, "--ranks", 1)
        others: dict[str, Any] = {"--rank": rank, "--hosts": hosts, "--json": json, "--picture": picture}
        others |= {"--machine": machine, "--host-memory": host_memory, "--disk": disk, "--dense-ms": dense_ms}
        for option, value in others.items():
            if value:
                raise InvalidValueError(
                    f"{option} is given with --ranks, which computes bytes and prints a table; leave out one of them"
                )
        if len(sizes) > 1 or trainer.make is None:
            raise InvalidValueError(
                "--ranks is for one table and its training steps; pass one --rows, and an --optimizer but none"
            )
        comm = {"bfloat16": torch.bfloat16, "int8": torch.int8}.get(comm_dtype or "")
        form = forms_for(workload, storage_dtype or "float32", state_dtype, scale_block)[0]
        show_ranks(console, workload, form, ranks, distinct_share, comm)
        return
    forms = forms_for(workload, storage_dtype, state_dtype, scale_block)
    # Before anything is measured.
    if picture is not None:
        check_png(picture)
    for path in (picture, json if json != "-" else None):
        if path is not None:
            check_writable(Path(path))
    found: Any
    if rank:
        if shared is not None:
            raise InvalidValueError("--rank is given with --hosts; pass one of them, --devices for GPUs of a machine")
        more = [] if machine is None else load_machines(machine)
        # What is given is for machines whose own is not known.
        machines = [
            with_memory(each, None if each.host_bytes else host_memory, None if each.disk_bytes else disk)
            for each in {each.name: each for each in [*published_machines().values(), *more]}.values()
        ]
        how: Any = {"by": by or "time", "devices": devices, "prices": None if prices is None else read_prices(prices)}
        found = in_order(machines, lambda each: step_seconds(workload, forms, each, dense_ms / 1e3), **how)
        shown = as_table(found)
    else:
        measured = measure and asked is not None
        found = plan_workload(workload, forms, machine, host_memory, disk, dense_ms / 1e3, measured, shared)
        shown = as_renderable(found, steps=asked is not None)
    text = dumps(found.data(), indent=1)
    if json == "-":
        typer.echo(text)
    else:
        console.print(shown)
    if json not in (None, "-"):
        with replace_file(Path(str(json))) as file:
            file.write(f"{text}\n".encode())
    if picture is not None:
        found.draw(picture)


# --- checks of options, each of which raises with the option, the rule and the remedy ---------------------------------------


def _lookups(
    lookups: float | None, tokens: int | None, rows_per_token: int | None, batch: int | None
) -> tuple[float | None, int]:
    """Return the lookups of a sample, None where nothing is given, and the samples of a step: one unless --batch says."""
    samples = 1 if batch is None else check_size(batch, "--batch", 1)
    if lookups is not None:
        if tokens is not None or rows_per_token is not None:
            raise InvalidValueError("--lookups is given, and --tokens or --rows-per-token too; pass one or the others")
        if not 1 <= lookups < math.inf or (batch is None and not lookups.is_integer()):
            raise InvalidValueError(
                f"--lookups is {lookups:g} but must be a whole number from 1 on, or with --batch any; pass for instance 65536"
            )
        return lookups, samples
    if tokens is None:
        if rows_per_token is not None:
            raise InvalidValueError("--rows-per-token is given without --tokens; pass both")
        return (None if batch is None else 1.0), samples
    if batch is not None:
        raise InvalidValueError("--batch is given, and --tokens too; pass one of them")
    per_token = 1 if rows_per_token is None else check_size(rows_per_token, "--rows-per-token", 1)
    return float(check_size(tokens, "--tokens", 1) * per_token), samples
