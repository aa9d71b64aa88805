"""Trains on ids that drift, in tables with a tenth, a quarter and half of the rows, and compares policies of eviction.

``python bench/vocabulary_drift.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the
Gowalla of LightGCN's repository (https://github.com/kuandeng/LightGCN) has them; the data are not part of this one. Without
them only the stream that is made here is trained on, and the result is not a complete one. It goes to
``bench/results/<device>/vocabulary_drift.json``, with a picture beside it; bench/readme.py puts both into docs/vocabulary.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from idle_data import read_data
from needs import DataError
from store import DRIFT, QUICK, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

import vocabulary_drift_training as training
from vocabulary_drift_figure import save, sentences
from vocabulary_drift_training import FULL, POLICIES, Blocks, Settings, Zipf


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit code."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench/vocabulary_drift.py", description=lines[0])
    parser.add_argument("--data", type=Path, help="the folder of train.txt and test.txt", metavar="FOLDER")
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    parser.add_argument("--seed", type=int, default=Settings.seed, help=f"by default {Settings.seed}")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    args = parser.parse_args(arguments)
    settings = replace(training.QUICK if args.quick else Settings(), seed=args.seed)
    try:
        data = None if args.data is None else read_data(args.data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = header(ROOT, DRIFT)  # before: the sources as they are when it starts
    complete = data is not None and not args.quick
    out = args.out or path_of(root, about["environment"]["device"], DRIFT, "" if complete else QUICK)
    start = time.perf_counter()
    streams: dict[str, Any] = {}
    zipf = Zipf(settings)
    streams["zipf"] = compare("zipf", lambda *one: training.train_zipf(zipf, *one, settings), settings)
    if data is not None:
        blocks = Blocks(data, settings)
        streams["gowalla"] = compare("gowalla", lambda *one: training.train_gowalla(blocks, *one, settings), settings)
        users = sum(len(block) for block, _ in blocks.blocks)
        streams["gowalla"] |= {"users": users, "steps": len(blocks.steps)}
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "settings": asdict(settings), "streams": streams, "seconds": seconds, "complete": complete}
    write(out, result)
    print("", *sentences(result), f"wrote {out}", sep="\n")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


def compare(name: str, train: Callable[[str, float], dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Train with a row for each id, and with each policy in tables of each share."""
    runs = []
    for policy, share in [(FULL, 1.0), *((policy, share) for share in settings.shares for policy in POLICIES)]:
        run = {"policy": policy, "share": share, **train(policy, share)}
        runs.append({key: round(value, 5) if isinstance(value, float) else value for key, value in run.items()})
        print(f"{name}, {run['rows']:,} rows, {policy}: {run['quality']:.4f}, found {run['found']:.1%}", flush=True)
    return {"runs": runs}


if __name__ == "__main__":
    sys.exit(main())
