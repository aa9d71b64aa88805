"""Records the example of one device and several: ``python bench/parallel_example.py``, with any flags of the example's run.py.

The result of a run whose losses agree goes to ``bench/results/<device>/parallel_example.json``, with a picture beside it;
bench/readme.py puts both into docs/parallel.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from example_results import record_example
from parallel_example_figure import save
from store import PARALLEL_EXAMPLE, ROOT

from parallel import run


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    return record_example(PARALLEL_EXAMPLE, run.main, save, "runs", arguments, root)


if __name__ == "__main__":
    sys.exit(main())
