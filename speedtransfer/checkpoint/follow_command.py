"""The command ``speedtransfer follow``: which deltas a folder holds, and whether each begins where the one before ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.errors import InvalidValueError, StorageError, format_bytes


def follow(
    folder: Annotated[Path, typer.Argument(help="A folder of files that st.save_delta has written.")],
    pattern: Annotated[str, typer.Option(help="Which files; their order is that of their names.")] = "*.safetensors",
) -> None:
    """List the deltas in FOLDER, in the order of their names: how old, how many rows, and where one is missing.

    Exit code 1: one is missing, or damaged.
    """
    from rich.console import Console
    from rich.table import Table

    if not folder.is_dir():
        raise InvalidValueError(
            f"FOLDER is {str(folder)!r}, which is no folder; pass the one that deltas are written to"
        )
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise InvalidValueError(f"{str(folder)!r} holds no {pattern}; pass another folder, or --pattern")
    shown = Table("delta", "age", "rows", "gone", "size", "begins")
    before: dict[str, str] | None = None
    whole = True
    for path in paths:
        facts, now = path.stat(), time.time()
        try:
            delta = Delta(path)
        except StorageError as error:
            shown.add_row(
                path.name, _age(now - facts.st_mtime), "", "", format_bytes(facts.st_size), f"[red]{error}[/red]"
            )
            before, whole = {}, False
            continue
        begins = {key: table.since for key, table in delta.tables.items()}
        follows = before is None or begins == before
        whole &= follows
        rows, gone = (sum(len(getattr(found, name)) for found in delta.rows.values()) for name in ("ids", "gone"))
        said = (
            "first"
            if before is None
            else "where the one before ends"
            if follows
            else "[red]elsewhere: one is missing[/red]"
        )
        shown.add_row(
            path.name, _age(now - facts.st_mtime), f"{rows:,}", f"{gone:,}", format_bytes(facts.st_size), said
        )
        before = {key: table.now for key, table in delta.tables.items()}
    Console().print(shown)
    if not whole:
        raise typer.Exit(1)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0):.1f} s"
