"""Exact idle rows on a CUDA device: as dense training there, the same from every memory, without a wait for the device."""

import math

import pytest
import torch
from lazy_oracle import skewed_batches, squared_loss
from optimizer_cases import case_named
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer as st

MEMORIES = ["pinned", "pageable", "mmap", "device"]
NAMES = [
    "adamw",
    "adamw-fused",
    "adam-amsgrad",
    "nadam-decoupled",
    "radam",
    "sgd-momentum-weight-decay",
    "rmsprop-momentum",
]
ROWS, DIM = 60, 16


def train(module, make, device, steps=120, dtype=torch.float32):
    optimizer = make(module.parameters())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / steps))
    for ids, target in skewed_batches(ROWS, DIM, steps, size=8, dtype=dtype):
        optimizer.zero_grad()
        squared_loss(module(ids.to(device)), target.to(device)).backward()
        optimizer.step()
        schedule.step()
    return module.state_dict()["weight"].cpu().clone(), optimizer.state_dict()["state"][0]


def ours(memory, device, folder, **options):
    if memory == "mmap":
        options["path"] = folder / f"rows{len(list(folder.iterdir()))}.npy"
    torch.manual_seed(3)
    return st.Embedding(ROWS, DIM, memory=memory, device=device, idle="exact", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_memory_equals_dense_training(name, dtype, device, tmp_path):
    make = case_named(name).make
    torch.manual_seed(3)
    dense = nn.Embedding(ROWS, DIM, dtype=dtype).to(device)
    start = dense.weight.detach().cpu().clone()
    expected, state = train(dense, make, device, dtype=dtype)
    moved = float((expected - start).abs().max())
    results = [train(ours(memory, device, tmp_path, dtype=dtype), make, device, dtype=dtype) for memory in MEMORIES]
    for weight, _ in results:
        assert torch.equal(weight, results[0][0])
    # Capturable and fused kernels work out their corrections in float32.
    torch.testing.assert_close(
        results[0][0], expected, rtol=0, atol=(1e-10 if dtype == torch.float64 else 5e-5) * moved
    )
    for key, value in results[0][1].items():
        if isinstance(value, torch.Tensor) and value.dim():
            scale = float(state[key].abs().max())
            torch.testing.assert_close(value.cpu(), state[key].cpu(), rtol=0, atol=5e-5 * scale)


def test_the_cpu_agrees(device, tmp_path):
    make = case_named("adamw").make
    here, there = (train(ours("pageable", where, tmp_path), make, where) for where in ("cpu", device))
    torch.testing.assert_close(there[0], here[0], rtol=0, atol=5e-5)


def test_rows_and_history_follow_to_another_device(device, tmp_path):
    make = case_named("adamw").make
    module = ours("pageable", "cpu", tmp_path)
    optimizer = make(module.parameters())
    for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, 60, size=8)):
        if number == 30:
            module.to(device)
        where = module.weight.device
        optimizer.zero_grad()
        squared_loss(module(ids.to(where)), target.to(where)).backward()
        optimizer.step()
    expected, _ = train_plainly(ours("pageable", "cpu", tmp_path), make)
    torch.testing.assert_close(module.table.torch(), expected, rtol=0, atol=5e-5)


def train_plainly(module, make):
    optimizer = make(module.parameters())
    for ids, target in skewed_batches(ROWS, DIM, 60, size=8):
        optimizer.zero_grad()
        squared_loss(module(ids), target).backward()
        optimizer.step()
    return module.table.torch(), optimizer


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_rows_looked_at_by_ids_on_the_host(memory, device, tmp_path, monkeypatch):
    """They catch up on the device, and the record of their steps is written from there: engines take no other rows."""
    emb = ours(memory, device, tmp_path)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.05)
    for ids, target in skewed_batches(ROWS, DIM, 5, size=8):
        optimizer.zero_grad()
        squared_loss(emb(ids.to(device)), target.to(device)).backward()
        optimizer.step()
    engine, written = emb.table._engine, []
    scatter = engine.scatter
    monkeypatch.setattr(
        engine, "scatter", lambda planes, ids, rows, *more: (written.extend(rows), scatter(planes, ids, rows, *more))
    )
    first, second = (emb.table.gather(range(ROWS)).clone() for _ in range(2))
    assert {rows.device for rows in written} == {device}
    assert torch.equal(first, second)
    assert torch.equal(second.cpu(), emb.table.torch().cpu())
