"""A `MultiEmbeddingBag` of several processes: the numbers of one process with the batches of all, and bad bags told to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from ranks.small import told

SIZES, FEATURES = {"a": 40, "b": 9}, {"x": "a", "y": "b", "z": "a"}
MODES = {"x": "sum", "y": "mean", "z": "max"}


def bag(**options: Any) -> st.MultiEmbeddingBag:
    torch.manual_seed(4)
    return st.MultiEmbeddingBag(SIZES, 4, FEATURES, MODES, padding_idx=3, dtype=torch.float64, **options)


def ids_of(step: int, rank: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    offsets = torch.tensor([0, 0, 4, 6 + rank])
    return {name: (torch.randint(SIZES[t], (9,), generator=draw), offsets) for name, t in FEATURES.items()}


def compared(options: dict[str, Any], ahead: bool) -> float:
    """Train with a table that one process gives no gradient, and in some steps none does."""
    ours, one = bag(process_group=dist.group.WORLD, **options), bag()
    opts = [torch.optim.AdamW(emb.parameters(), lr=0.05) for emb in (ours, one)]

    def loss_of(found: Any, step: int, rank: int) -> Any:
        used = [name for name in FEATURES if name != "y" or (rank and step % 3)]
        return sum((found[name] - 0.3).square().sum() for name in used)

    for step in range(5):
        mine, rank = ids_of(step, dist.get_rank()), dist.get_rank()
        loss_of(ours(ours.prefetch(mine) if ahead else mine), step, rank).backward()
        (sum(loss_of(one(ids_of(step, each)), step, each) for each in range(2)) / 2).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    with torch.no_grad():
        every = {name: torch.arange(n) for name, n in SIZES.items()}
        return max(float((ours[name](ids) - one[name](ids)).abs().max()) for name, ids in every.items())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [{}, {"memory": "shared"}], ids=str)
def test_training(two, options, ahead):
    assert max(two(compared, options, ahead)) < 1e-12


def wrong() -> tuple[list[str], float]:
    """One process looks bags up that there cannot be: all raise, and go on."""
    emb, last = bag(process_group=dist.group.WORLD), dist.get_rank()
    good = ids_of(0, 0)
    bad = (good["y"][0], torch.tensor([0, 4, 2] if last else [0, 4]))
    said = [told(lambda: emb({**good, "y": bad})), told(lambda: emb(good, {"y" if last else "x": torch.ones(9)}))]
    return said, float(emb(good)["x"].detach().sum())


def test_bags_that_cannot_be_are_told_to_all(two):
    (others, first), (own, second) = two(wrong)
    assert first == second
    assert all("rank 1" in said for said in others), others
    assert "offsets[2] of feature 'y' is 2 after 4" in own[0]
    assert "feature 'y' has weights" in own[1]
