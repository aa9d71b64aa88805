"""A `MultiEmbedding` of several processes: the numbers of one process with the batches of all, with a vocabulary too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedtransfer as st
from ranks.pair import DIM, Pair, table, wrap

SIZES, PADDING = {"a": 40, "b": 1, "c": 30}, {"a": -1, "b": None, "c": 2}
# Which features each rank gives a gradient in each step.
STEPS = [("ab", "ab"), ("a", "c"), ("", "b"), ("abc", "a"), ("c", "c"), ("a", "ab"), ("b", "b"), ("abc", "abc")]
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
}


def multi(kind: str = "one", has_ids: bool = False, **options: Any) -> st.MultiEmbedding:
    if has_ids:
        options |= {"vocabulary": st.Vocabulary(seed=3, max_capacity=1000), "padding_idx": PADDING}
    return table(kind, SIZES, DIM, make=st.MultiEmbedding, **options)


def ids_of(step: int, rank: int, has_ids: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    if not has_ids:
        return {name: torch.randint(0, size, (5,), generator=draw) for name, size in SIZES.items()}
    ids = {name: torch.randint(-2, 6 + 2 * step, (3 + rank, 2), generator=draw) for name in SIZES}
    # In a vocabulary of one process as in the order of ranks.
    return {name: part * (1 << 50) if name == "b" else part for name, part in ids.items()}


class Net(nn.Module):
    """All look all features up; the loss is of some, and of none in some processes."""

    def __init__(self, emb: st.MultiEmbedding) -> None:
        super().__init__()
        self.emb, self.scale = emb, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, place: tuple[int, int]) -> Tensor:
        step, rank = place
        rows = self.emb(ids_of(step, rank, self.emb.vocabulary is not None))
        losses = [((rows[f] - 0.3).square() * torch.arange(DIM)).sum() for f in STEPS[step][rank]]
        return sum(losses, 0 * self.scale)


@torch.no_grad()
def read(net: Net) -> Tensor:
    net.eval()
    has_ids = net.emb.vocabulary is not None
    rows = [net.emb(ids_of(step, rank, has_ids)) for step in range(len(STEPS) + 1) for rank in range(2)]
    net.train()
    return torch.cat([part.reshape(-1, DIM) for found in rows for part in found.values()])


def compared(kind: str, has_ids: bool, ddp: bool, optimizer: str, idle: str) -> float:
    ours, one = (Net(multi(each, has_ids, idle=idle)) for each in (kind, "one"))
    how: dict[str, Any] = {"batch": lambda *place: place, "loss": lambda net, place: net(place), "lr": 0.05}
    pair = Pair(ours, one, OPTIMIZERS[optimizer], **how, **({"wrap": wrap} if ddp else {}))
    for step in range(len(STEPS)):
        pair.backward(step)
        pair.end()
    if has_ids:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, pair.ours.emb.vocabulary.ids())
        assert torch.equal(torch.cat(parts).unique(), pair.one.emb.vocabulary.ids().sort().values)
    return float((read(pair.ours) - read(pair.one)).abs().max())


@pytest.mark.parametrize(
    "how",
    [
        ("sharded", False, False, "adamw", "exact"),
        ("shared", False, False, "adamw", "exact"),
        ("shared", False, False, "sgd", "lazy"),
        ("replicas", False, True, "sgd", "lazy"),
        ("sharded", True, False, "sgd", "lazy"),
        ("sharded", True, True, "adamw", "lazy"),
        ("sharded", True, False, "adamw", "exact"),
        pytest.param(("sharded", False, True, "sgd", "lazy"), marks=pytest.mark.slow),
        pytest.param(("replicas", False, True, "adamw", "exact"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training(two, how):
    assert max(two(compared, *how)) < 1e-12


# --- all rows -------------------------------------------------------------------------------------------------------------


def few_rows() -> None:
    # The last rank has no rows of one chunk.
    ours, one = (table(kind, 1, DIM, dtype=torch.float32, storage_dtype=torch.bfloat16) for kind in ("sharded", "one"))
    found = st.full_state_dict(ours)
    assert not found if dist.get_rank() else torch.equal(found["weight"], one.state_dict()["weight"])


def test_full_state_dict_of_fewer_rows_than_ranks(two):
    two(few_rows)
