"""Times SpeedTorch's word2vec example by its old names, by the drop-in, and in plain torch, dense and sparse.

``python bench/speedtorch_loop.py``, with ``--quick`` small and short. The result goes to
``bench/results/<device>/speedtorch_loop.json``, with a picture beside it; bench/readme.py puts both into docs/migration.md.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from store import FULL, LOOP, QUICK, ROOT, header, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed

import speedtorch_loop_training
from speedtorch_loop_figure import save, sentences
from speedtorch_loop_training import Settings, as_data, train
from speedtorch_loop_words import told

from speedtransfer.cuda import resolve_device


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench/speedtorch_loop.py", description=lines[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps")
    args = parser.parse_args(arguments)
    about = header(ROOT, LOOP)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], LOOP, QUICK if args.quick else FULL)
    settings = speedtorch_loop_training.QUICK if args.quick else Settings()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SpeedTorch's classes ask for CUDA")  # the result names the device
        measured = train(settings, resolve_device(None), lambda size: print(told(size), flush=True))
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "quick": args.quick, "settings": as_data(settings), "measured": measured, "seconds": seconds}
    result["complete"] = True
    write(out, result)
    print("", *sentences(result), f"wrote {out}", sep="\n")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
