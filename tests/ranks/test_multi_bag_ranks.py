"""A `MultiEmbeddingBag` of several processes: the numbers of one process with the batches of all, and bad bags told to all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from ranks.pair import Pair, table, told

SIZES, FEATURES = {"a": 40, "b": 9}, {"x": "a", "y": "b", "z": "a"}
MODES = {"x": "sum", "y": "mean", "z": "max"}


def bag(kind: str) -> st.MultiEmbeddingBag:
    return table(kind, SIZES, 4, FEATURES, MODES, make=st.MultiEmbeddingBag, padding_idx=3)


def ids_of(step: int, rank: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    offsets = torch.tensor([0, 0, 4, 6 + rank])
    return {name: (torch.randint(SIZES[t], (9,), generator=draw), offsets) for name, t in FEATURES.items()}


def loss_of(emb: Any, batch: tuple[int, int], ahead: bool) -> Any:
    """One process gives a table no gradient, and in some steps none does."""
    step, rank = batch
    ids = ids_of(step, rank)
    found = emb(emb.prefetch(ids) if ahead else ids)
    used = [name for name in FEATURES if name != "y" or (rank and step % 3)]
    return sum((found[name] - 0.3).square().sum() for name in used)


def compared(kind: str, ahead: bool) -> float:
    ours, one = bag(kind), bag("one")
    batch = lambda step, rank: (step, rank)  # noqa: E731
    loss = functools.partial(loss_of, ahead=ahead)
    Pair(ours, one, torch.optim.AdamW, batch=batch, loss=loss, lr=0.05).train(*range(5))
    with torch.no_grad():
        every = {name: torch.arange(n) for name, n in SIZES.items()}
        return max(float((ours[name](ids) - one[name](ids)).abs().max()) for name, ids in every.items())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_training(two, kind, ahead):
    assert max(two(compared, kind, ahead)) < 1e-12


def wrong() -> tuple[list[str], float]:
    """One process looks bags up that there cannot be: all raise, and go on."""
    emb, last = bag("sharded"), dist.get_rank()
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
