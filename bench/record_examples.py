"""Records an example: ``python bench/record_examples.py ngram_lm`` or ``parallel``, with any flags of the example.

The result goes to ``bench/results/<device>/<example>_example.json``; bench/readme.py draws its losses, and puts it into
docs/results.md.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from store import NGRAM_EXAMPLE, PARALLEL_EXAMPLE, ROOT, header, path_of, write

from speedtransfer.benchmark.report import TextTable, commit_and_date, markdown_table, provenance
from speedtransfer.errors import format_bytes
from speedtransfer.units import format_seconds

sys.path.insert(0, str(ROOT / "examples"))

# The part, and the key of what has losses.
EXAMPLES = {"ngram_lm": (NGRAM_EXAMPLE, "contenders"), "parallel": (PARALLEL_EXAMPLE, "runs")}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    name, *given = sys.argv[1:] if arguments is None else arguments
    part, runs = EXAMPLES[name]
    about = header(ROOT, part)  # before: the commit as it is when it starts
    with tempfile.TemporaryDirectory(prefix="speedtransfer-example-") as folder:
        file = Path(folder, "results.json")
        code: int = importlib.import_module(name).main([*given, "--json", str(file)])
        if code:
            return code
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for one in found[runs].values():
        # More digits are of no use in a picture, and a repository keeps them for ever.
        one["losses"] = [float(f"{loss:.5g}") for loss in one["losses"]]
    out = path_of(root, about["environment"]["device"], part)
    write(out, {**found, **about, "complete": True})
    print(f"wrote {out}")
    return 0


def draw(result: dict[str, Any]) -> Any:
    """Return a figure of the losses, a line for each way that has others than those before it."""
    from speedtransfer.drawing import COLOURS, INK, legend_below, require_matplotlib, tidy

    losses: dict[str, list[float]] = {}
    for name, one in result[dict(EXAMPLES.values())[result["part"]]].items():
        if one["losses"] not in losses.values():
            losses[name] = one["losses"]
    figure = require_matplotlib()(9, 4.4)
    axes = figure.subplots()
    for number, (name, values) in enumerate(losses.items()):
        # Lines of nearly the same numbers lie on each other, the thinner ones above.
        width = 1 + 0.6 * (len(losses) - number - 1)
        axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS[number], lw=width)
    tidy(axes)
    axes.set_title("loss of the batch, by step", fontsize=10, color=INK, loc="left")
    legend_below(figure, axes)
    return figure


def markdown(result: dict[str, Any]) -> str:
    return (_parallel if result["part"] == PARALLEL_EXAMPLE else _ngrams)(result)


def _ngrams(result: dict[str, Any]) -> str:
    import ngram_lm

    settings, found = result["settings"], result["contenders"]
    about = [
        f"{result['data']}, {result['tokens']['train']:,} tokens of {result['vocabulary']:,} words",
        f"GPT of {settings['layers']} blocks, width {settings['width']}",
        f"{settings['heads']} rows a token, each in a head of {settings['rows']:,} x {settings['dim']} {settings['dtype']}",
        f"{settings['steps']:,} steps of {settings['batch'] * settings['context']:,} tokens",
        f"{result['environment']['device']}, torch {result['environment']['versions']['torch']}",
        commit_and_date(result),
    ]
    head, *rows = map(list, ngram_lm.cells(result))
    if all("peak_bytes" in one for one in found.values()):  # until each way was no longer a process of its own
        head.append("peak memory")
        rows = [[*row, format_bytes(one["peak_bytes"])] for row, one in zip(rows, found.values(), strict=True)]
    sentences = "\n".join(f"- {ngram_lm.sentence(one)}" for one in result["comparisons"])
    table = markdown_table(TextTable(head[0], head, rows))
    return "\n\n".join(filter(None, ["; ".join(about) + ".", table, sentences]))


def _parallel(result: dict[str, Any]) -> str:
    from parallel import ONE

    settings = result["settings"]
    head = ["", "input of a process", "rows of a process", "a step", "largest loss difference from one process"]
    table = TextTable("", head, [])
    for kind, found in result["runs"].items():
        (_, given, _), *_ = found["sizes"][0]
        apart = f"{found['difference']:.2g}" if kind != ONE else ""
        table.rows.append([kind, str(tuple(given)), f"{found['rows'][0]:,}", format_seconds(found["step_s"]), apart])
    about = (
        f"{settings['steps']:,} steps of {settings['batch']} examples, {settings['processes']} processes of "
        f"DistributedDataParallel, table of {settings['rows']:,} x {settings['dim']}; first loss "
        f"{result['runs'][ONE]['losses'][0]:.3g}; {provenance(result)}."
    )
    return f"{markdown_table(table)}\n\n{about}"


if __name__ == "__main__":
    sys.exit(main())
