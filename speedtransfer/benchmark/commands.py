"""The command ``speedtransfer bench``: checks its arguments, then measures, prints and writes results.

If a group fails, the others are measured all the same, and the command exits with code 1 and an error that names it. Ctrl-C
keeps the figures of all finished groups.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speedtransfer.benchmark.report import groups_of, markdown, plot
from speedtransfer.benchmark.results import to_text
from speedtransfer.benchmark.run import run_suite
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES, SUITES
from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import require_matplotlib
from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_size, suggest
from speedtransfer.system import check_writable, replace_file

ALL = "all"


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=f"{', '.join(SUITES)} or {ALL}.")],
    json: Annotated[
        Path | None,
        typer.Option(help=f"Write the figures to this file; to this folder with {ALL}.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write pictures and report.md to this folder.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few samples.")] = False,
    device: Annotated[str | None, typer.Option(help="Compute device.", show_default="cuda if there is one")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows: of a batch (transfer), of the table.", show_default="suite's")
    ] = None,
    table_bytes: Annotated[
        float | None, typer.Option(help="Bytes of the table (transfer), for instance 50e9.", show_default="suite's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Measure how fast rows move on this machine, compared with PyTorch and with a plain copy."""
    if suite not in (*SUITES, ALL):
        raise InvalidValueError(f"there is no suite {suite!r}{suggest(suite, [*SUITES, ALL])}")
    given: dict[str, int] = {} if rows is None else {"rows": check_size(rows, "--rows", 1)}
    if table_bytes is not None:
        if suite not in ("transfer", ALL):
            raise InvalidValueError(f"--table-bytes means nothing to suite {suite!r}; it is for transfer")
        if not MIN_TABLE_BYTES <= table_bytes < math.inf:
            raise InvalidValueError(
                f"--table-bytes is {table_bytes:g} but must be a number from {MIN_TABLE_BYTES} on; pass for instance 50e9"
            )
        given["table_bytes"] = int(table_bytes)
    compute = resolve_device(device)
    check_size(seed, "--seed")
    if plot is not None:
        require_matplotlib()
        check_writable(plot / "report.md")
    if json is not None:
        check_writable(json / "transfer.json" if suite == ALL else json)
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    results: dict[str, dict[str, Any]] = {}

    def keep(result: dict[str, Any]) -> None:
        results[result["suite"]] = result
        if json is not None:
            _write(json / f"{result['suite']}.json" if suite == ALL else json, f"{to_text(result)}\n".encode())

    failed = list[str]()
    try:
        for one in SUITES.values() if suite == ALL else [SUITES[suite]]:
            result = run_suite(one, compute, quick, console, keep, seed=seed, **given)
            keep(result)
            failed += [f"{title} ({reason})" for title, reason in result["failures"].items()]
    finally:
        if plot is not None and results:
            _write_report(plot, results)
        for path in (json, plot):
            if path is not None and results:
                typer.echo(f"wrote {path}")
    if failed:
        count = f"{len(failed)} group{'s' * (len(failed) > 1)} failed"
        typer.echo(f"speedtransfer: error: {count}: {'; '.join(failed)}", err=True)
        raise typer.Exit(1)
    reasons = filter(None, map(nothing_of_ours, results.values()))
    if reason := next(reasons, ""):
        raise SpeedtransferError(reason)


def nothing_of_ours(result: dict[str, Any]) -> str:
    """Return why a suite has no figure of this library; "" if it has one."""
    groups = groups_of(result)
    ours = [case for group in groups for case in group.cases if case.role == "ours"]
    reasons = filter(None, [*(group.skipped for group in groups), *(case.error for case in ours)])
    reason = "" if any(case.samples_s for case in ours) else next(reasons, "")
    return f"suite {result['suite']!r} could measure nothing of this library here: {reason}" if reason else ""


def _write_report(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write a picture of each suite, and report.md, which shows them."""
    parts = ["# speedtransfer bench"]
    for name, result in results.items():
        parts.append(markdown(result))
        picture = plot(result)
        if picture is not None:
            _write(folder / f"{name}.png", picture)
            parts.append(f"![{name}]({name}.png)")
    _write(folder / "report.md", ("\n\n".join(parts) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    with replace_file(path) as file:
        file.write(content)
