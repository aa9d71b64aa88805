"""Records the example of a GPT with n-gram tables: ``python bench/ngram_example.py``, with any flags of the example's run.py.

The result of a run that came to its end goes to ``bench/results/<device>/ngram_example.json``, with a picture beside it;
bench/readme.py puts both into docs/ngrams.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiment import commit_and_date, markdown_table, record_example
from store import NGRAM_EXAMPLE, ROOT

sys.path.insert(0, str(ROOT / "examples"))

from ngram_lm import run
from ngram_lm.contenders import CONTENDERS
from ngram_lm.pictures import draw_bars, draw_curves
from ngram_lm.table_text import cells, sentence, what
from speedtransfer.drawing import legend_below, require_matplotlib


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    return record_example(NGRAM_EXAMPLE, run.main, draw, "contenders", arguments, root)


# --- words and picture --------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: losses above, speed and memory below."""
    figure = require_matplotlib()(11, 7.6)
    above, below = figure.subfigures(2, 1, height_ratios=(4, 3))
    axes = draw_curves(above, result)
    draw_bars(below, result)
    legend_below(figure, axes)
    return figure


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/ngrams.md; `picture` is its path or nothing."""
    parts = [
        f"{what(result)}; {commit_and_date(result)}.",
        markdown_table(cells(result)),
        "\n".join(f"- {sentence(one)}" for one in result["comparisons"]),
        f"![Losses, speed and memory of {len(CONTENDERS)} ways to hold n-gram tables]({picture})" if picture else "",
    ]
    return "\n\n".join(filter(None, parts))


if __name__ == "__main__":
    sys.exit(main())
