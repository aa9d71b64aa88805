"""Checkpoints of vocabularies that several processes share out: training goes on in any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedtransfer as st
from ranks.small import told

DIM, PADDING, SAVED, STEPS = 4, -3, 5, 9


def model(alone: bool, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One whose table grows, more on one rank than on another, and which admits ids at their second sighting."""
    given = {"max_capacity": 400, "admit": 2, "unseen": "row", "seed": 3, **settings}
    idle = given.pop("idle", "exact")
    group = {} if alone else {"process_group": dist.group.WORLD}
    emb = st.Embedding(
        given.pop("rows", 6), DIM, PADDING, vocabulary=st.Vocabulary(**given), dtype=torch.float64, idle=idle, **group
    )
    net = nn.Sequential(emb)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The ids of all, whose number six processes can share, and weights of the loss."""
    draw = torch.Generator().manual_seed(step)
    ids = (torch.rand(6, 8, generator=draw) ** 2 * 90).long() * 2**56 - 2**60
    ids[torch.rand(6, 8, generator=draw) < 0.1] = PADDING
    return ids, torch.randn(6, 8, DIM, generator=draw, dtype=torch.float64)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range, rank: int, world: int) -> None:
    for step in steps:
        ids, weights = (part.tensor_split(world)[rank] for part in batch(step))
        ((net(ids) * weights).sum() * world / 6).backward()
        opt.step()
        opt.zero_grad()


def end_of(net: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The ids that this process knows, their rows, and what all ids read."""
    net.eval()
    with torch.no_grad():
        every = net(torch.cat([batch(step)[0] for step in range(STEPS)]))
    return *net[0].vocabulary.export(), every


def check(parts: list, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    ids, order = torch.cat([ids for ids, *_ in parts]).sort()
    assert torch.equal(ids, wanted[0])
    assert float((torch.cat([rows for _, rows, _ in parts])[order] - wanted[1]).abs().max()) < 1e-10
    for *_, every in parts:
        assert float((every - wanted[2]).abs().max()) < 1e-10


def save(folder: str, settings: dict) -> tuple:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, opt = model(False, **settings)
    train(net, opt, range(SAVED), rank, world)
    st.save_checkpoint(folder, net, opt, extra=rank)
    train(net, opt, range(SAVED, STEPS), rank, world)
    return end_of(net)


def load(folder: str, settings: dict) -> tuple:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, opt = model(False, **settings)
    assert st.load_checkpoint(folder, net, opt) == 0
    assert net[0].vocabulary.clock == SAVED
    assert net[0].num_embeddings == net[0].weight.shape[0] == max(net[0]._handle.owners.partition.sizes) * world
    train(net, opt, range(SAVED, STEPS), rank, world)
    return end_of(net)


def alone(folder: str, settings: dict) -> tuple:
    net, opt = model(True, **settings)
    st.load_checkpoint(folder, net, opt)
    train(net, opt, range(SAVED, STEPS), 0, 1)
    return end_of(net)


# From how many processes to how many.
PAIRS = {"exact": [(1, 2), (2, 1), (2, 2), (2, 3)], "lazy": [(2, 1), (2, 3)]}
SETTINGS = {"exact": {}, "lazy": {"idle": "lazy", "admit": 0.4, "evict": "lfu"}}


@pytest.mark.parametrize("name", PAIRS)
def test_saved_by_any_number_and_loaded_by_any(pool, tmp_path, name):
    folders, settings = {world: str(tmp_path / str(world)) for world in (1, 2)}, SETTINGS[name]
    net, opt = model(True, **settings)
    train(net, opt, range(SAVED), 0, 1)
    st.save_checkpoint(folders[1], net, opt, extra=0)
    train(net, opt, range(SAVED, STEPS), 0, 1)
    wanted = end_of(net)
    assert len(wanted[0]) > 20
    check(pool.of(2)(save, folders[2], settings), wanted)
    for saved, loaded in PAIRS[name]:
        if loaded == 1:
            check([alone(folders[saved], settings)], wanted)
        else:
            check(pool.of(loaded)(load, folders[saved], settings), wanted)


def save_full(folder: str) -> None:
    net, opt = model(False, admit="always", rows=60)
    train(net, opt, range(SAVED), dist.get_rank(), dist.get_world_size())
    st.save_checkpoint(folder, net, opt)


def load_small(folder: str) -> list[str]:
    """Into a vocabulary without room for so many ids, which stays as it was; into one with another padding."""
    net, opt = model(False, admit="always", rows=6, max_capacity=None)
    train(net, opt, range(0), 0, 1)
    errors = [told(lambda: st.load_checkpoint(folder, net, opt))]
    assert len(net[0].vocabulary) == 0
    other = nn.Sequential(st.Embedding(60, DIM, vocabulary=st.Vocabulary(), process_group=dist.group.WORLD))
    errors.append(told(lambda: st.load_checkpoint(folder, other.double())))
    return errors


def test_what_does_not_fit_changes_nothing(two, tmp_path):
    folder = str(tmp_path / "run")
    two(save_full, folder)
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
