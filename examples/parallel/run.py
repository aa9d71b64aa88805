"""Train the same regression on one device, by DataParallel and by DistributedDataParallel, and compare the losses.

``python examples/parallel/run.py`` trains on the CPU of this machine in several processes, or on its GPUs where there is one
for each process. Results go to the folder ``--out``: results.json, curves.png and curves for TensorBoard.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package, also where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from parallel.pictures import save_picture
from parallel.training import DATA_PARALLEL, KINDS, ONE, SHARED, Settings, Worker
from parallel.world import World
from speedtransfer.benchmark.environment import environment
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import SpeedtransferError
from speedtransfer.units import format_seconds

# The most that a loss may be off that of one process, as a share of the first loss: sums in another order.
TOLERANCE = 1e-4
_QUICK = {"steps": 30, "rows": 100}
_HELP = {
    "processes": "processes of DistributedDataParallel",
    "steps": "training steps",
    "batch": "examples of a batch, of all processes together",
    "rows": "rows of the table",
    "dim": "values of a row",
    "width": "width of the network",
    "lr": "learning rate of AdamW",
    "seed": "of everything drawn",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 where the losses differ."""
    args, settings = _parsed(arguments)
    try:
        _check(settings)
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):
            pass
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cuda = torch.cuda.device_count() >= settings.processes
    device = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    result = {"settings": asdict(settings), "environment": environment(device), "cuda": cuda}
    print(about_data_parallel(torch.cuda.device_count()))
    try:
        result["runs"] = runs = _train(settings, cuda)
    except SpeedtransferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for kind, run in runs.items():
        print(sentence(kind, run, settings.processes))
    (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for problem in (_write_curves(args.out / "tensorboard", runs), save_picture(result, args.out / "curves.png")):
        if problem:
            print(problem, file=sys.stderr)
    print(f"wrote {args.out}{os.sep}; curves: tensorboard --logdir {args.out / 'tensorboard'}")
    wrong = [kind for kind, run in runs.items() if run["difference"] > TOLERANCE * runs[ONE]["losses"][0]]
    for kind in wrong:
        print(f"error: the losses of {kind} are not those of one process", file=sys.stderr)
    return int(bool(wrong))


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="examples/parallel/run.py", description=lines[0])
    parser.add_argument("--out", type=Path, default=Path("parallel"), help="folder of the results", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="few steps and a small table, where no other are given")
    for one in fields(Settings):
        text = f"{_HELP[one.name]}, by default {one.default}"
        parser.add_argument(f"--{one.name}", type=type(one.default), help=text, metavar="N")
    args = parser.parse_args(arguments)
    given = {one.name: getattr(args, one.name) for one in fields(Settings) if getattr(args, one.name) is not None}
    return args, replace(Settings(), **{**(_QUICK if args.quick else {}), **given})


def _check(settings: Settings) -> None:
    """Raise ValueError for settings that make no sense."""
    least = {"processes": 2, "lr": 0, "seed": 0}
    for name, value in asdict(settings).items():
        # Not `<`, which NaN would pass.
        if not value >= least.get(name, 1):
            raise ValueError(f"--{name} is {value} but must be at least {least.get(name, 1)}")
    if settings.batch % settings.processes:
        raise ValueError(
            f"--batch is {settings.batch} but must be a multiple of --processes, {settings.processes}: the mean of the "
            "losses of equal parts is that of the batch"
        )


def about_data_parallel(gpus: int) -> str:
    """Return what DataParallel does on this machine, in a line."""
    if gpus > 1:
        return (
            f"DataParallel: copies the model to {gpus} GPUs in every forward; with nn.Embedding, as it refuses tables"
        )
    there = "one GPU" if gpus else "no GPU"
    return f"DataParallel: needs several GPUs; with {there} it calls the model, which is trained as on one device"


def _train(settings: Settings, cuda: bool) -> dict[str, dict[str, Any]]:
    """Train each kind; return the mean losses of all processes, the largest difference from one, times and sizes."""
    one, several = World(1, Worker), World(settings.processes, Worker, cuda)
    runs: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        answers = (one if kind in (ONE, DATA_PARALLEL) else several).call("train", kind, settings)
        losses = [sum(parts) / len(parts) for parts in zip(*(answer["losses"] for answer in answers), strict=True)]
        runs[kind] = {
            "losses": losses,
            "step_s": answers[0]["step_s"],
            "sizes": [answer["sizes"] for answer in answers],
            "rows": [answer["rows"] for answer in answers],
        }
        apart = [abs(a - b) for a, b in zip(losses, runs[ONE]["losses"], strict=True)]
        runs[kind] |= {"differences": apart, "difference": max(apart)}
    return runs


def sentence(kind: str, run: dict[str, Any], processes: int) -> str:
    """Return the sizes, the time and the difference of a run."""
    lines = []
    for rank, sizes in enumerate(run["sizes"]):
        for device, given, found in sizes:
            where = f"process {rank} of {len(run['sizes'])}, {device}"
            lines.append(f"  {where}: input {tuple(given)}, output {tuple(found)}, {run['rows'][rank]:,} rows")
    shared = " (one memory, which all read)" if kind == SHARED else ""
    text = f"{kind}{shared}: {format_seconds(run['step_s'])} a step, last loss {run['losses'][-1]:.6f}"
    text += f", largest difference from one process {run['difference']:.2g}" if kind != ONE else ""
    return "\n".join([text, *lines])


def _write_curves(folder: Path, runs: dict[str, dict[str, Any]]) -> str:
    """Write the losses for TensorBoard, a run for each kind; return why there are none."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return 'no curves for TensorBoard, which is not installed; run: pip install "speedtransfer[tensorboard]"'
    for kind, run in runs.items():
        with SummaryWriter(str(folder / kind.replace(", ", "-").replace(" ", "-"))) as writer:
            for step, loss in enumerate(run["losses"]):
                writer.add_scalar("loss", loss, step)
    return ""


if __name__ == "__main__":
    sys.exit(main())
