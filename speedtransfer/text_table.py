"""Tables of texts on a console."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Column, Table
from rich.text import Text

from speedtransfer.errors import printable


def text_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], bold: Collection[str] = (), no_wrap: bool = True
) -> Table:
    """Return a table whose first column names the rows, those that are `bold` so, with the others aligned to the right."""
    first, *others = (Text(printable(label)) for label in header)
    columns = [Column(label, justify="right", no_wrap=no_wrap, overflow="fold") for label in others]
    table = Table(Column(first, overflow="fold"), *columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row), style="bold" if row[0] in bold else "")
    return table
