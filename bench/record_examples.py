"""Records an example: ``python bench/record_examples.py ngram_lm`` or ``parallel``, with any flags of the example's run.py.

The result of a run that came to its end goes to ``bench/results/<device>/<example>_example.json``, with a picture beside it;
bench/readme.py puts both into docs/ngrams.md and docs/parallel.md.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiment import blocks_of, markdown_table, write_result
from store import NGRAM_EXAMPLE, PARALLEL_EXAMPLE, ROOT, header, path_of

from speedtransfer.benchmark.report import commit_and_date, provenance

sys.path.insert(0, str(ROOT / "examples"))

# The part, and the key of what has losses.
EXAMPLES = {"ngram_lm": (NGRAM_EXAMPLE, "contenders"), "parallel": (PARALLEL_EXAMPLE, "runs")}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    name, *given = sys.argv[1:] if arguments is None else arguments
    part, runs = EXAMPLES[name]
    about = header(ROOT, part)  # before: the commit as it is when it starts
    with tempfile.TemporaryDirectory(prefix="speedtransfer-example-") as folder:
        code: int = importlib.import_module(f"{name}.run").main([*given, "--out", folder])
        if code:
            return code
        found: dict[str, Any] = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    for one in found[runs].values():
        # More digits are of no use in a picture, and a repository keeps them for ever.
        one["losses"] = [float(f"{loss:.5g}") for loss in one["losses"]]
    out = path_of(root, about["environment"]["device"], part)
    write_result({**found, **about, "complete": True}, out, draw)
    return 0


def draw(result: dict[str, Any]) -> Any:
    """Return the picture of an example."""
    if result["part"] == PARALLEL_EXAMPLE:
        return importlib.import_module("parallel.pictures").draw(result)
    from ngram_lm.pictures import draw_bars, draw_curves
    from speedtransfer.drawing import legend_below, require_matplotlib

    figure = require_matplotlib()(11, 7.6)
    above, below = figure.subfigures(2, 1, height_ratios=(4, 3))
    axes = draw_curves(above, result)
    draw_bars(below, result)
    legend_below(figure, axes)
    return figure


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of a page; `picture` is its path or nothing."""
    return (_parallel if result["part"] == PARALLEL_EXAMPLE else _ngrams)(result, picture)


def _ngrams(result: dict[str, Any], picture: str) -> str:
    from ngram_lm.table_text import cells, sentence, what

    parts = [
        f"{what(result)}; {commit_and_date(result)}.",
        markdown_table(cells(result)),
        "\n".join(f"- {sentence(one)}" for one in result["comparisons"]),
        f"![Losses, speed and memory of {len(result['contenders'])} ways to hold n-gram tables]({picture})"
        * bool(picture),
    ]
    return "\n\n".join(filter(None, parts))


def _parallel(result: dict[str, Any], picture: str) -> str:
    from parallel.training import ONE
    from speedtransfer.units import format_seconds

    settings = result["settings"]
    table = [["", "input of a process", "rows of a process", "a step", "largest loss difference from one process"]]
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
