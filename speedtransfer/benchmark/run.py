"""Runs a suite: prints a table after each group, and returns the result as plain data."""

from __future__ import annotations

import gc
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from speedtransfer.benchmark.environment import environment
from speedtransfer.benchmark.measure import EFFORT, measure
from speedtransfer.benchmark.report import TextTable, group_table, headlines, series_tables
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.suites import Suite
from speedtransfer.errors import SpeedtransferError, format_bytes


def run_suite(
    suite: Suite,
    device: torch.device,
    quick: bool,
    console: Console | None = None,
    after_group: Callable[[dict[str, Any]], None] | None = None,
    seconds: float | None = None,
    done: Sequence[GroupResult] = (),
    **options: Any,
) -> dict[str, Any]:
    """Measure a suite and return the result as plain data.

    Its keys: "suite", "quick", "options", "environment", "groups", "failures" (reason by title), "complete", "seconds".
    Tables are printed on a `console`, with a bar on standard error if that is a terminal. `after_group` gets the result so
    far after every group; errors of groups are recorded as failures then, not raised. Groups that would start after so many
    `seconds` are skipped, and those that are `done` already, by their titles, are taken as they are. `options` are those of
    the suite.
    """
    start, missed = time.perf_counter(), list[str]()
    # Invalid options raise before anything is printed.
    groups = suite.groups(device, quick, **options)
    facts, failures = environment(device), dict[str, str]()
    show = console or Console(quiet=True)
    terminal = Console(stderr=True)
    bar = Progress(console=terminal, transient=True, disable=console is None or not terminal.is_terminal)
    sizing = f", sized for {format_bytes(facts['host_bytes'])} of host memory" if facts["host_bytes"] else ""
    show.print(Text(f"{suite.title}: {facts['device']}{sizing}" + (" (quick)" if quick else ""), style="bold"))
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

    with bar:
        task = bar.add_task(suite.name, total=len(groups))
        for group in groups:
            bar.update(task, description=textwrap.shorten(f"{suite.name}: {group.title}", 60, placeholder=" ..."))
            left_s = float("inf") if seconds is None else seconds - (time.perf_counter() - start)
            try:
                if group.title in earlier:
                    found.append(earlier[group.title])
                elif left_s > 0:
                    found.append(measure(group, device, **{**EFFORT[quick], **group.effort}))
                else:
                    missed.append(group.title)
                    found.append(GroupResult(group.title, group.params, skipped="the time was up"))
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()  # leaves memory for CuPy and page-locked tables
            except Exception as error:
                if after_group is None:
                    raise
                failures[group.title] = f"{type(error).__name__}: {' '.join(str(error).split())}"
                found.append(GroupResult(group.title, group.params, skipped=failures[group.title]))
                if not isinstance(error, SpeedtransferError):  # whose message is enough
                    show.print(Text(traceback.format_exc()))
            bar.stop()  # gives way to the table
            _show(show, suite, found[-1])
            bar.advance(task)
            bar.start()
            if after_group is not None:
                after_group(result())
    ran = [group for group in found if group.ran]
    for table in series_tables(suite, ran):
        _show_table(show, table)
    show.print()
    for text in [*(f"- {line}" for line in headlines(suite, ran)), suite.declared("NOTE", "")]:
        show.print(Text(text))
    return result()


def _show(console: Console, suite: Suite, group: GroupResult) -> None:
    if group.skipped:
        console.print(Text(f"\n{group.title}: not run: {group.skipped}"))
        return
    _show_table(console, group_table(suite, group))
    for case in group.cases:
        if case.error:
            console.print(Text(f"{case.name}: not run: {case.error}"))


def _show_table(console: Console, table: TextTable) -> None:
    """Print a table with its title; ours in bold."""
    made = Table(box=None, pad_edge=False)
    for number, label in enumerate(table.header):
        made.add_column(Text(label), justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    for name, *rest in table.rows:
        made.add_row(*map(Text, (name, *rest)), style="bold" if name in table.ours else "")
    console.print(Text(f"\n{table.title}", style="bold"))
    console.print(made)
