"""The command ``speedtransfer bench``: checks its arguments, then measures, prints and writes results.

If a group fails, the others are measured all the same, and the command exits with code 1 and an error that names it. Ctrl-C
keeps the figures of all finished groups.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speedtransfer.benchmark.report import groups_of, markdown, plot
from speedtransfer.benchmark.results import to_text
from speedtransfer.benchmark.run import run_suite
from speedtransfer.benchmark.suites import MIN_TABLE_BYTES, SUITES, Suite
from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import require_matplotlib
from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError, check_size, suggest
from speedtransfer.system import replace_file

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
    if table_bytes is not None and not math.isfinite(table_bytes):
        raise InvalidValueError(f"--table-bytes is {table_bytes} but must be a number of bytes; pass for instance 50e9")
    given: dict[str, int] = {}
    if rows is not None:
        given["rows"] = check_size(rows, "--rows", 1)
    if table_bytes is not None:
        given["table_bytes"] = check_size(int(table_bytes), "--table-bytes", MIN_TABLE_BYTES)
    suites = _suites(suite, given)
    compute = resolve_device(device)
    check_size(seed, "--seed")
    _check_outputs(json, plot, several=suite == ALL)
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    results: dict[str, dict[str, Any]] = {}

    def keep(result: dict[str, Any]) -> None:
        results[result["suite"]] = result
        if json is not None:
            _write(json / f"{result['suite']}.json" if suite == ALL else json, f"{to_text(result)}\n".encode())

    failed, reasons = list[str](), list[str]()
    try:
        for one in suites:
            mine: dict[str, Any] = {name: value for name, value in given.items() if name in one.options}
            result = run_suite(one, compute, quick, console, keep, seed=seed, **mine)
            keep(result)
            failed += [f"{title} ({reason})" for title, reason in result["failures"].items()]
            reasons += filter(None, [nothing_of_ours(result)])
    finally:
        if plot is not None and results:
            _write_report(plot, results)
        for path in (json, plot):
            if path is not None and path.exists():
                typer.echo(f"wrote {path}")
    if failed:
        count = f"{len(failed)} group{'s' * (len(failed) > 1)} failed"
        typer.echo(f"speedtransfer: error: {count}: {'; '.join(failed)}", err=True)
        raise typer.Exit(1)
    if reasons:
        raise SpeedtransferError(reasons[0])


def nothing_of_ours(result: dict[str, Any]) -> str:
    """Return why a suite has no figure of this library; "" if it has one."""
    groups = groups_of(result)
    ours = [case for group in groups for case in group.cases if case.role == "ours"]
    if any(case.samples_s for case in ours):
        return ""
    reason = next((text for text in [*(group.skipped for group in groups), *(case.error for case in ours)] if text), "")
    return f"suite {result['suite']!r} could measure nothing of this library here: {reason}" if reason else ""


def _suites(name: str, given: dict[str, int]) -> list[Suite]:
    """Return the suites called `name`; raises if there are none or an option does not apply to them."""
    if name == ALL:
        return list(SUITES.values())
    if name not in SUITES:
        raise InvalidValueError(f"there is no suite {name!r}{suggest(name, [*SUITES, ALL])}")
    foreign = [option for option in given if option not in SUITES[name].options]
    if foreign:
        takers = " and ".join(suite.name for suite in SUITES.values() if foreign[0] in suite.options)
        raise InvalidValueError(f"--{foreign[0].replace('_', '-')} means nothing to suite {name!r}; it is for {takers}")
    return [SUITES[name]]


def _write_report(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write a picture of each suite, and report.md, which shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, result in results.items():
        parts.append(markdown(result))
        picture = plot(result)
        if picture is not None:
            _write(folder / f"{name}.png", picture)
            parts.append(f"![{name}]({name}.png)")
    _write(folder / "report.md", ("\n\n".join(["# speedtransfer bench", *parts]) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(content)


def _check_outputs(json: Path | None, folder: Path | None, several: bool) -> None:
    """Raise StorageError if a path cannot be written, and MissingPackageError if matplotlib is needed and not installed."""
    if folder is not None:
        require_matplotlib()
        _check_folder(folder, "--plot")
    if json is not None and not several and json.is_dir():
        raise StorageError(f"--json {str(json)!r} is a folder but one suite is one file; name the file")
    if json is not None:
        _check_folder(json if several else json.parent, "--json", create=several)


def _check_folder(folder: Path, option: str, create: bool = True) -> None:
    """Raise StorageError if `folder` cannot be written to, or cannot be created."""
    present = folder
    while create and not os.path.lexists(present) and present != present.parent:
        present = present.parent
    problem = "is no folder" if os.path.lexists(present) else "does not exist"
    if present.is_dir():
        try:
            with tempfile.TemporaryFile(dir=present):
                return
        except OSError as error:
            problem = f"cannot be written to ({error.strerror})"
    raise StorageError(f"{option}: {str(present)!r} {problem}; choose a folder you may write to")
