"""The command ``speedtransfer bench``: checks its arguments, then measures, prints and writes results.

If a group fails, the others are measured all the same, and the command exits with code 1 and an error that names it. Ctrl-C
keeps the figures of all finished groups.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from speedtransfer.benchmark.environment import environment
from speedtransfer.benchmark.measure import EFFORT, MIN_TABLE_BYTES, SUITES, Suite, measure
from speedtransfer.benchmark.report import TextTable, group_table, groups_of, headlines, markdown, plot, series_tables
from speedtransfer.benchmark.results import GroupResult, to_text
from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import require_matplotlib
from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_size, format_bytes, suggest
from speedtransfer.system import check_writable, replace_file
from speedtransfer.text_table import text_table

ALL = "all"
WIDE = 10  # columns, from which on headers are broken


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
    given: dict[str, Any] = (
        {} if rows is None else {"rows": check_size(rows, "--rows", 100 if suite in ("cache", ALL) else 1)}
    )
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
    if any(case in group.ran for group in groups for case in ours):
        return ""
    reason = next(filter(None, [*(group.skipped for group in groups), *(case.error for case in ours)]), "")
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


# --- a suite -----------------------------------------------------------------------------------------------------------------


def run_suite(
    suite: Suite,
    device: torch.device,
    quick: bool,
    console: Console,
    after_group: Callable[[dict[str, Any]], None],
    seconds: float = math.inf,
    done: Sequence[GroupResult] = (),
    **options: Any,
) -> dict[str, Any]:
    """Measure a suite and return the result as plain data.

    Its keys: "suite", "quick", "options", "environment", "groups", "failures" (reason by title), "complete", "seconds".
    Tables are printed on `console`, each below its title when the group is done. `after_group` gets the result so far after
    every group; errors of groups are recorded as failures, not raised. Groups that would start after so many
    `seconds` are skipped, and those that are `done` already, by their titles, are taken as they are. `options` are those of
    the suite.
    """
    start, missed = time.perf_counter(), list[str]()
    # Invalid options raise before anything is printed.
    groups = suite.groups(device, quick, **options)
    facts, failures = environment(device), dict[str, str]()
    sizing = f", sized for {format_bytes(facts['host_bytes'])} of host memory" if facts["host_bytes"] else ""
    console.print(Text(f"{suite.title}: {facts['device']}{sizing}" + (" (quick)" if quick else ""), style="bold"))
    found: list[GroupResult] = []
    earlier = {group.title: group for group in done}

    def result() -> dict[str, Any]:
        return {
            "suite": suite.name,
            "quick": quick,
            "options": options,
            "environment": facts,
            "groups": [group.to_json() for group in found],
            "failures": failures,
            "complete": len(found) == len(groups) and not missed,
            "seconds": round(time.perf_counter() - start, 1),
        }

    for group in groups:
        console.print(Text(f"\n{group.title}", style="bold"))
        try:
            if group.title in earlier:
                found.append(earlier[group.title])
            elif time.perf_counter() - start < seconds:
                found.append(measure(group, device, **{**EFFORT[quick], **group.effort}))
            else:
                missed.append(group.title)
                found.append(GroupResult(group.title, group.params, skipped="the time was up"))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # leaves memory for CuPy and page-locked tables
        except Exception as error:
            failures[group.title] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found.append(GroupResult(group.title, group.params, skipped=failures[group.title]))
            if not isinstance(error, SpeedtransferError):  # whose message is enough
                console.print(Text(traceback.format_exc()))
        if found[-1].skipped:
            console.print(Text(f"not run: {found[-1].skipped}"))
        else:
            _show_table(console, group_table(suite, found[-1]))
        for case in (case for case in found[-1].cases if case.error):
            console.print(Text(f"{case.name}: not run: {case.error}"))
        after_group(result())
    ran = [group for group in found if group.ran]
    for table in series_tables(suite, ran):
        console.print(Text(f"\n{table.title}", style="bold"))
        _show_table(console, table)
    console.print()
    for text in [*(f"- {line}" for line in headlines(suite, ran)), suite.declared("NOTE", "")]:
        console.print(Text(text))
    return result()


def _show_table(console: Console, table: TextTable) -> None:
    """Print a table without its title; ours in bold."""
    console.print(text_table(table.header, table.rows, table.ours, no_wrap=len(table.header) < WIDE))
