"""Trains a recommender in one process and in several, on the same batches, and compares the rows, the scores and the traffic.

``python bench/gowalla.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the Gowalla of
LightGCN's repository (https://github.com/kuandeng/LightGCN) has them; the data are not part of this one. Trained are
``nn.Embedding`` and ``st.Embedding`` in one process, and ``st.Embedding`` in several: as replicas, sharded, and shared. The
several are started by torchrun, on the CPU of this machine. To train one kind by itself:

    torchrun --nproc-per-node 2 bench/gowalla.py train --data FOLDER --kind sharded

The result goes to ``bench/results/<device>/gowalla.json``. Times are not measured: ``speedtransfer bench ranks`` does that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from experiment import (
    DataError,
    RunError,
    commit_and_date,
    exit_code,
    make_parser,
    positive_int,
    stop_on_signals,
    text_table,
    write_result,
)
from gowalla_training import ALONE, DENSE, KINDS, REPLICAS, SHARDED, SHARED, TOP, Model, Settings, train
from idle_data import Data, read_data
from store import GOWALLA, QUICK, ROOT, header, path_of

from speedtransfer.ranks import joined

NAMES = {
    DENSE: "nn.Embedding, dense AdamW",
    ALONE: "st.Embedding",
    REPLICAS: "st.Embedding, replicas (DDP)",
    SHARDED: "st.Embedding, sharded",
    SHARED: 'st.Embedding, memory="shared"',
}
IN_ONE_PROCESS = (DENSE, ALONE)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    settings = replace(settings, epochs=1) if args.quick else settings
    run = train_here if args.command == "train" else compare_all
    return exit_code(lambda: run(read_data(args.data), settings, args))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("gowalla", __doc__)
    does = "compare kinds (default), or only train them, in this process or in those that torchrun has started"
    parser.add_argument("command", nargs="?", choices=["compare", "train"], default="compare", help=does)
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.txt and test.txt")
    only = f"only these of {', '.join(KINDS)}; all that fit by default"
    parser.add_argument("--kind", nargs="+", choices=KINDS, metavar="KIND", help=only)
    parser.add_argument("--processes", type=positive_int, default=2, metavar="N", help="to start; by default 2")
    for field in fields(Settings):
        kind: Any = type(field.default)
        kind = positive_int if kind is int and field.name != "seed" else kind
        choices = ["float32", "float64"] if field.name == "dtype" else None
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=field.default, choices=choices, help=f"by default {field.default}")
    parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
    # Where the processes write their result for the one that has started them.
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    return parser


def train_here(data: Data, settings: Settings, args: argparse.Namespace) -> int:
    """Train in this process, or with those that torchrun has started beside it; return the exit code."""
    with joined(torch.device("cpu")) as group:
        fitting = [kind for kind in KINDS if (kind in IN_ONE_PROCESS) == (group is None)]
        for kind in args.kind or fitting:
            if kind not in fitting:
                how = "one process, and torchrun has started several"
                if group is None:
                    how = "several processes; start it by: torchrun --nproc-per-node 2 bench/gowalla.py train ..."
                raise DataError(f"--kind {kind} is for {how}")
            found = train(data, settings, kind, group)
            if found and args.state is None:
                print(f"{kind}: {describe(found)}", flush=True)
            elif found:
                torch.save(found, args.state)
    return 0


def describe(found: dict[str, Any]) -> str:
    """Return the scores of a training."""
    return f"recall@{TOP} {found['recall']:.4f}, NDCG@{TOP} {found['ndcg']:.4f}"


def compare_all(data: Data, settings: Settings, args: argparse.Namespace) -> int:
    """Train every kind, compare it with tables in one process, and write the result; return the exit code."""
    about = header(ROOT, GOWALLA)  # before: the sources as they are when it starts
    whole = not args.quick and args.kind is None
    out = args.out or path_of(ROOT, about["environment"]["device"], GOWALLA, "" if whole else QUICK)
    start = Model(data.sizes, settings, DENSE).state_dict()
    reference, runs = dict[str, Any](), []
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        for kind in dict.fromkeys((ALONE, *(args.kind or KINDS))):
            alone = kind in IN_ONE_PROCESS
            run = train(data, settings, kind) if alone else run_processes(kind, settings, args, Path(folder, kind))
            state = run.pop("state")
            reference = reference or state
            count = 1 if alone else args.processes
            runs.append({"kind": kind, "processes": count, **run, "distance": distance(state, reference, start)})
            print(f"{kind}: {describe(run)}", flush=True)
    sizes = dict(zip(("users", "items"), data.sizes, strict=True))
    result = {
        **about,
        "data": {"name": args.data.resolve().name, **sizes, "train": len(data.train), "test": len(data.test)},
        "settings": asdict(settings),
        "runs": sorted(runs, key=lambda run: KINDS.index(run["kind"])),
        "complete": whole,
    }
    write_result(result, out, None, [table(result), "", *sentences(result)])
    return 0


def run_processes(kind: str, settings: Settings, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Train in processes started by torchrun; return the result."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
    command = [sys.executable, *torchrun, str(Path(__file__).resolve()), "train", "--data", str(args.data)]
    command += ["--kind", kind, "--state", str(path)]
    for name, value in asdict(settings).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // args.processes)), **os.environ}
    if sys.platform == "linux":
        # The name of a machine need not resolve to an address that it has.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with subprocess.Popen(command, env=environment) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # torchrun ends the processes that it has started
            raise
    if code != 0:
        raise RunError(f"the training of {NAMES[kind]!r} ended with exit code {code}; its output is above")
    found: dict[str, Any] = torch.load(path)
    return found


def distance(state: dict[str, Any], reference: dict[str, Any], start: dict[str, Any]) -> float:
    """Return the largest difference of any weight from `reference`, as a share of the largest move from `start`."""
    off, moved = (
        max(float((values[name] - reference[name]).abs().max()) for name in reference) for values in (state, start)
    )
    return off / moved


def table(result: dict[str, Any]) -> str:
    """Return scores, distances and traffic as plain text."""
    rows = [["", "processes", f"recall@{TOP}", f"NDCG@{TOP}", "distance", "rows/step", "kB sent/step"]]
    for run in result["runs"]:
        traffic = ["all", "0"]
        if run["kind"] != DENSE:
            traffic = [f"{run['gathered_rows'] / run['steps']:,.0f}", f"{run['sent_bytes'] / run['steps'] / 1000:,.0f}"]
        measures = [f"{run['recall']:.4f}", f"{run['ndcg']:.4f}", f"{run['distance']:.1e}"]
        rows.append([NAMES[run["kind"]], str(run["processes"]), *measures, *traffic])
    return text_table(rows)


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield what was trained, and what the columns mean."""
    data, settings, environment = result["data"], result["settings"], result["environment"]
    yield (
        f"{data['train']:,} pairs of {data['users']:,} users and {data['items']:,} items; epochs: {settings['epochs']}, "
        f"{settings['batch']:,} pairs a step in all processes together, dim {settings['dim']}, {settings['dtype']}, AdamW "
        f"with lr {settings['lr']:g} and weight decay {settings['weight_decay']:g}; torch {environment['versions']['torch']}, "
        f"{commit_and_date(result)}."
    )
    yield (
        f"distance: the largest difference of a weight from {NAMES[ALONE]} in one process, as a share of the largest move in "
        "training. Rows read from tables and kB sent for them are those of all processes together; what "
        "DistributedDataParallel sends for other parameters is not counted."
    )


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun's processes end at once: they may wait for each other
        stop_on_signals()
    sys.exit(main())
