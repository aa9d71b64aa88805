"""Trains node2vec beside gensim, on the same walks with the same settings, and compares how well vectors tell groups of nodes.

``python bench/node2vec.py --data FOLDER``, where FOLDER has ``bc_adjlist.txt`` (or ``.txt.xz``), a node of BlogCatalog and its
neighbours a line, and ``bc_labels.txt``, a node and its groups a line; the data are not part of this repository. Each seed has
walks of its own, written once to a text file that all are trained on, and its own splits into training and test nodes. The
result goes to ``bench/results/<device>/node2vec.json``, with a picture beside it. Needs gensim and scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from needs import DataError, require
from node2vec_data import Data, read_data, save_walks
from node2vec_figure import save, sentences, table
from node2vec_scores import MEASURES, interval, score
from store import NODE2VEC, PARTIAL, QUICK, ROOT, header, path_of, read, write
from word2vec_child import cores

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.errors import SpeedtransferError
from speedtransfer.word2vec import Settings as Training

GENSIM = "gensim"
OPTIMIZERS = ("adamw", "sgd", "adagrad", "adamax")


@dataclass(frozen=True)
class Settings:
    """What is trained and how it is judged; window, walks, p and q are those of the node2vec paper for BlogCatalog."""

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
    parser = argparse.ArgumentParser(prog="bench/node2vec.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of the graph and its groups")
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    parser.add_argument(
        "--quick", action="store_true", help="few and short walks and small vectors, to see that it runs"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    args = parser.parse_args(arguments)
    settings = QUICK_SETTINGS if args.quick else Settings()
    try:
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
        runs = take_up(partial, result) if args.resume else []
        for seed in range(1, settings.seeds + 1):
            for run in measure(data, settings, seed, {one["system"] for one in runs if one["seed"] == seed}):
                runs.append(run)
                write(partial, {**result, "runs": runs})
    except (DataError, SpeedtransferError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped; --resume goes on after the last run that was printed", file=sys.stderr)
        return 130
    result |= {"runs": runs, "summary": summary(runs, settings), "complete": not args.quick}
    write(out, result)
    partial.unlink()
    print("", *sentences(result), "", table(result), f"wrote {out}", sep="\n")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


def edges_of(data: Data) -> int:
    """Return how many edges the graph has; one from a node to itself has one entry, any other two."""
    heads = np.repeat(np.arange(len(data.graph)), np.diff(data.graph.begins))
    loops = int((heads == data.graph.neighbours).sum())
    return (len(heads) + loops) // 2


def take_up(partial: Path, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in the file `partial`, which a run that was stopped has left.

    Raises
    ------
    DataError
        It cannot be read, or was measured otherwise than `fresh` says.
    """
    try:
        old = read(partial)
        runs: list[dict[str, Any]] = old["runs"]
        same = [{key: made[key] for key in ("digest", "settings", "graph")} for made in (old, fresh)]
        versions = [made["environment"]["versions"] for made in (old, fresh)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot go on with {str(partial)!r} ({error!r}); drop --resume") from error
    if same[0] != same[1] or versions[0] != versions[1]:
        raise DataError(f"{str(partial)!r} was measured with other sources, settings, data or versions; drop --resume")
    return runs


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
            print(sentence(run), flush=True)
            yield run


def train_gensim(walks: Path, settings: Settings, seed: int) -> tuple[Callable[[str], np.ndarray], dict[str, Any]]:
    """Return the vectors of gensim, by node."""
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
    """Return our vectors, by node."""
    from speedtransfer.word2vec import Corpus, Trainer
    from speedtransfer.word2vec import Settings as Training
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
    """Return for each system, share and measure the mean and how far it is above gensim, seed by seed, with 95% intervals."""
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


def sentence(run: dict[str, Any]) -> str:
    """Return what a run has reached, in a line."""
    found = (
        f"{float(share):.0%} "
        + " ".join(f"{statistics.fmean(split[name] for split in splits):.4f}" for name in MEASURES)
        for share, splits in run["scores"].items()
    )
    return f"seed {run['seed']}, {run['system']}: {run['seconds']:.0f} s; {' / '.join(MEASURES)} at {', '.join(found)}"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background, where a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
