"""Vocabularies that several processes share out: the numbers of one process with the batches of all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from optimizer_cases import case_named
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.vocabulary import owners_of
from speedtransfer.vocabulary.capacity import share_of

# Padding has a row of rank 0; by the hash it would be an id of rank 1.
DIM, PADDING = 4, -6


@dataclasses.dataclass
class Run:
    """What is trained."""

    vocabulary: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str = "adamw"
    bag: bool = False
    ids: int = 60
    capacity: int = 60
    steps: int = 14
    # Steps without zero_grad, and lookups before the backward.
    accumulate: int = 1
    lookups: int = 1
    # Whether each owner is compared with a table of its own in one process, which evicts as it does.
    parts: bool = False


def batch(run: Run, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ids, skewed, over all 64 bits, now and then padding, now and then none; and weights of the loss."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    size = 0 if (step + rank) % 5 == 4 else 4 + rank
    ids = (torch.rand(size, 3, generator=draw) ** 2 * run.ids).long() * (2**57 + 1) - 2**62
    ids[torch.rand(size, 3, generator=draw) < 0.15] = PADDING
    weights = torch.randn(size, 3, DIM, generator=draw, dtype=torch.float64)
    return ids, weights.sum(1) if run.bag else weights


def embedding(run: Run, **options: Any) -> Any:
    vocabulary = st.Vocabulary(**{"seed": 5, **run.vocabulary})
    kind = st.EmbeddingBag if run.bag else st.Embedding
    given = {"padding_idx": PADDING, "dtype": torch.float64, "idle": "lazy", **run.module, **options}
    return kind(given.pop("capacity", run.capacity), DIM, vocabulary=vocabulary, **given)


def optimizer(run: Run, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return (
        torch.optim.SparseAdam(params, lr=0.05) if run.optimizer == "sparse" else case_named(run.optimizer).make(params)
    )


class Parts(nn.Module):
    """A table in one process for the ids of each rank."""

    def __init__(self, run: Run, world: int) -> None:
        super().__init__()
        self.world = world
        most = run.vocabulary.get("max_capacity")
        own = {} if most is None else {"max_capacity": share_of(most, world)}
        run = dataclasses.replace(run, capacity=share_of(run.capacity, world), vocabulary=run.vocabulary | own)
        self.parts = nn.ModuleList(embedding(run) for _ in range(world))

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        owners = torch.from_numpy(owners_of(flat.numpy(), self.world))
        places = [(owners == rank).nonzero().flatten() for rank in range(self.world)]
        rows = [part(flat[at]) for part, at in zip(self.parts, places, strict=True)]
        return torch.cat(rows)[torch.cat(places).argsort()].view(*ids.shape, DIM)


def known(modules: list[Any]) -> tuple[Tensor, Tensor]:
    """The ids that all know, sorted, and their rows."""
    found = [module.vocabulary.export() for module in modules]
    ids, order = torch.cat([ids for ids, _ in found]).sort()
    return ids, torch.cat([rows for _, rows in found])[order]


def gathered(emb: Any) -> tuple[Tensor, Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, emb.vocabulary.export())
    ids, order = torch.cat([ids for ids, _ in parts]).sort()
    return ids, torch.cat([rows for _, rows in parts])[order]


def compare(run: Run) -> dict[str, Any]:
    """Train, and compare every lookup with that of one process; evaluation in between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    emb = embedding(run, process_group=dist.group.WORLD)
    one = Parts(run, world) if run.parts else embedding(run)
    opt, one_opt = (optimizer(run, list(each.parameters())) for each in (emb, one))
    worst, sizes = 0.0, np.cumsum([0] + [4 + r for r in range(world)])
    for step in range(run.steps):
        place = 100 * step
        if step % 4 == 3:
            for each in (emb, one):
                each.eval()
            ids = [batch(run, place, r)[0] for r in range(world)]
            start = sum(len(part) for part in ids[:rank])
            with torch.no_grad():
                wanted = one(torch.cat(ids))[start : start + len(ids[rank])]
                worst = max(
                    worst, float((emb(ids[rank]) - wanted).abs().max()) if len(wanted) else emb(ids[rank]).numel()
                )
            for each in (emb, one):
                each.train()
        for turn in range(run.accumulate):
            losses, one_losses = [], []
            for more in range(run.lookups):
                parts = [batch(run, place + 10 * turn + more, r) for r in range(world)]
                ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
                start = sum(len(part) for part, _ in parts[:rank])
                out, wanted = emb(parts[rank][0]), one(ids)
                if len(out):
                    worst = max(worst, float((out - wanted[start : start + len(out)]).detach().abs().max()))
                losses.append((out * parts[rank][1]).sum())
                one_losses.append((wanted * weights).sum() / world)
            sum(losses).backward()
            sum(one_losses).backward()
        for each in (opt, one_opt):
            each.step()
            each.zero_grad()
    ids, rows = gathered(emb)
    wanted_ids, wanted_rows = known(list(one.parts) if run.parts else [one])
    stats = emb.vocabulary.stats()
    assert sizes[-1]
    return {
        "worst": worst,
        "ids": bool(torch.equal(ids, wanted_ids)),
        "rows": float((rows - wanted_rows).abs().max()) if torch.equal(ids, wanted_ids) else float("nan"),
        "stats": [stats.admitted, stats.evicted, stats.lookups, stats.unseen],
        "wanted": [p.vocabulary.stats() for p in (one.parts if run.parts else [one])],
        "clock": emb.vocabulary.clock,
    }


