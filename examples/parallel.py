"""Train the same regression on one device, by DataParallel and by DistributedDataParallel, and compare the losses.

It trains on the CPU in several processes, or on GPUs where there is one for each process. Exit code 1: the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

ONE, DATA_PARALLEL = "one process", "DataParallel"
ORDINARY, SHARDED, SHARED = "DDP, ordinary table", "DDP, sharded", "DDP, shared"
ROWS, DIM, WIDTH, FEATURES = 1000, 8, 32, 5
LR, NOISE = 0.01, 0.1
WARM_STEPS = 5  # that are not timed
# The most that a loss may be off that of one process, as a share of the first loss: sums in another order.
TOLERANCE = 1e-4


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield numbers ``(batch, 5)``, ids ``(batch,)`` and targets ``(batch, 1)``, the same each time.

    Targets are a linear function of the numbers, and a number of the id.
    """
    draw = torch.Generator().manual_seed(0)
    slope = torch.randn(FEATURES, 1, generator=draw)
    of_ids = torch.randn(ROWS, 1, generator=draw)
    for _ in range(args.steps):
        numbers = torch.randn(args.batch, FEATURES, generator=draw)
        ids = torch.randint(ROWS, (args.batch,), generator=draw)
        noise = NOISE * torch.randn(args.batch, 1, generator=draw)
        yield numbers, ids, numbers @ slope + of_ids[ids] + noise


class Regression(nn.Module):
    """A row for the id beside the numbers, and a small network. It notes the sizes of the first batch on each device."""

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES + DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.sizes: dict[str, str] = {}  # replicas of DataParallel have the same one

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return predictions ``(batch, 1)``."""
        found: Tensor = self.layers(torch.cat([numbers, self.emb(ids)], 1))
        self.sizes.setdefault(str(numbers.device), f"input {tuple(numbers.shape)}, output {tuple(found.shape)}")
        return found


def make_table(kind: str, device: torch.device) -> nn.Module:
    """Return the table for a kind of training."""
    torch.manual_seed(0)
    if kind == DATA_PARALLEL and torch.cuda.device_count() > 1:
        # It copies the model to each GPU in every forward, and refuses those with tables.
        return nn.Embedding(ROWS, DIM, device=device)
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if kind in (SHARDED, SHARED) else {}
    if kind == SHARED:
        options["memory"] = "shared"
    return st.Embedding(ROWS, DIM, device=device, **options)


class Run(NamedTuple):
    """The losses of a process, the seconds of a step, and lines that tell sizes on each of its devices."""

    losses: list[float]
    step_s: float
    sizes: list[str]


def train(kind: str, args: argparse.Namespace, rank: int = 0, ranks: int = 1) -> Run:
    """Train on the part of every batch that is this process's."""
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= args.processes else torch.device("cpu")
    net = Regression(make_table(kind, device)).to(device)
    model: nn.Module = net
    if kind == DATA_PARALLEL:
        model = nn.DataParallel(net)
    elif kind != ONE:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
            model = DistributedDataParallel(net)
    opt, each = torch.optim.AdamW(net.parameters(), lr=LR), args.batch // ranks
    losses, times = [], []
    for batch in batches(args):
        numbers, ids, targets = (values[rank * each : (rank + 1) * each].to(device) for values in batch)
        start = time.perf_counter()
        opt.zero_grad()
        loss = (model(numbers, ids) - targets).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    rows = len(net.emb.table.local if kind in (SHARDED, SHARED) else net.emb.weight)
    sizes = [f"  process {rank} of {ranks}, {where}: {size}, {rows:,} rows" for where, size in net.sizes.items()]
    return Run(losses, statistics.median(times[WARM_STEPS:] or times), sizes)


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Train each kind of DDP as one of its processes, and write what it gave to a file."""
    torch.set_num_threads(max(1, torch.get_num_threads() // args.processes))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve to an address of this machine
    cuda = torch.cuda.device_count() >= args.processes
    if cuda:
        torch.cuda.set_device(rank)
    backend, store = "cpu:gloo,cuda:nccl" if cuda else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, store, rank=rank, world_size=args.processes)
    found = {kind: train(kind, args, rank, args.processes) for kind in (ORDINARY, SHARDED, SHARED)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit with an error where the losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes of DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="examples of a batch, of all processes together")
    args = parser.parse_args(arguments)
    for name, least in (("processes", 2), ("steps", 1), ("batch", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)} but must be at least {least}")
    if args.batch % args.processes:
        parser.error(
            f"--batch is {args.batch} but must be a multiple of --processes, {args.processes}: the mean of the losses of "
            "equal parts is that of the batch"
        )
    print(
        f"{DATA_PARALLEL}: with one GPU or none it calls the model; with several it has nn.Embedding, as it refuses tables"
    )
    runs = {kind: [train(kind, args)] for kind in (ONE, DATA_PARALLEL)}
    with tempfile.TemporaryDirectory(prefix="parallel-") as folder:
        mp.spawn(work, (args, folder), args.processes)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.processes)]
    runs |= {kind: [Run(*found[kind]) for found in ranks] for kind in (ORDINARY, SHARDED, SHARED)}
    expected, wrong = runs[ONE][0].losses, []
    for kind, parts in runs.items():
        losses = [statistics.mean(some) for some in zip(*(part.losses for part in parts), strict=True)]
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"{kind}: {1e3 * parts[0].step_s:.2f} ms a step, last loss {losses[-1]:.6f}, ", end="")
        print(f"largest difference from one process {difference:.2g}")
        print(*(line for part in parts for line in part.sizes), sep="\n")
        wrong += [kind] if difference > TOLERANCE * expected[0] else []
    if wrong:
        raise SystemExit(f"error: the losses of {', '.join(wrong)} are not those of one process")


if __name__ == "__main__":
    main()
