"""Checkpoints go between devices and memories, and the bits stay."""

from __future__ import annotations

import pytest
import torch
from checkpoint_cases import digest
from torch import nn

import speedtransfer as st


def make(device, memory, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        st.Embedding(3000, 20, device=device, memory=memory, idle="lazy"), nn.Linear(20, 3, device=device)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, opt, device, steps):
    for _ in range(steps):
        opt.zero_grad()
        ids = torch.randint(0, 3000, (64,), device=device)
        model(ids).square().sum().backward()
        opt.step()


def bits(model, opt):
    return digest([dict(model.state_dict()), opt.state_dict()])


@pytest.mark.parametrize("memory", ["pinned", "pageable", "device"])
def test_to_the_host_and_back(memory, device, tmp_path):
    model, opt = make(device, memory, 0)
    train(model, opt, device, 3)
    st.save_checkpoint(tmp_path / "cuda", model, opt)
    expected = bits(model, opt)
    host = make("cpu", "pageable", 1)
    st.load_checkpoint(tmp_path / "cuda", *host)
    assert bits(*host) == expected
    st.save_checkpoint(tmp_path / "host", *host)
    back = make(device, memory, 2)
    st.load_checkpoint(tmp_path / "host", *back)
    assert bits(*back) == expected


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_resuming_is_going_on(memory, device, tmp_path):
    model, opt = make(device, memory, 0)
    train(model, opt, device, 3)
    st.save_checkpoint(tmp_path, model, opt)
    train(model, opt, device, 3)  # on random rows, of the generator of the device
    other = make(device, memory, 1)
    torch.cuda.manual_seed(9)
    st.load_checkpoint(tmp_path, *other)
    train(*other, device, 3)
    for a, b in zip(model.state_dict().values(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums on a GPU come in any order