RUNS = {
    "always": Run(),
    "exact": Run(module={"idle": "exact"}),
    "momentum, exact, sparse ids": Run(module={"idle": "exact"}, optimizer="sgd-momentum", ids=200, capacity=200),
    "sightings, a row for unseen ids": Run(vocabulary={"admit": 3, "unseen": "row"}),
    "sightings, zeros for unseen ids": Run(vocabulary={"admit": 2, "unseen": "zeros"}),
    "bag": Run(vocabulary={"admit": 2}, bag=True),
    "max_norm": Run(module={"max_norm": 1.0}),
    "sparse gradients": Run(module={"sparse": True}, optimizer="sparse"),
    "records": Run(module={"layout": "rows", "idle": "exact"}, optimizer="sgd-momentum"),
    "no padding": Run(module={"padding_idx": None}, vocabulary={"unseen": "row", "admit": 2}),
    "two lookups, three backwards": Run(lookups=2, accumulate=3),
    "used least": Run(parts=True, vocabulary={"evict": "lfu", "half_life": 3.0}, ids=400, capacity=70, steps=24),
    "used longest ago": Run(parts=True, vocabulary={"evict": "lru"}, ids=400, capacity=70, steps=24),
    "time to live": Run(parts=True, vocabulary={"evict": 3}, ids=100, capacity=100, module={"idle": "exact"}),
    "grows": Run(capacity=4, vocabulary={"max_capacity": 70}, module={"idle": "exact"}),
    "grows, then evicts": Run(
        parts=True, vocabulary={"max_capacity": 70, "evict": "lru"}, ids=400, capacity=20, steps=24
    ),
    "grows as the memory allows": Run(capacity=4, vocabulary={"max_capacity": "1 MB"}, ids=200),
    "time to live, one table": Run(vocabulary={"evict": 3}, ids=100, capacity=150),
}
BY_THREE = {"sightings, zeros for unseen ids", "used longest ago"}
# As others of the same kind.
SLOW = {"time to live, one table", "grows as the memory allows", "no padding", "always", "records"}
CASES = [
    pytest.param(world, name, marks=[pytest.mark.slow] if name in SLOW or (world == 3 and name not in BY_THREE) else [])
    for world in (2, 3)
    for name in RUNS
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_numbers_of_one_process(pool, world, name):
    run = RUNS[name]
    found = pool.of(world)(compare, run)
    for each in found:
        assert each["worst"] < 1e-12
        assert each["ids"]
        assert each["rows"] < 1e-12
        assert each["clock"] == run.steps
    one = [[s.admitted, s.evicted, s.lookups, s.unseen] for s in found[0]["wanted"]]
    assert np.sum([each["stats"] for each in found], 0).tolist() == np.sum(one, 0).tolist()
    if "evict" in run.vocabulary:
        assert all(each["stats"][1] for each in found)
    if "admit" in run.vocabulary:
        assert all(each["stats"][3] for each in found)
