"""``speedtransfer.Embedding`` as a module: conversion, copies, pickles."""

from __future__ import annotations

import io

import pytest
import torch
import torch.utils.checkpoint
from lazy_oracle import both
from torch import nn

import speedtransfer

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


# --- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["half", "double", "bfloat16", "float"])
def test_conversion_converts_the_table(how: str) -> None:
    ours, dense = both(dtype=torch.float64 if how == "float" else torch.float32)
    ours(IDS).sum().backward()  # a gradient pending goes
    getattr(ours, how)()
    getattr(dense, how)()
    assert ours.weight.dtype == ours.table.dtype == dense.weight.dtype
    assert ours.weight.grad is None
    assert torch.equal(ours.table.torch(), dense.weight)
    opt = torch.optim.SGD(ours.parameters(), lr=0.5)
    dense_opt = torch.optim.SGD(dense.parameters(), lr=0.5)
    for module in (ours, dense):
        module(IDS).sum().backward()
    opt.step()
    dense_opt.step()
    assert torch.equal(ours.table.torch(), dense.weight)


def test_conversion_that_makes_new_parameters() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        emb = speedtransfer.Embedding(12, 5).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert emb.table.dtype == torch.float64
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    before = emb.table.torch().clone()
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(emb.table.torch()[1], before[1] - 1)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_pickle_by_torch_save(memory: str, tmp_path) -> None:
    path = tmp_path / "rows.npy" if memory == "mmap" else None
    model = nn.Sequential(speedtransfer.Embedding(12, 5, padding_idx=1, memory=memory, path=path), nn.Linear(5, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    opt.step()
    model(IDS).sum().backward()  # a gradient pending is left behind, as torch leaves it
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded[0].padding_idx == 1
    assert loaded[0].weight.grad is None
    assert torch.equal(loaded[0].weight, model[0].weight)
    assert torch.equal(loaded[0].table.torch(), model[0].table.torch())
    assert torch.equal(loaded(IDS), model(IDS))
    before = model[0].table.torch().clone()
    new = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    loaded(IDS).sum().backward()
    new.step()
    assert not torch.equal(loaded[0].table.torch()[3], before[3])
    assert torch.equal(model[0].table.torch(), before)
