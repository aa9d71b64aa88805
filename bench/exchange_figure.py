"""What suite `exchange` has found, for docs/compressed-exchange.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictures import save_picture

from speedtransfer.benchmark.report import markdown_table, missing, plot, provenance, summary_tables


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none."""
    return save_picture(lambda: plot(result) or b"", path)


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of the page; `picture` is its path or nothing."""
    shown = f"![Bytes, steps and seconds to the same loss, by how gradients are sent]({picture})" if picture else ""
    tables = [markdown_table(table) for table in summary_tables(result)]
    lacking = "\n".join(f"- {line}" for line in missing(result))
    return "\n\n".join(filter(None, [shown, *tables, lacking, f"{provenance(result)}; medians."]))
