"""What bench/node2vec.py has found, as a table, a picture and in words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from node2vec_scores import MEASURES
from pictures import save_picture

from speedtransfer.benchmark.drawing import COLOURS, INK, require_matplotlib, tidy


def save(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none."""
    return save_picture(lambda: draw(result), path)


def draw(result: dict[str, Any]) -> bytes:
    """Return the picture as PNG: for either measure the means by share of training nodes, with their intervals."""
    figure = require_matplotlib()(12, 4)
    shares, systems = (list(dict.fromkeys(row[key] for row in result["summary"])) for key in ("share", "system"))
    width = 0.8 / len(systems)
    for axes, measure in zip(figure.subplots(1, len(MEASURES)), MEASURES, strict=True):
        for place, system in enumerate(systems):
            rows = [row for row in result["summary"] if (row["measure"], row["system"]) == (measure, system)]
            axes.bar(
                [x + (place - (len(systems) - 1) / 2) * width for x in range(len(shares))],
                [row["mean"] for row in rows],
                width,
                yerr=[row["half"] or 0 for row in rows],
                error_kw={"ecolor": INK, "lw": 1},
                color="#b8bec8" if place == 0 else COLOURS[place - 1],
                label=system if place == 0 else f"speedtransfer, {system}",
            )
        axes.set_xticks(range(len(shares)), [f"{float(share):.0%} of the nodes" for share in shares])
        axes.set_title(f"{measure} by nodes trained on (higher is better)", fontsize=11, color=INK, loc="left")
        tidy(axes)
        axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def table(result: dict[str, Any]) -> str:
    """Return means and differences to gensim as plain text."""
    columns = [(share, measure) for share in _shares(result) for measure in MEASURES]
    rows = [["", "", *(share for share, _ in columns)], ["", "", *(measure for _, measure in columns)]]
    for system in dict.fromkeys(row["system"] for row in result["summary"]):
        of = {(row["share"], row["measure"]): row for row in result["summary"] if row["system"] == system}
        rows.append([system, "", *(_number(of[column]) for column in columns)])
        if all("difference" in row for row in of.values()):
            rows.append(["", "- gensim", *(_number(of[column]["difference"], "+") for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shares(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["share"] for row in result["summary"]))


def _number(found: dict[str, Any], sign: str = "") -> str:
    half = "" if found["half"] is None else f" ± {found['half']:.4f}"
    return f"{found['mean']:{sign}.4f}{half}"


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield what was trained, and how it was judged."""
    settings, graph, environment = result["settings"], result["graph"], result["environment"]
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    yield (
        f"{graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['groups']} groups; {settings['walks']} walks of "
        f"{settings['walk_length']} nodes from each node with p={settings['p']:g} and q={settings['q']:g}; skip-gram, dim "
        f"{settings['dim']}, window {settings['window']}, {settings['negative']} negatives, no subsampling, epochs: "
        f"{settings['epochs']}; {environment['device']}, gensim {environment['versions']['gensim']}, torch "
        f"{environment['versions']['torch']}, commit {commit}, {environment['date'][:10]}."
    )
    yield (
        f"Logistic regression, one group against the rest, trained on a share of the nodes; as many groups are predicted as a "
        f"node has. Means of {settings['seeds']} seeds (walks, training, {settings['splits']} splits each); ± is half of the "
        "95% interval over the seeds, that of a difference seed by seed."
    )
