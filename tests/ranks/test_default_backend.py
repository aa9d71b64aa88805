"""Groups whose backend is not named: gloo for the host, NCCL for devices where there are any."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from speedtransfer.ranks import Exchange, exchange_of


def trained() -> tuple[bool, torch.Tensor]:
    group = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(group) != "gloo"
    emb = st.Embedding(20, 4, process_group=group, device="cpu")
    opt = torch.optim.AdamW(emb.parameters())
    emb(torch.arange(dist.get_rank() + 3)).sum().backward()
    opt.step()
    return exchange_of(group).on_host, emb(torch.arange(20)).detach()


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages would be on the device")
def test_without_cuda_messages_are_on_the_host(two):
    (on_host, rows), (_, same) = two(trained)
    assert on_host
    assert torch.equal(rows, same)


class Group:
    """What has a backend."""


@pytest.mark.parametrize(
    ("config", "cuda", "on_host"),
    [
        ("cpu:gloo,cuda:gloo", True, True),
        ("cpu:gloo,cuda:nccl", True, False),
        ("cpu:gloo,cuda:nccl", False, True),
        ("cuda:nccl", True, False),
        ("cpu:gloo", True, True),
    ],
)
def test_where_messages_are(monkeypatch, config, cuda, on_host):
    for name, value in (("get_rank", 0), ("get_world_size", 1), ("get_backend_config", config)):
        monkeypatch.setattr(dist, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    group = Group()
    assert Exchange(group).on_host is on_host
