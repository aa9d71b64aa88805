"""Ids sent ahead to the owners of their rows: the same bits as without, in fewer messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st
from ranks.small import told

SIZES = (300, 40, 7)


class Net(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        group = dist.group.WORLD
        known = options.pop("vocabulary", False)
        each = [{"vocabulary": st.Vocabulary(seed=n)} if known else {} for n in SIZES]
        made = [st.Embedding(n, 4, process_group=group, **options, **e) for n, e in zip(SIZES, each, strict=True)]
        self.tables = nn.ModuleList(made)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(sum(table(ids[:, i] % SIZES[i]) for i, table in enumerate(self.tables)))


def trained(ahead: bool, depth: int, options: dict, evaluate: bool = False) -> dict:
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = Net(**options)
    model = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    # Few ids, so that batches ahead hold rows that steps before them change.
    batches = [torch.randint(0, 30, (5, 3), generator=draw) for _ in range(8)]
    if ahead:
        ids_of = lambda ids: [(t, ids[:, i] % SIZES[i]) for i, t in enumerate(net.tables)]  # noqa: E731
        batches = st.prefetch(batches, ids_of, depth)
    traffic = net.tables[0]._handle.owners.exchange.traffic
    before = traffic.calls
    for step, ids in enumerate(batches):
        opt.zero_grad()
        model(ids).square().sum().backward()
        opt.step()
        if evaluate and step == 4:
            with torch.no_grad():
                net.tables[0](torch.arange(9))
    calls = traffic.calls - before
    with torch.no_grad():
        rows = [table.eval()(torch.arange(n)) for table, n in zip(net.tables, SIZES, strict=True)]
    return {"rows": rows, "calls": calls}


CASES = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"storage_dtype": torch.int8, "state_dtype": torch.uint8, "idle": "lazy"},
    # Not read ahead.
    "shared": {"memory": "shared"},
    "max_norm": {"max_norm": 0.5, "idle": "lazy"},
    "vocabulary": {"vocabulary": True},
}


def both(options: dict, depth: int, evaluate: bool) -> tuple:
    return trained(False, depth, options, evaluate), trained(True, depth, options, evaluate)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("depth", [1, 3])
def test_same_bits_in_fewer_messages(two, case, depth):
    for plain, ahead in two(both, CASES[case], depth, depth == 3):
        for a, b in zip(plain["rows"], ahead["rows"], strict=True):
            assert torch.equal(a, b)
        if case in ("shared", "max_norm", "vocabulary"):
            assert ahead["calls"] == plain["calls"]
        else:
            # Per step: three tables, three messages each, and one more for each form; ahead two and two for all.
            assert ahead["calls"] < 0.65 * plain["calls"]


def wrong() -> list[str]:
    emb, ids, rank = st.Embedding(20, 4, process_group=dist.group.WORLD), torch.tensor([1, 2]), dist.get_rank()
    ticket = emb.prefetch(ids)
    assert ticket.is_waiting
    said = [told(lambda: emb(ids + 1 if rank else ids)), told(lambda: emb.prefetch(torch.tensor([5, 20])[rank:][:1]))]
    emb.prefetch(torch.tensor([3]))
    assert emb(torch.tensor([3])).shape == (1, 4)
    return said


def test_ids_that_differ_or_cannot_be_are_told_by_all(two):
    for other, bad in two(wrong):
        assert "rank 0: rows ahead" in other
        assert "rank 1: weight after 0 steps (lookup 0, in training)" in other
        assert "rank 1 refused its ids" in bad or bad.startswith("RowIndexError")


def features(kind: str) -> float:
    """Look features up by tickets, all together and one alone, and return how far the rows are from those of one process."""
    options = {"process_group": dist.group.WORLD} | ({"memory": "shared"} if kind == "shared" else {})
    torch.manual_seed(1)
    ours = st.MultiEmbedding({"a": 30, "b": 9}, 4, **options)
    torch.manual_seed(1)
    one, far = st.MultiEmbedding({"a": 30, "b": 9}, 4), 0.0
    opts = [torch.optim.Adam(emb.parameters(), lr=0.1) for emb in (ours, one)]
    for step in range(3):
        batches = [{"b": torch.tensor([8, rank]), "a": torch.tensor([[step, 3 + rank]])} for rank in range(2)]
        mine = batches[dist.get_rank()]
        both, alone = ours.prefetch(mine), ours["a"].prefetch(mine["a"])
        found, rows = ours(both), ours["a"](alone)
        wanted = one(mine)
        pairs = (found["a"], wanted["a"]), (found["b"], wanted["b"]), (rows, wanted["a"])
        far = max(far, *(float((a - b).detach().abs().max()) for a, b in pairs))
        (found["a"].sum() + found["b"].square().sum() + rows.square().sum()).backward()
        for each in map(one, batches):
            ((each["a"].sum() + each["b"].square().sum() + each["a"].square().sum()) / 2).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return far


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_tickets_of_features(two, kind):
    assert max(two(features, kind)) < 1e-5
