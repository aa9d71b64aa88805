"""Measures on a GPU what a training step takes: ``python bench/experiments/gpu.py [NAME ...] [--seconds 300]``.

``step``: one table, small and large, by optimizer, idle rows and layout, with the step in one kernel and without, beside dense
training. ``fbgemm``: ten tables, of the sizes that FBGEMM publishes. ``both_ways``: rows read beside rows written.
``few_blocks``: launches of few blocks, beside a product of matrices. ``host``: the host's time of ten small tables.
``words``: words a second of word2vec. ``profile``: the device's time of a step by kernel. ``pages``: memory by allocator, size
and launch.

All run in that order, some five minutes; results go to ``bench/results/<device>/experiments.json`` as far as they have come.
Without a GPU those that need none run on the CPU, and the others say so.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from store import EXPERIMENTS, FULL, QUICK, ROOT, header, path_of, read, write

from experiments.gpu_rows import TINY, Cases, Scale, both_ways, few_blocks, pages
from experiments.gpu_steps import fbgemm, host, profile, step, words
from speedtransfer.errors import DeviceError

# In the order of what they tell; but a profiler makes later launches slower, so it comes after what times the host.
NAMES: dict[str, Callable[[Scale], Cases]] = {
    one.__name__: one for one in (step, fbgemm, both_ways, few_blocks, host, words, profile, pages)
}
NEED_CUDA = ("both_ways", "few_blocks", "pages")
LATE = "the time was up"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench/experiments/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", type=_name, metavar="NAME", help="these alone; others are kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing is begun after that")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    args = parser.parse_args(arguments)
    end, about = time.monotonic() + args.seconds, header(ROOT, EXPERIMENTS)
    cuda = about["environment"]["cuda"]
    if cuda:
        # Another engine would be another experiment. Memory that is registered serves rows as fast as what CUDA allocates,
        # and is there in a fraction of the time (see `pages`).
        os.environ.setdefault("SPEEDTRANSFER_ENGINE", "mapped")
        os.environ.setdefault("SPEEDTRANSFER_PINNED", "register")
    out = args.out or path_of(ROOT, about["environment"]["device"], EXPERIMENTS, QUICK if args.quick else FULL)
    before = read(out) if out.exists() else {}
    same = before.get("quick") == args.quick and before["environment"]["commit"] == about["environment"]["commit"]
    found = before["experiments"] if same else {}
    result = {**about, "quick": args.quick, "experiments": found}
    for name in args.names or NAMES:
        found[name] = cases = []
        for case in run(name, TINY if args.quick else Scale(), end, cuda):
            cases.append(case)
            print(name, "  ".join(f"{key} {value}" for key, value in case.items()), flush=True)
            late = any(one.get("error") == LATE for every in found.values() for one in every)
            result["complete"] = set(found) == set(NAMES) and not late
            write(out, result)
    print(f"wrote {out}")
    return 0


def _name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"there is no experiment {text!r}; choose from {', '.join(NAMES)}")
    return text


def run(name: str, scale: Scale, end: float, cuda: bool) -> Iterator[dict[str, Any]]:
    """Yield what an experiment finds; where something fails, the error in place of figures."""
    facts: dict[str, Any] = {}
    try:
        if time.monotonic() > end:
            yield {"error": LATE}
            return
        if name in NEED_CUDA and not cuda:
            raise DeviceError("needs CUDA")
        for facts, measure in NAMES[name](scale):
            if time.monotonic() > end:
                yield {**facts, "error": LATE}
                return
            try:
                yield {**facts, **measure()}
            except Exception as error:
                yield {**facts, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            del measure
            gc.collect()  # tables of which cycles are left keep gigabytes
            if cuda:
                torch.cuda.empty_cache()
    except Exception as error:
        yield {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


if __name__ == "__main__":
    sys.exit(main())
