"""Checkpoints of vocabularies that several processes share out: training goes on in any number of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedtransfer as st
from ranks.small import told
from ranks.test_vocabulary_ranks import DIM, Run, batch, embedding, optimizer

SAVED, STEPS, PARTS = 5, 9, 6
# Of a table that grows, more on one rank than on another, with ids that are admitted at their second sighting.
GROWS = Run(vocabulary={"max_capacity": 400, "admit": 2, "unseen": "row"}, module={"idle": "exact"}, capacity=6, ids=90)
RUNS = {"exact": GROWS}
RUNS["lazy"] = dataclasses.replace(
    GROWS, vocabulary={"max_capacity": 400, "admit": 3, "unseen": "row", "evict": "lfu"}, module={"idle": "lazy"}
)
FULL = Run(vocabulary={"max_capacity": 400}, module={"idle": "exact"}, capacity=60, ids=90)


def model(run: Run, alone: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(embedding(run, **({} if alone else {"process_group": dist.group.WORLD})))
    return net, optimizer(run, list(net.parameters()))


def train(run: Run, net: nn.Module, opt: torch.optim.Optimizer, steps: range, alone: bool = False) -> None:
    """Train on batches that any number of processes share."""
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    for step in steps:
        parts = [batch(run, step, part) for part in range(rank * PARTS // world, (rank + 1) * PARTS // world)]
        ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        ((net(ids) * weights).sum() * world / PARTS).backward()
        opt.step()
        opt.zero_grad()


def end_of(run: Run, net: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The ids that this process knows, their rows, and what all ids read."""
    net.eval()
    with torch.no_grad():
        every = net(torch.cat([batch(run, step, part)[0] for step in range(STEPS) for part in range(PARTS)]))
    return *net[0].vocabulary.export(), every


def check(parts: list, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    ids, order = torch.cat([ids for ids, *_ in parts]).sort()
    assert torch.equal(ids, wanted[0])
    assert float((torch.cat([rows for _, rows, _ in parts])[order] - wanted[1]).abs().max()) < 1e-10
    for *_, every in parts:
        assert float((every - wanted[2]).abs().max()) < 1e-10


def save(folder: str, run: Run, alone: bool = False) -> tuple:
    net, opt = model(run, alone)
    train(run, net, opt, range(SAVED), alone)
    st.save_checkpoint(folder, net, opt, extra=0 if alone else dist.get_rank())
    train(run, net, opt, range(SAVED, STEPS), alone)
    return end_of(run, net)


def load(folder: str, run: Run, alone: bool = False) -> tuple:
    net, opt = model(run, alone)
    assert st.load_checkpoint(folder, net, opt) == 0
    assert net[0].vocabulary.clock == SAVED
    if not alone:
        rows = max(net[0]._handle.owners.partition.sizes) * dist.get_world_size()
        assert net[0].num_embeddings == net[0].weight.shape[0] == rows
    train(run, net, opt, range(SAVED, STEPS), alone)
    return end_of(run, net)


# From how many processes to how many.
PAIRS = {"exact": [(1, 2), (2, 1), (2, 2), (2, 3)], "lazy": [(2, 1), (2, 3)]}


@pytest.mark.parametrize("name", PAIRS)
def test_saved_by_any_number_and_loaded_by_any(pool, tmp_path, name):
    folders, run = {world: str(tmp_path / str(world)) for world in (1, 2)}, RUNS[name]
    wanted = save(folders[1], run, True)
    assert len(wanted[0]) > 20
    check(pool.of(2)(save, folders[2], run), wanted)
    for saved, loaded in PAIRS[name]:
        parts = [load(folders[saved], run, True)] if loaded == 1 else pool.of(loaded)(load, folders[saved], run)
        check(parts, wanted)


def load_small(folder: str) -> list[str]:
    """Into a vocabulary without room for so many ids, which stays as it was; into one with another padding."""
    net, opt = model(dataclasses.replace(FULL, vocabulary={"max_capacity": None}, capacity=6), False)
    errors = [told(lambda: st.load_checkpoint(folder, net, opt))]
    assert len(net[0].vocabulary) == 0
    other = nn.Sequential(st.Embedding(60, DIM, vocabulary=st.Vocabulary(), process_group=dist.group.WORLD))
    errors.append(told(lambda: st.load_checkpoint(folder, other.double())))
    return errors


def test_what_does_not_fit_changes_nothing(two, tmp_path):
    folder = str(tmp_path / "run")
    two(save, folder, FULL)
    for small, other in two(load_small, folder):
        assert "make the module with a larger capacity" in small
        assert "padding_idx" in other
    manifest = Path(folder, "manifest.json").read_text()
    assert "in order" in manifest
    plain = nn.Sequential(nn.Embedding(60, DIM, dtype=torch.float64))
    assert "make the module with vocabulary=st.Vocabulary()" in told(lambda: st.load_checkpoint(folder, plain))


def from_plain(folder: str) -> Tensor:
    net = nn.Sequential(st.Embedding(40, DIM, vocabulary=st.Vocabulary(), process_group=dist.group.WORLD))
    st.load_checkpoint(folder, net)
    assert np.array_equal(
        net[0].vocabulary.rows(range(40)).numpy() >= 0, net[0]._handle.id_space.owners.owns(np.arange(40))
    )
    return net.eval()(torch.arange(40)).detach()


def test_a_plain_embedding_becomes_one_with_ids(two, tmp_path):
    folder, plain = str(tmp_path / "plain"), nn.Sequential(nn.Embedding(40, DIM))
    st.save_checkpoint(folder, plain)
    for rows in two(from_plain, folder):
        assert torch.equal(rows, plain[0].weight.detach())
