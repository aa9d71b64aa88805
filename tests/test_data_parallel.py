"""Tables in ``nn.DataParallel``: with one device it calls the model, with several it is refused."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError


def model(kind: type) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(50, 4), nn.Flatten(), nn.Linear(8, 1))


def losses(net: nn.Module) -> list[float]:
    draw, found = torch.Generator().manual_seed(1), []
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(5):
        opt.zero_grad()
        loss = net(torch.randint(50, (8, 2), generator=draw)).square().mean()
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run on the GPU")
def test_without_a_gpu_it_calls_the_model():
    assert nn.DataParallel(model(st.Embedding)).device_ids == []
    assert losses(nn.DataParallel(model(st.Embedding))) == losses(model(st.Embedding))


@pytest.fixture
def two_gpus(monkeypatch):
    """DataParallel takes models as if there were two GPUs; it could not run them."""
    # In torch.nn.parallel the name is that of a function.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(data_parallel, "_check_balance", lambda devices: None)


def test_with_several_gpus_it_is_refused(two_gpus):
    message = r"DataParallel was given .*0\.weight, the weight of a table, and 2 GPUs: .*use DistributedDataParallel"
    with pytest.raises(InvalidValueError, match=message):
        nn.DataParallel(model(st.Embedding), device_ids=[0, 1])
    wrapped = nn.DataParallel(model(nn.Embedding), device_ids=[0, 1])
    st.replace_embeddings(wrapped.module, min_rows=1)
    with pytest.raises(InvalidValueError, match=message):
        wrapped.replicate(wrapped.module, wrapped.device_ids)
