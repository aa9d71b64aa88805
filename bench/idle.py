"""Trains a recommender with dense, exact, lazy and SparseAdam's idle rows and draws the four curves.

``python bench/idle.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the Gowalla of
LightGCN's repository (https://github.com/kuandeng/LightGCN) has them; the data are not part of this one. The result goes to
``bench/results/<device>/idle.json``, with a picture beside it; bench/readme.py puts both into docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from idle_data import Settings, read_data
from needs import DataError
from store import IDLE, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from idle_figure import save, sentences
from idle_training import WAYS, train

from speedtransfer.cuda import resolve_device


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench/idle.py", description=lines[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.txt and test.txt")
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    for name, kind in (("steps", _count), ("batch", _count), ("seed", int), ("lr", float), ("weight-decay", float)):
        default = getattr(Settings, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"by default {default}")
    args = parser.parse_args(arguments)
    try:
        data = read_data(args.data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = header(ROOT, IDLE)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], IDLE)
    settings = Settings(args.steps, args.batch, seed=args.seed, lr=args.lr, weight_decay=args.weight_decay)
    start = time.perf_counter()
    result = train(data, settings, resolve_device(None), _say)
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "data": args.data.resolve().name, **result, "seconds": seconds, "complete": True}
    write(out, result)
    print("", *sentences(result), f"wrote {out}", sep="\n")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


_count.__name__ = "positive int"  # for argparse, in the line that refuses another


def _say(number: int, curves: dict[str, dict[str, list[float]]]) -> None:
    shown = (f"{way} {curves[way]['loss'][-1]:.4f} / {curves[way]['recall'][-1]:.4f}" for way in WAYS)
    print(f"step {number:,}, loss / recall: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
