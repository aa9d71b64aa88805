"""Trains node2vec beside gensim, on the same walks by the same settings; compares how well vectors predict groups of nodes.

``python bench/node2vec.py --data FOLDER``, where FOLDER has ``bc_adjlist.txt`` (or ``.txt.xz``), a node of BlogCatalog and its
neighbours a line, and ``bc_labels.txt``, a node and its groups a line; the data are not part of this repository. Each seed has
walks of its own, written once to a text file that all are trained on, and its own splits into training and test nodes. The
result goes to ``bench/results/<device>/node2vec.json``, with a picture beside it. Needs gensim and scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiment import (
    commit_and_date,
    exit_code,
    make_parser,
    require,
    resume,
    stop_on_signals,
    text_table,
    write_result,
)
from node2vec_data import MEASURES, Data, interval, read_data, save_walks, score
from store import NODE2VEC, PARTIAL, QUICK, ROOT, header, path_of, write
from word2vec_child import cores

from speedtransfer.drawing import COLOURS, INK, require_matplotlib, tidy
from speedtransfer.word2vec import Settings as Training

GENSIM = "gensim"
OPTIMIZERS = ("adamw", "sgd", "adagrad", "adamax")


@dataclass(frozen=True)
class Settings:
    """Settings of training and evaluation; window, walks, p and q are those of the node2vec paper for BlogCatalog."""

    dim: int = 128
    window: int = 10
    negative: int = 5
    epochs: int = 1
    walks: int = 10
    walk_length: int = 80
    p: float = 0.25
    q: float = 0.25
    seeds: int = 3
    splits: int = 3
    shares: tuple[float, ...] = (0.1, 0.5, 0.9)


QUICK_SETTINGS = Settings(dim=64, walks=2, walk_length=40, seeds=2, splits=1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("node2vec", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the graph and its groups")
    parser.add_argument(
        "--quick", action="store_true", help="few and short walks and small vectors, to see that it runs"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _measure_all(args), "stopped; --resume goes on after the last run that was printed")


def _measure_all(args: argparse.Namespace) -> int:
    settings = QUICK_SETTINGS if args.quick else Settings()
    require("gensim", "sklearn")
    about = header(ROOT, NODE2VEC)  # before: the sources as they are when it starts
    for package in ("gensim", "scikit-learn"):
        about["environment"]["versions"][package] = importlib.metadata.version(package)
    data = read_data(args.data)
    out = args.out or path_of(ROOT, about["environment"]["device"], NODE2VEC, QUICK if args.quick else "")
    partial = out.with_name(f"{out.stem}{PARTIAL}.json")
    graph = {
        "nodes": len(data.graph),
        "edges": edges_of(data),
        "labelled": len(data.nodes),
        "groups": data.groups.shape[1],
    }
    result: dict[str, Any] = {**about, "settings": json.loads(json.dumps(asdict(settings))), "graph": graph}
    runs: list[dict[str, Any]] = []
    if args.resume:
        same = ("settings", "graph")
        runs = resume(partial, result, lambda old: [key for key in same if old[key] != result[key]])["runs"]
    for seed in range(1, settings.seeds + 1):
        for run in measure(data, settings, seed, {one["system"] for one in runs if one["seed"] == seed}):
            runs.append(run)
            write(partial, {**result, "runs": runs})
    result |= {"runs": runs, "summary": summary(runs, settings), "complete": not args.quick}
    write_result(result, out, draw, [*sentences(result), "", table(result)])
    partial.unlink()
    return 0


def edges_of(data: Data) -> int:
    """Return the number of edges; a loop has one entry in the graph, any other edge two."""
    heads = np.repeat(np.arange(len(data.graph)), np.diff(data.graph.begins))
    loops = int((heads == data.graph.neighbours).sum())
    return (len(heads) + loops) // 2


def measure(data: Data, settings: Settings, seed: int, done: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a run of gensim and one of each of our optimizers on the walks of `seed`, but for those in `done`."""
    left = [system for system in (GENSIM, *OPTIMIZERS) if system not in done]
    if not left:
        return
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        walks = Path(folder, "walks.txt")
        shape = Training(walks=settings.walks, walk_length=settings.walk_length, p=settings.p, q=settings.q, seed=seed)
        num_nodes = save_walks(data.graph, shape, walks)
        for system in left:
            start = time.perf_counter()
            vector_of, facts = (
                train_gensim(walks, settings, seed) if system == GENSIM else train_ours(walks, settings, seed, system)
            )
            seconds = time.perf_counter() - start
            vectors = np.stack([vector_of(node) for node in data.nodes])
            scores = {
                f"{share:g}": [score(vectors, data.groups, share, 1000 * seed + n) for n in range(settings.splits)]
                for share in settings.shares
            }
            run = {
                "system": system,
                "seed": seed,
                "walked_nodes": num_nodes,
                "seconds": seconds,
                **facts,
                "scores": scores,
            }
            print(describe(run), flush=True)
            yield run


