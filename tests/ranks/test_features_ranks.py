"""Steps that leave features of a `MultiEmbedding` out, of several processes: left out is what no process gives a gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

SIZES = {"a": 30, "b": 1, "c": 40}
# Which features each rank gives a gradient in each step.
STEPS = [("ab", "ab"), ("a", "c"), ("", "b"), ("abc", "a"), ("c", "c"), ("a", "ab"), ("b", "b"), ("abc", "abc")]
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        options: dict[str, Any] = {"process_group": dist.group.WORLD} if kind in ("sharded", "shared") else {}
        if kind == "shared":
            options["memory"] = "shared"
        if kind == "torch":
            self.emb = nn.ModuleDict({name: nn.Embedding(size, 3) for name, size in SIZES.items()})
        else:
            self.emb = st.MultiEmbedding(SIZES, 3, **options)
        self.double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = {name: torch.randint(0, size, (5,), generator=draw) for name, size in SIZES.items()}
        # All look all features up; the loss is of some.
        rows = (
            {name: self.emb[name](ids[name]) for name in SIZES}
            if isinstance(self.emb, nn.ModuleDict)
            else self.emb(ids)
        )
        return sum((rows[name].square().sum() for name in STEPS[step][rank]), 0.0 * self.scale)


def apart(kind: str, optimizer: str, wrapped: bool) -> float:
    ours, theirs, rank = Net(kind), Net("torch"), dist.get_rank()
    model: Any = ours
    if kind == "replicas" or wrapped:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
            model = DistributedDataParallel(ours)
    opts = [OPTIMIZERS[optimizer](net.parameters()) for net in (ours, theirs)]
    for step in range(len(STEPS)):
        for opt in opts:
            opt.zero_grad()
        model(step, rank).backward()
        ((theirs(step, 0) + theirs(step, 1)) / 2).backward()
        for opt in opts:
            opt.step()
    whole = torch.cat([theirs.emb[name].weight.detach() for name in SIZES])
    return float((ours.emb.table.gather(torch.arange(71)) - whole).abs().max())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["sharded", "shared", "replicas", "sharded in DDP"])
def test_as_modules_of_torch(two, kind, optimizer):
    assert max(two(apart, kind.partition(" ")[0], optimizer, "DDP" in kind)) < 1e-12
