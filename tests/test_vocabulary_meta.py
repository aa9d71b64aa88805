"""Modules with a vocabulary on the meta device: they have settings and no ids, until they are given rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError

IDS = torch.tensor([[7, -1, 2**60], [3, 7, 5]])


def model(device: str = "cpu", **options: Any) -> nn.Module:
    vocabulary = st.Vocabulary(seed=2, admit=1, max_capacity=100, unseen="zeros")
    emb = st.Embedding(4, 2, padding_idx=3, device=device, vocabulary=vocabulary, **options)
    return nn.Sequential(emb, nn.Linear(2, 2, device=device))


def trained(device: str = "cpu") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = model(device)
    if device == "meta":
        net.to_empty(device="cpu")
        net[1].reset_parameters()
    return train(net, torch.optim.AdamW(net.parameters(), lr=0.1))


def train(net: nn.Module, opt: Any, steps: int = 3) -> tuple[nn.Module, Any]:
    for step in range(steps):
        net(IDS + step).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return net, opt


def rows(net: nn.Module) -> list[Tensor]:
    return [*net[0].vocabulary.export(), *(param.detach() for param in net[1].parameters())]


def assert_same(net: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(rows(net), rows(other), strict=True))


def test_training_from_there_is_that_of_a_module_made_here():
    torch.manual_seed(0)
    net = model()
    net[1].reset_parameters()
    torch.manual_seed(0)
    other = model("meta").to_empty(device="cpu")
    other[1].load_state_dict(net[1].state_dict())
    for each in (net, other):
        train(each, torch.optim.AdamW(each.parameters(), lr=0.1))
    assert_same(net, other)


def checkpoint(net: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
    st.save_checkpoint(folder, net)
    with pytest.raises(InvalidValueError, match=r"meta device, .*to_empty"):
        st.load_checkpoint(folder, other)
    st.load_checkpoint(folder, other.to_empty(device="cpu"))
    return other


def assigned(net: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
    other.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    return other


def emptied(net: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
    other.to_empty(device="cpu").load_state_dict(net.state_dict())
    return other


BORN: dict[str, Callable[[], nn.Module]] = {
    "made there": lambda: model("meta"),
    "moved there": lambda: trained()[0].to("meta"),
    "copied there": lambda: copy.deepcopy(model("meta")),
    "pickled": lambda: pickle.loads(pickle.dumps(model("meta"))),
}


@pytest.mark.parametrize("born", BORN)
@pytest.mark.parametrize("load", [checkpoint, assigned, emptied])
def test_what_is_loaded_gives_it_rows(load, born, tmp_path):
    net, _ = trained()
    other = BORN[born]()
    assert other[0].weight.is_meta
    assert other[0].vocabulary.max_capacity == 100
    other = load(net, other, tmp_path / "saved")
    assert type(other[0].weight) is type(net[0].weight)
    assert_same(net, other)
    assert torch.equal(net(IDS), other(IDS))
    for each in (net, other):
        train(each, torch.optim.AdamW(each.parameters(), lr=0.1))
    assert_same(net, other)
    assert not other[0](torch.tensor([3])).any()


def test_rows_that_are_assigned_are_those_of_the_ids_from_0_on():
    emb = st.Embedding(9, 2, device="meta", vocabulary=st.Vocabulary())
    emb.weight = nn.Parameter(torch.arange(8.0).view(4, 2))
    assert emb(torch.tensor([3, 0])).tolist() == [[6.0, 7.0], [0.0, 1.0]]
    assert emb.vocabulary.ids().tolist() == [0, 1, 2, 3]


def test_a_model_that_forgets_its_rows_keeps_settings_and_room():
    net, _ = trained()
    capacity, settings = net[0].vocabulary.capacity, net[0].vocabulary.__getstate__()
    net.to("meta")
    assert net[0].vocabulary.__getstate__() == settings
    assert net[0].num_embeddings == capacity
    net.to_empty(device="cpu")
    assert net[0].vocabulary.capacity == capacity
    assert len(net[0].vocabulary) == 0


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "assign=True": lambda net: net.load_state_dict(trained()[0].state_dict()),
    "Missing": lambda net: net.load_state_dict({}, assign=True),
    "no rows yet": lambda net: net[0].activate(torch.tensor([1])),
    "no rows yet, or those": lambda net: net[0].vocabulary.export(),
    "this module has a vocabulary": lambda net: setattr(net[0], "weight", st.Embedding(3, 2).weight),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    net = model("meta")
    with pytest.raises((InvalidTypeError, InvalidValueError, RuntimeError), match=what):
        REFUSED[what](net)
    assert net[0].weight.is_meta


def test_dense_parameters_there_are_refused_by_a_checkpoint_too(tmp_path):
    st.save_checkpoint(tmp_path / "saved", nn.Sequential(st.Embedding(3, 2), nn.Linear(2, 1)))
    for net in (
        nn.Sequential(st.Embedding(3, 2, device="meta"), nn.Linear(2, 1)),
        nn.Sequential(st.Embedding(3, 2), nn.Linear(2, 1, device="meta")),
    ):
        with pytest.raises(InvalidValueError, match="weight' of the model is on the meta device"):
            st.load_checkpoint(tmp_path / "saved", net)
