"""A `MultiEmbedding` of several processes, with a vocabulary that they share out: as one process with the batches of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.small import told

SIZES, PADDING = {"a": 40, "b": 30, "c": 40}, {"a": -1, "b": None, "c": 2}
# Which features each rank gives a gradient in each step.
STEPS = [("ab", "ab"), ("a", "c"), ("", "b"), ("abc", "a"), ("c", "c"), ("a", "ab"), ("b", "b"), ("abc", "abc")]


def multi(group: Any = None, **about: Any) -> st.MultiEmbedding:
    options: dict[str, Any] = {} if group is None else {"process_group": group}
    about = {"seed": 3, "max_capacity": 1000, **about}
    idle = about.pop("idle", "exact")
    return st.MultiEmbedding(
        SIZES, 4, padding_idx=PADDING, dtype=torch.float64, idle=idle, vocabulary=st.Vocabulary(**about), **options
    )


def ids_of(step: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = {name: torch.randint(-2, 6 + 2 * step, (3 + rank, 2), generator=draw) for name in SIZES}
    # In a vocabulary of one process as in the order of ranks.
    return {name: part * (1 << 50) if name == "b" else part for name, part in ids.items()}


class Net(nn.Module):
    """All look all features up; the loss is of some, and of none in some processes."""

    def __init__(self, emb: st.MultiEmbedding) -> None:
        super().__init__()
        self.emb, self.scale = emb, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, step: int, rank: int) -> Tensor:
        rows = self.emb(ids_of(step, rank))
        losses = [((rows[f] - 0.3).square() * torch.arange(4)).sum() for f in STEPS[step][rank]]
        return sum(losses, 0 * self.scale)


def trained(emb: Any, opt: Any, steps: range, group: Any, ddp: bool = False) -> None:
    net = Net(emb)
    model = DistributedDataParallel(net) if ddp else net
    for step in steps:
        opt.zero_grad()
        (model(step, dist.get_rank()) if group is not None else (net(step, 0) + net(step, 1)) / 2).backward()
        opt.step()


def read(emb: st.MultiEmbedding) -> Tensor:
    """What all ids read."""
    emb.eval()
    with torch.no_grad():
        rows = [emb({**ids_of(step, rank)}) for step in range(len(STEPS) + 1) for rank in range(2)]
    emb.train()
    return torch.cat([part.reshape(-1, 4) for found in rows for part in found.values()])


def known(emb: st.MultiEmbedding, group: Any) -> Tensor:
    keys = emb.vocabulary.ids()
    if group is None:
        return keys.sort()[0]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, keys)
    return torch.cat(parts).sort()[0]


def compared(idle: str, kind: str) -> tuple[float, bool]:
    found = []
    for group in (dist.group.WORLD, None):
        emb = multi(group, idle=idle)
        opt = torch.optim.AdamW(emb.parameters(), lr=0.05, weight_decay=0.1)
        trained(emb, opt, range(len(STEPS)), group, kind == "DDP" and group is not None)
        found.append((read(emb), known(emb, group)))
    return float((found[0][0] - found[1][0]).abs().max()), torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("kind", ["alone", "DDP"])
def test_training(two, kind, idle):
    for far, same in two(compared, idle, kind):
        assert same
        assert far < 1e-12


def resumed(path: str) -> float:
    emb, one = multi(dist.group.WORLD), multi()
    for each, group in ((emb, dist.group.WORLD), (one, None)):
        opt = torch.optim.AdamW(each.parameters(), lr=0.05)
        trained(each, opt, range(5), group)
        if group is not None:
            st.save_checkpoint(path, each, opt)
            each = multi(group)
            fresh = torch.optim.AdamW(each.parameters(), lr=0.05)
            st.load_checkpoint(path, each, fresh)
            emb, opt = each, fresh
        trained(each, opt, range(5, len(STEPS)), group)
    # By one process.
    alone = multi()
    st.load_checkpoint(path, alone, torch.optim.AdamW(alone.parameters(), lr=0.05))
    return float((read(emb) - read(one)).abs().max())


def test_a_checkpoint(two, tmp_path):
    assert max(two(resumed, str(tmp_path / "saved"))) < 1e-12


def wrong(kind: str) -> tuple[list[str], float]:
    """One process looks an id up that there cannot be: all raise, and go on."""
    emb = (
        multi(dist.group.WORLD) if kind == "vocabulary" else st.MultiEmbedding(SIZES, 4, process_group=dist.group.WORLD)
    )
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    bad = (1 << 62) if dist.get_rank() else 1
    ids = {name: torch.tensor([1, 2]) for name in SIZES}
    uses = {
        "module": lambda: emb({**ids, "b": torch.tensor([1, bad])}),
        "feature": lambda: emb["b"](torch.tensor([bad])),
        "columns": lambda: emb(torch.tensor([[1, bad, 2]])),
        "activate": lambda: emb.activate([torch.tensor([1]), torch.tensor([bad]), torch.tensor([1])]),
        "evaluation": torch.no_grad()(lambda: emb(torch.tensor([[1, bad, 2]]))),
        "ids of no feature": lambda: emb({"z" if bad > 1 else "b": torch.tensor([1])}),
    }
    said = [told(use) for use in uses.values()]
    sum(rows.sum() for rows in emb(ids).values()).backward()
    opt.step()
    return said, float(emb["a"](torch.tensor([1])).detach().sum())


@pytest.mark.parametrize("kind", ["rows", "vocabulary"])
def test_an_id_that_cannot_be_is_told_to_all(two, kind):
    (others, first), (own, second) = two(wrong, kind)
    assert first == second
    assert all("rank 1" in said for said in others), others
    assert all(str(1 << 62) in said for said in own[:-1]), own
    assert "not a feature" in own[-1]
