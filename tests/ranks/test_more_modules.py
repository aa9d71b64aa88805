"""Several features in one table, and embeddings that are replaced, over processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st


def replaced() -> tuple[bool, str, str]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(20_000, 4), torch.nn.Linear(4, 1))
    before = model[0].weight.detach().clone()
    assert list(st.replace_embeddings(model, process_group=dist.group.WORLD)) == ["0"]
    same = torch.equal(model[0](torch.arange(20_000)), before)
    return same, repr(model[0].table), str(st.summary(model))


def test_replaced(two):
    for rank, (same, table, summary) in enumerate(two(replaced)):
        assert same
        assert f"rank {rank} of 2" in table
        assert f"rank {rank} of 2" in summary
        assert "20,000" in summary


def hottest() -> tuple[bool, int, int, str]:
    """A cache of the rows with the largest counts, of those that each process owns."""
    counts = torch.arange(100) % 50
    options = {"process_group": dist.group.WORLD, "memory": "pageable", "cache_rows": 10, "cache_counts": counts}
    emb = st.Embedding(100, 4, **options)
    own = emb.table.local_ids()
    hot = own[counts[own].sort(descending=True, stable=True).indices[:10]]
    emb.table.reset_stats()
    emb(hot)
    stats = emb.table.stats()
    try:
        st.Embedding(100, 4, **{**options, "cache_counts": counts[:7]})
    except st.errors.InvalidValueError as error:
        said = str(error)
    return len(hot) == 10, stats.cache_hits, stats.cache_misses, said


def test_counts_of_a_cache(two):
    for enough, hits, misses, said in two(hottest):
        assert enough
        assert hits == 10
        assert misses == 0
        assert "cache_counts is (7,) but the table has 100 rows" in said


# --- tables of n-grams shared out over processes: the numbers of one process ------------------------------------------


def trained(options: dict) -> torch.Tensor:
    """Train on a half of the batch in each of two processes, or on all of it in one."""
    torch.manual_seed(0)
    ngrams = st.NgramHash(heads=2, rows=100, vocab_size=50, eos=0, pad=49)
    module = st.NgramEmbedding(ngrams, 4, head_scale=True, std=0.5, dtype=torch.float64, idle="exact", **options)
    torch.nn.init.ones_(module.head_scale)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(1)
    ranks = dist.get_world_size() if options else 1
    for step in range(5):
        tokens = torch.randint(0, 50, (4, 6), generator=draws)
        mine = tokens.chunk(ranks)[dist.get_rank()] if options else tokens
        # Rows in shared memory are not read ahead.
        if step % 2 and options.get("memory") != "shared":
            module.prefetch(mine)
        opt.zero_grad()
        (module(mine) - 1).square().mean().backward()
        if options:
            dist.all_reduce(module.head_scale.grad, op=dist.ReduceOp.SUM)
            module.head_scale.grad /= ranks
        opt.step()
    with torch.no_grad():
        return module(torch.arange(50).view(2, 25))


def sharded(memory: str) -> tuple[torch.Tensor, torch.Tensor]:
    return trained({"process_group": dist.group.WORLD, "memory": memory}), trained({})


@pytest.mark.parametrize("memory", ["pageable", "shared"])
def test_trains_as_one_process_does(two, memory):
    for found, expected in two(sharded, memory):
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


COUNTS = {"a": 30, "b": 1, "c": 40}
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
            self.emb = nn.ModuleDict({name: nn.Embedding(size, 3) for name, size in COUNTS.items()})
        else:
            self.emb = st.MultiEmbedding(COUNTS, 3, **options)
        self.double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = {name: torch.randint(0, size, (5,), generator=draw) for name, size in COUNTS.items()}
        # All look all features up; the loss is of some.
        rows = (
            {name: self.emb[name](ids[name]) for name in COUNTS}
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
    whole = torch.cat([theirs.emb[name].weight.detach() for name in COUNTS])
    return float((ours.emb.table.gather(torch.arange(71)) - whole).abs().max())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["sharded", "shared", "replicas", "sharded in DDP"])
def test_as_modules_of_torch(two, kind, optimizer):
    assert max(two(apart, kind.partition(" ")[0], optimizer, "DDP" in kind)) < 1e-12
