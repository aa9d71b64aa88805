"""Records the example of a GPT with n-gram tables: ``python bench/ngram_example.py``, with any flags of the example's run.py.

The result of a run that came to its end goes to ``bench/results/<device>/ngram_example.json``, with a picture beside it;
bench/readme.py puts both into docs/ngrams.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from example_results import record_example
from ngram_example_figure import save
from store import NGRAM_EXAMPLE, ROOT

from ngram_lm import run


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    return record_example(NGRAM_EXAMPLE, run.main, save, "contenders", arguments, root)


if __name__ == "__main__":
    sys.exit(main())
