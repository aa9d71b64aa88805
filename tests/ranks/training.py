"""A small model trained by several processes, and by one with the batches of all: the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from optimizer_cases import case_named
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.small import rows_of

ROWS, DIM, STEPS = 300, 8, 9


@dataclasses.dataclass
class Run:
    """What is trained, and how."""

    optimizer: str = "adamw"
    idle: str = "lazy"
    kind: str = "sharded"
    dtype: torch.dtype = torch.float64
    bag: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: float | None = None
    norm: float = 2.0
    schedule: bool = False
    accumulate: int = 1
    no_sync: bool = False
    # How many samples each rank has; 0 at some steps.
    sizes: tuple[int, ...] = (6, 6, 6, 6)
    empty: bool = False
    # A GradScaler, and the step at which the loss of rank 0 overflows.
    overflow: int | None = None
    lookups: int = 1
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = STEPS


def dense_of(net: nn.Module) -> list[nn.Parameter]:
    return [*net.inner.parameters(), *net.outer.parameters()]


class Net(nn.Module):
    def __init__(self, run: Run, emb: nn.Module) -> None:
        super().__init__()
        self.emb, self.run = emb, run
        self.inner, self.outer = nn.Linear(DIM, 5, dtype=run.dtype), nn.Linear(5, 1, dtype=run.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.emb(ids) if self.run.bag else self.emb(ids).mean(1)]
        for turn in range(1, self.run.lookups):
            more = self.emb(ids.roll(turn, 1) // 2)
            rows.append(more if self.run.bag else more.mean(1))
        return self.outer(torch.tanh(self.inner(sum(rows))))


def embedding(run: Run, alone: bool) -> nn.Module:
    kind = st.EmbeddingBag if run.bag else st.Embedding
    options = {"idle": run.idle, **run.options, **run.module}
    if not alone and run.kind != "replicas":
        options["process_group"] = dist.group.WORLD
        if run.kind == "shared":
            options["memory"] = "shared"
    if alone:
        options.pop("comm_dtype", None)
    return kind(ROWS, DIM, dtype=run.dtype, **options)


def batch(run: Run, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = run.sizes[rank]
    if run.empty and (step + rank) % 3 == 0:
        size = 0
    draw = torch.Generator().manual_seed(1000 * step + rank)
    # Skewed, and of other rows on each rank.
    ids = (torch.rand(size, 6, generator=draw) ** 4 * ROWS * (0.5 + 0.25 * rank)).long().clamp_(max=ROWS - 1)
    return ids, torch.randn(size, 1, generator=draw, dtype=torch.float64).to(run.dtype)


def train(run: Run, world: int, ranks: list[int], alone: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(7)
    net = Net(run, embedding(run, alone))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        model: Any = net if alone else DistributedDataParallel(net, **run.ddp)
    opt = case_named(run.optimizer).make(net.parameters(), **run.optimizer_options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, run.steps) if run.schedule else None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=run.overflow is not None)
    numbers = []
    for step in range(run.steps):
        opt.zero_grad()
        for turn in range(run.accumulate):
            place = step * run.accumulate + turn
            parts = [batch(run, place, rank) for rank in ranks]
            total = sum(len(batch(run, place, rank)[0]) for rank in range(world))
            ids, wanted = (torch.cat(part) for part in zip(*parts, strict=True))
            quiet = run.no_sync and not alone and turn < run.accumulate - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                # The mean over the whole batch: gradients are averaged over processes.
                loss = (model(ids) - wanted).square().sum() * ((1 if alone else world) / max(total, 1) / run.accumulate)
                if step == run.overflow and 0 in ranks:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        if run.overflow is not None:
            scaler.unscale_(opt)
        if run.clip is not None:
            numbers.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), run.clip, run.norm)))
        if run.overflow is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        numbers.append(scaler.get_scale())
        if scheduler is not None:
            scheduler.step()
    return net, opt, numbers


@dataclasses.dataclass
class End:
    """What training comes to: all rows, the dense parameters, the scalars of the rows' state, and numbers of each step."""

    rows: torch.Tensor
    dense: torch.Tensor
    shared: dict[str, float]
    numbers: list[float]


def end_of(run: Run, world: int, ranks: list[int], alone: bool) -> End:
    net, opt, numbers = train(run, world, ranks, alone)
    dense = torch.cat([param.detach().flatten() for param in dense_of(net)])
    state = opt.state[net.emb.weight].items()
    return End(rows_of(net.emb), dense, {k: float(v) for k, v in state if torch.is_tensor(v) and v.dim() == 0}, numbers)


# Of one process, by what it trains: the same beside all kinds of tables.
ends: dict[str, End] = {}


def end_alone(run: Run, world: int) -> End:
    """What one process with the batches of all comes to, which rank 0 trains and tells the others."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        key = repr((world, dataclasses.replace(run, kind="")))
        if key not in ends:
            ends[key] = end_of(run, world, list(range(world)), alone=True)
        told[0] = ends[key]
    dist.broadcast_object_list(told)
    return told[0]


def compare(run: Run) -> dict[str, Any]:
    """What one rank finds: distances from one process with all batches, and bits of the replicas."""
    world = dist.get_world_size()
    one = end_alone(run, world)
    ours = end_of(run, world, [dist.get_rank()], alone=False)
    torch.manual_seed(7)
    start = embedding(run, alone=True).table.torch().to(run.dtype)
    moved = float((one.rows - start).abs().max())
    return {
        "error": float((ours.rows - one.rows).abs().max()) / max(moved, 1e-30),
        "dense": float((ours.dense - one.dense).abs().max()),
        "rows": ours.rows,
        "replica": ours.dense,
        "numbers": [(a, b) for a, b in zip(ours.numbers, one.numbers, strict=True)],
        "shared": (ours.shared, one.shared),
        "moved": moved,
    }
