"""The command ``speedtransfer follow``: which deltas a folder holds, and whether each begins where the one before ends."""

from __future__ import annotations

import fnmatch
import time
from pathlib import Path
from typing import Annotated

import typer

from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.errors import InvalidValueError, StorageError, format_bytes, printable

_FOLLOWS, _MISSING = "where the one before ends", "elsewhere: one is missing, or there twice"


def follow(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Files that st.save_delta has written.")],
    pattern: Annotated[str, typer.Option(help="Which files; their order is that of their names.")] = "*.safetensors",
) -> None:
    """List the deltas in FOLDER, in the order of their names: how old, how many rows, and where one is missing.

    Exit code 1: one is missing, or damaged.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not folder.is_dir():
        raise InvalidValueError(
            f"FOLDER is {str(folder)!r}, which is not a folder; pass the one that deltas are written to"
        )
    paths = sorted(path for path in folder.iterdir() if path.is_file() and fnmatch.fnmatch(path.name, pattern))
    if not paths:
        raise InvalidValueError(f"{str(folder)!r} holds no {pattern!r}; pass another folder, or --pattern")
    shown = Table("delta", "age", "rows", "gone", "size", "begins")
    before: Delta | None = None
    whole = True
    for number, path in enumerate(paths):
        facts, rows, gone = path.stat(), "", ""
        try:
            delta = Delta(path)
        except StorageError as error:
            said, follows, before = printable(str(error)), False, None
        else:
            rows, gone = (f"{sum(len(getattr(r, name)) for r in delta.rows.values()):,}" for name in ("ids", "gone"))
            follows = not number or (before is not None and delta.comes_after(before))
            said = "first" if not number else _FOLLOWS if follows else _MISSING
            before = delta
        whole &= follows
        # As texts: a name may have what rich takes for a colour.
        cells = printable(path.name), _age(time.time() - facts.st_mtime), rows, gone, format_bytes(facts.st_size)
        shown.add_row(*map(Text, cells), Text(said, "" if follows else "red"))
    Console().print(shown)
    if not whole:
        raise typer.Exit(1)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0):.1f} s"
