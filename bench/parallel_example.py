"""Records the example of one device and several: ``python bench/parallel_example.py``, with any flags of the example's run.py.

The result of a run whose losses agree goes to ``bench/results/<device>/parallel_example.json``, with a picture beside it;
bench/readme.py puts both into docs/parallel.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiment import blocks_of, markdown_table, provenance, record_example
from store import PARALLEL_EXAMPLE, ROOT

sys.path.insert(0, str(ROOT / "examples"))

from parallel import pictures, run
from parallel.training import ONE
from speedtransfer.units import format_seconds


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    return record_example(PARALLEL_EXAMPLE, run.main, pictures.draw, "runs", arguments, root)


# --- words and picture --------------------------------------------------------------------------------------------------


draw = pictures.draw


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/parallel.md; `picture` is its path or nothing."""
    settings = result["settings"]
    table = [["", "input of a process", "rows of a process", "a step", "off the losses of one process"]]
    for kind, found in result["runs"].items():
        (_, given, _), *_ = found["sizes"][0]
        apart = f"{found['difference']:.2g}" if kind != ONE else ""
        table.append([kind, str(tuple(given)), f"{found['rows'][0]:,}", format_seconds(found["step_s"]), apart])
    about = (
        f"{settings['steps']:,} steps of {settings['batch']} examples, {settings['processes']} processes of "
        f"DistributedDataParallel, table of {settings['rows']:,} x {settings['dim']}; first loss "
        f"{result['runs'][ONE]['losses'][0]:.3g}; {provenance(result)}."
    )
    title = "Losses of one process and of several, their differences, and times of a step"
    return blocks_of(picture, title, markdown_table(table), about)


if __name__ == "__main__":
    sys.exit(main())
