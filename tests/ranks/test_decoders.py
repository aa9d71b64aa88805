"""Models that look a table up many times in one forward, as decoders do for each word, in several processes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.small import DIM, ROWS, distance, table, told
from speedtransfer.optim.shards import KEPT


class Decoder(nn.Module):
    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb, self.outer = emb, nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(words.shape[1], DIM, dtype=torch.float64)
        for word in words:
            state = torch.tanh(self.outer(state) + self.emb(word))
        return state.square().sum()


def words(step: int, rank: int, length: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (length, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def trained(kind: str, lengths: Sequence[int]) -> float:
    """How far a model of several processes is from one of a single process, after a step of each length."""
    model, one = Decoder(table("one" if kind == "replicas" else kind)), Decoder(table("one"))
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (model, one)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        wrapped = DistributedDataParallel(model)
    for step, length in enumerate(lengths):
        wrapped(words(step, dist.get_rank(), length)).backward()
        sum(one(words(step, rank, length)) / dist.get_world_size() for rank in range(dist.get_world_size())).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return distance(model.emb, one.emb)


@pytest.mark.parametrize("kind", ["sharded", "shared", "replicas"])
def test_as_one_process(two, kind):
    for error in two(trained, kind, (70, 3)):
        assert error < 1e-12


def too_many() -> str:
    emb = table("sharded")
    return told(lambda: sum(emb(torch.tensor([1])).sum() for _ in range(KEPT + 1)).backward())


def test_too_many_are_refused(two):
    for text in two(too_many):
        assert f"more than {KEPT} lookups" in text


def with_ids() -> float:
    """Lookups by ids that get rows as they come, more of them than a number has bits."""
    modules = []
    for group in (dist.group.WORLD, None):
        torch.manual_seed(3)
        vocabulary = st.Vocabulary(capacity=200)
        modules.append(st.Embedding(8, DIM, dtype=torch.float64, vocabulary=vocabulary, process_group=group))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in modules]
    worst, ranks = 0.0, dist.get_world_size()
    for step in range(3):
        ours, *others = [
            sum(module(1_000_003 * word).square().sum() for word in words(step, rank, 70))
            for module, rank in [(modules[0], dist.get_rank()), *((modules[1], rank) for rank in range(ranks))]
        ]
        worst = max(worst, abs(float((ours - others[dist.get_rank()]).detach())))
        ours.backward()
        (sum(others) / ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def test_ids_that_come(two):
    for error in two(with_ids):
        assert error < 1e-10