def train_gensim(walks: Path, settings: Settings, seed: int) -> tuple[Callable[[str], np.ndarray], dict[str, Any]]:
    """Train by gensim; return a function from node to vector, and facts about the run."""
    from gensim.models import Word2Vec

    model = Word2Vec(
        corpus_file=str(walks),
        sg=1,
        hs=0,
        negative=settings.negative,
        vector_size=settings.dim,
        window=settings.window,
        epochs=settings.epochs,
        sample=0,
        min_count=1,
        workers=cores(),
        seed=seed,
    )
    return model.wv.get_vector, {}


def train_ours(
    walks: Path, settings: Settings, seed: int, optimizer: str
) -> tuple[Callable[[str], np.ndarray], dict[str, Any]]:
    """Train by this package; return a function from node to vector, and facts about the run."""
    from speedtransfer.word2vec import Corpus, Trainer
    from speedtransfer.word2vec.progress import TrainingProgress

    training = Training(
        dim=settings.dim,
        optimizer=optimizer,
        window=settings.window,
        negative=settings.negative,
        epochs=settings.epochs,
        kind="lines",
        sample=0,
        min_count=1,
        seed=seed,
    )
    trainer = Trainer(Corpus(walks, min_count=1, kind="lines"), training)
    trainer.run(TrainingProgress(enabled=False))
    return trainer.vectors().__getitem__, {"loss": trainer.loss, "block_words": trainer.block_words}


def summary(runs: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Return means by system, share and measure, and paired differences to gensim, with 95% intervals over the seeds."""
    rows = []
    for system in dict.fromkeys(run["system"] for run in runs):
        for share in (f"{share:g}" for share in settings.shares):
            for name in MEASURES:
                ours, theirs = (means(runs, who, share, name) for who in (system, GENSIM))
                row = {"system": system, "share": share, "measure": name, **interval(ours)}
                if system != GENSIM:
                    row["difference"] = interval([a - b for a, b in zip(ours, theirs, strict=True)])
                rows.append(row)
    return rows


def means(runs: list[dict[str, Any]], system: str, share: str, name: str) -> list[float]:
    """Return the mean over the splits of each seed."""
    chosen = sorted((run for run in runs if run["system"] == system), key=lambda run: run["seed"])
    return [statistics.fmean(split[name] for split in run["scores"][share]) for run in chosen]


def describe(run: dict[str, Any]) -> str:
    """Return a line about one run."""
    found = (
        f"{float(share):.0%} "
        + " ".join(f"{statistics.fmean(split[name] for split in splits):.4f}" for name in MEASURES)
        for share, splits in run["scores"].items()
    )
    return f"seed {run['seed']}, {run['system']}: {run['seconds']:.0f} s; {' / '.join(MEASURES)} at {', '.join(found)}"


# --- words and picture ----------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: for either measure the means by share of training nodes, with their intervals."""
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
    return figure


def table(result: dict[str, Any]) -> str:
    """Return means and differences to gensim as plain text."""
    columns = [(share, measure) for share in _shares(result) for measure in MEASURES]
    rows = [["", "", *(share for share, _ in columns)], ["", "", *(measure for _, measure in columns)]]
    for system in dict.fromkeys(row["system"] for row in result["summary"]):
        of = {(row["share"], row["measure"]): row for row in result["summary"] if row["system"] == system}
        rows.append([system, "", *(_number(of[column]) for column in columns)])
        if all("difference" in row for row in of.values()):
            rows.append(["", "- gensim", *(_number(of[column]["difference"], "+") for column in columns)])
    return text_table(rows)


def _shares(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["share"] for row in result["summary"]))


def _number(found: dict[str, Any], sign: str = "") -> str:
    half = "" if found["half"] is None else f" ± {found['half']:.4f}"
    return f"{found['mean']:{sign}.4f}{half}"


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield what was trained, and how it was evaluated."""
    settings, graph, environment = result["settings"], result["graph"], result["environment"]
    yield (
        f"{graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['groups']} groups; {settings['walks']} walks of "
        f"{settings['walk_length']} nodes from each node with p={settings['p']:g} and q={settings['q']:g}; skip-gram, dim "
        f"{settings['dim']}, window {settings['window']}, {settings['negative']} negatives, no subsampling, epochs: "
        f"{settings['epochs']}; {environment['device']}, gensim {environment['versions']['gensim']}, torch "
        f"{environment['versions']['torch']}, {commit_and_date(result)}."
    )
    yield (
        f"Logistic regression, one group against the rest, trained on a share of the nodes; as many groups are predicted as a "
        f"node has. Means of {settings['seeds']} seeds (walks, training, {settings['splits']} splits each); ± is half of the "
        "95% interval over the seeds, that of a difference seed by seed."
    )


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
