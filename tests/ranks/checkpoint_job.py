"""A training job of several processes that saves and resumes, for the tests of checkpoints."""

import dataclasses
import os
import random
import signal
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from in_child import kill_at_line
from optimizer_cases import case_named
from torch import nn

import speedtransfer as st
from ranks.pair import wrap
from speedtransfer.dtypes import bits_of
from speedtransfer.optim import Sharded, find_handle

ROWS, DIM, GLOBAL = 300, 8, 24
SAVING = ("checkpoint/folder.py", "checkpoint/tensors.py", "checkpoint/save.py", "checkpoint/together.py")


@dataclasses.dataclass(frozen=True)
class Setup:
    """`kind`: "sharded", "shared", "one" (an ordinary table), "torch" (``nn.Embedding``), "mixed" (both, in DDP)."""

    kind: str = "sharded"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = (("idle", "exact"),)
    rows: int = ROWS
    # Rows that all processes together train alike at any number of them, or draws of each process's own generators.
    noise: bool = False
    # A table of several features too.
    multi: bool = False

    def of(self, kind, **more):
        return dataclasses.replace(self, kind=kind, **more)


EXACT = Setup()
SMALL = Setup(
    dtype=torch.float32, options=(("idle", "lazy"), ("storage_dtype", torch.int8), ("state_dtype", torch.uint8))
)
FLOAT8 = Setup(
    dtype=torch.float32, options=(("idle", "lazy"), ("storage_dtype", torch.float8_e4m3fn), ("scale_block", 3))
)
SPLIT24 = Setup(
    dtype=torch.float32, options=(("idle", "exact"), ("storage_dtype", "split24"), ("state_dtype", torch.uint8))
)


class Net(nn.Module):
    def __init__(self, setup):
        super().__init__()
        library = nn if setup.kind == "torch" else st
        options = {} if setup.kind == "torch" else dict(setup.options)
        if setup.kind in ("sharded", "shared", "mixed"):
            options["process_group"] = dist.group.WORLD
        if setup.kind == "shared":
            options["memory"] = "shared"
        self.emb = library.Embedding(setup.rows, DIM, dtype=setup.dtype, **options)
        if setup.kind == "mixed":
            options.pop("process_group")
        options |= {name: options[name].with_name("bag.safetensors") for name in ("path",) if name in options}
        # Fewer rows than processes.
        self.bag = library.EmbeddingBag(2, DIM, mode="sum", dtype=setup.dtype, **options)
        self.many = st.MultiEmbedding([40, 10], DIM, dtype=setup.dtype, **options) if setup.multi else None
        self.twice = self.emb
        self.dense = nn.Sequential(nn.Linear(DIM, 5, dtype=setup.dtype), nn.Tanh(), nn.Linear(5, 1, dtype=setup.dtype))

    def forward(self, ids):
        rows = self.emb(ids).mean(1) + self.twice(ids[:, 0] // 2) + self.bag(ids % 2)
        return self.dense(rows if self.many is None else rows + self.many(ids[:, :2] % 10).sum(1))


class Job:
    def __init__(self, setup, seed=7):
        self.setup = setup
        self.alone = setup.kind in ("one", "torch")
        self.rank, self.ranks = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(seed)
        self.net = Net(setup)
        # Else it arranges its buckets anew after the first step, and adds the gradients of three ranks in another order.
        self.model = self.net if self.alone else wrap(self.net, find_unused_parameters=True)
        self.optimizer = case_named(setup.optimizer).make(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        # Of each process its own.
        self.generator = torch.Generator().manual_seed(100 * seed + self.rank)
        self.objects = {"scheduler": self.scheduler, "generator": self.generator}
        for each in (random.seed, np.random.seed, torch.manual_seed):
            each(1000 * seed + self.rank)
        self.done, self.note = 0, ""
        self.hook = lambda where: None

    def train(self, steps):
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.done)
            ids = (torch.rand(GLOBAL, 4, generator=draw) ** 2 * self.setup.rows).long()[self.rank :: self.ranks]
            wanted = torch.randn(GLOBAL, 1, generator=draw, dtype=torch.float64)[self.rank :: self.ranks]
            if self.setup.noise:
                wanted = wanted + torch.rand(1) + random.random() + np.random.rand()
                wanted = wanted + torch.rand(1, generator=self.generator)
            self.optimizer.zero_grad()
            self.hook("forward")
            loss = (self.model(ids) - wanted.to(self.setup.dtype)).square().sum() * (self.ranks / GLOBAL)
            self.hook("backward")
            loss.backward()
            self.hook("step")
            self.optimizer.step()
            self.scheduler.step()
            self.done += 1
        return self

    def save(self, path, **how):
        extra = {"done": self.done, "note": self.note}
        saving = st.save_checkpoint(path, self.net, self.optimizer, extra=extra, **how, **self.objects)
        self.wait = getattr(saving, "wait", lambda: None)
        return self

    def load(self, path):
        self.done = st.load_checkpoint(path, self.net, self.optimizer, **self.objects)["done"]
        return self

    def planes(self):
        """All rows, and their state, as they are stored; what is not of rows. In the order of ids; collective."""
        found = {f"dense {name}": value.detach().clone() for name, value in self.net.dense.state_dict().items()}
        for name in ("emb", "bag", *["many"] * self.setup.multi):
            module = getattr(self.net, name)
            param = module.weight
            state = self.optimizer.state.get(param, {})
            found |= {
                f"{name} {key}": torch.as_tensor(v).clone() for key, v in state.items() if getattr(v, "ndim", 1) == 0
            }
            handle = find_handle(param)
            if handle is None:
                parts = {"weight": param.detach()} | {k: v for k, v in state.items() if v.dim()}
                found |= {f"{name} {key}": value.clone() for key, value in parts.items()}
                continue
            handle.rows.catch_up()
            stored = [plane for plane in handle.table.planes if plane != "idle.last_step"]
            # Processes send no float8 to each other.
            parts = {key: bits_of(handle.table.plane(key)).clone() for key in stored}
            if isinstance(handle.owners, Sharded) and self.setup.kind != "shared":
                each = [None] * self.ranks
                dist.all_gather_object(each, (handle.owners.partition.ids_of(self.rank), parts))
                order = torch.cat([ids for ids, _ in each]).argsort()
                parts = {key: torch.cat([part[key] for _, part in each])[order] for key in parts}
            found |= {f"{name} {key}": value for key, value in parts.items()}
        return found


def run(folder, steps, *kills, life=0):
    """Train to the end, saving every second step, from `folder` on; killed in life k as ``kills[k]`` says.

    It is the rank, and "forward", "backward" or "step" and its number, or "save" and a number of lines.
    """
    job = Job(EXACT.of("sharded", noise=True))
    if (folder / "manifest.json").exists():
        job.load(folder)
    rank, where, count = kills[life].split() if life < len(kills) else ("-1", "", "0")

    def kill(reached):
        if (job.rank, job.done, reached) == (int(rank), int(count), where):
            os.kill(os.getpid(), signal.SIGKILL)

    job.hook = kill
    if where == "save" and job.rank == int(rank):
        kill_at_line(int(count), SAVING)
    while job.done < steps:
        job.train(1)
        if job.done % 2 == 0:
            job.save(folder)
    return job.planes()
