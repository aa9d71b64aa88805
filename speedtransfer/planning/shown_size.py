"""What ``speedtransfer plan`` shows of a table in one process: bytes by plane, and what a step moves."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from speedtransfer.errors import format_bytes
from speedtransfer.nn.sizing import TableSize
from speedtransfer.planning.shown_ranks import Rates
from speedtransfer.ranks.cost import StepCost, expected_seconds
from speedtransfer.units import format_seconds


def show_size(
    console: Console, size: TableSize, trained: str, lookups: int | None, unique: float | None, rates: Rates
) -> None:
    """Print the planes of a table and, where the lookups of a step are known, its bytes and their time."""
    idle = "" if size.down_row_bytes == 0 else f", idle rows {'exact' if size.exact else 'lazy'}"
    console.print(Text(f"{size.rows:,} x {size.dim}, {trained}{idle}\n"))
    table = TextTable("", box=None, pad_edge=False)
    for label in ("stored as", "bytes a row", "bytes in all", ""):
        table.add_column(label, justify="right", no_wrap=True)
    for plane in size.planes:
        count = plane.row_bytes * size.rows
        dtype = str(plane.dtype).removeprefix("torch.")
        table.add_row(plane.name, dtype, f"{plane.row_bytes:,}", f"{count:,}", format_bytes(count))
    table.add_row("in all", "", f"{size.row_bytes:,}", f"{size.total_bytes:,}", format_bytes(size.total_bytes))
    console.print(table)
    if lookups is None or unique is None:
        return
    step = size.step(unique)
    cost = StepCost(bus_up=step.up, bus_down=step.down)
    seconds = expected_seconds(cost, 0.0, 1.0, 1e9 * rates.bus_gbps)
    what = "lookup" if size.down_row_bytes == 0 else "step"
    console.print(
        Text(
            f"\na {what} of {lookups:,} rows, {unique:,.0f} of them distinct: {format_bytes(step.up)} from host memory, "
            f"{format_bytes(step.down)} back; {format_seconds(seconds)} at {rates.bus_gbps:g} GB/s, one after the other"
        )
    )
