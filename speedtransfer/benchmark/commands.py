"""The command ``speedtransfer bench``: what is asked for is checked first, then measured, shown and written.

A group that goes wrong does not cost the others: the command ends with exit code 1 and a line that names it. Who presses
Ctrl-C keeps the figures of all groups before.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speedtransfer.benchmark.output import Output
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.run import run_suite
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES, SUITES, Suite
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_size, suggest

ALL = "all"


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=f"{', '.join(SUITES)} or {ALL}.")],
    json: Annotated[
        Path | None,
        typer.Option(help=f"Write the figures to this file; to this folder with {ALL}.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write pictures and report.html to this folder.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few samples.")] = False,
    device: Annotated[str | None, typer.Option(help="Compute device.", show_default="cuda if there is one")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows: of a batch (transfer, speedtorch), of the table.", show_default="suite's")
    ] = None,
    table_bytes: Annotated[
        float | None, typer.Option(help="Bytes of the table (transfer), for instance 50e9.", show_default="suite's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Measure how fast rows move on this machine, against PyTorch's ways and against a plain copy."""
    if table_bytes is not None and not math.isfinite(table_bytes):
        raise InvalidValueError(f"--table-bytes is {table_bytes} but must be a number of bytes; pass for instance 50e9")
    given: dict[str, int] = {}
    if rows is not None:
        given["rows"] = check_size(rows, "--rows", 1)
    if table_bytes is not None:
        given["table_bytes"] = check_size(int(table_bytes), "--table-bytes", MIN_TABLE_BYTES)
    suites = _suites(suite, given)
    compute = resolve_device(device)
    output = Output(json, plot, several=suite == ALL)
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    check_size(seed, "--seed")
    failed: list[str] = []
    reasons: list[str] = []
    try:
        for one in suites:
            mine: dict[str, Any] = {name: value for name, value in given.items() if name in one.options}
            result = run_suite(one, compute, quick, console, output.keep, seed=seed, **mine)
            output.keep(result)
            failed += [f"{title} ({reason})" for title, reason in result["failures"].items()]
            reasons += filter(None, [nothing_of_ours(result)])
    finally:
        for path in output.finish():
            typer.echo(f"wrote {path}")
    if failed:
        count = f"{len(failed)} group{'s' * (len(failed) > 1)} failed"
        typer.echo(f"speedtransfer: error: {count}: {'; '.join(failed)}", err=True)
        raise typer.Exit(1)
    if reasons:
        raise SpeedtransferError(reasons[0])


def nothing_of_ours(result: dict[str, Any]) -> str:
    """Return why a suite has no figure of this library, or of anything; nothing where it has one or was to have none."""
    groups = [GroupResult.from_json(group) for group in result["groups"]]
    cases = [case for group in groups for case in group.cases]
    ours = [case for case in cases if case.role == "ours"] or cases
    if any(case.samples_s for case in ours):
        return ""
    reason = next((text for text in [*(group.skipped for group in groups), *(case.error for case in ours)] if text), "")
    return f"suite {result['suite']!r} could measure nothing of this library here: {reason}" if reason else ""


def _suites(name: str, given: dict[str, int]) -> list[Suite]:
    """Return the suites that `name` names, or raise where there are none or an option has no meaning for it."""
    if name == ALL:
        return list(SUITES.values())
    if name not in SUITES:
        raise InvalidValueError(f"there is no suite {name!r}{suggest(name, [*SUITES, ALL])}")
    foreign = [option for option in given if option not in SUITES[name].options]
    if foreign:
        takers = " and ".join(suite.name for suite in SUITES.values() if foreign[0] in suite.options)
        raise InvalidValueError(f"--{foreign[0].replace('_', '-')} means nothing to suite {name!r}; it is for {takers}")
    return [SUITES[name]]
