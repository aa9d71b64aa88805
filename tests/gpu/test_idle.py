"""Exact idle rows on a CUDA device: as on the host, also where the device skips steps, and without a wait for it."""

import math

import pytest
import torch
from cases import take_step
from lazy_oracle import skewed_batches, squared_loss
from optimizer_cases import ALL, COUPLED, case_named
from torch import nn
from torch.optim import lr_scheduler

from gpu.tools import embedding_in

ROWS, DIM = 60, 16


def train(module, make, device, steps=120, dtype=torch.float32):
    optimizer = make(module.parameters())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / steps))
    for ids, target in skewed_batches(ROWS, DIM, steps, size=8, dtype=dtype):
        take_step(optimizer, squared_loss(module(ids.to(device)), target.to(device)))
        schedule.step()
    return module.state_dict()["weight"].cpu().clone(), optimizer.state_dict()["state"].get(0, {})


def ours(memory, device, folder, **options):
    return embedding_in(memory, folder, device, ROWS, DIM, **{"idle": "exact", **options})


def without_kernels(monkeypatch):
    for module in ("missed", "replay"):
        monkeypatch.setattr(f"speedtransfer.idle.{module}.is_trusted", lambda *_: False)


WITH_KERNELS = [pytest.param(case, True, id=str(case)) for case in (*ALL, *COUPLED)]
WITH_TORCH = [pytest.param(case, False, id=f"{case}-torch") for case in (ALL[5], ALL[7], ALL[12], COUPLED[0])]


@pytest.mark.parametrize(("case", "trusted"), WITH_KERNELS + WITH_TORCH)
def test_every_optimizer_as_on_the_cpu(case, trusted, device, tmp_path, monkeypatch):
    """Batches repeat ids, so that rows of padding follow the unique ones."""
    if not trusted:
        without_kernels(monkeypatch)
    found = []
    for where, memory in (("cpu", "pageable"), (device, "pinned")):
        module = ours(memory, where, tmp_path)
        start = module.weight.detach().cpu().clone()
        found.append(train(module, case.make, where, steps=25))
    moved = float((found[0][0] - start).abs().max())
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-4 * moved)
    for key, value in found[0][1].items():
        if isinstance(value, torch.Tensor) and value.dim():
            torch.testing.assert_close(found[1][1][key].cpu(), value, rtol=0, atol=1e-4 * float(value.abs().max()))


FUSED = [case_named(name) for name in ("adamw", "adam-amsgrad", "adam-weight-decay", "sgd-momentum-weight-decay")]


@pytest.mark.parametrize(("memory", "trusted"), [("pinned", True), ("device", True), ("device", False)])
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_steps_that_a_scaler_skips_on_the_device(case, memory, trusted, device, tmp_path, monkeypatch):
    """A row may be read before the host knows of them; a full batch may step the rows in place."""
    if not trusted:
        without_kernels(monkeypatch)
    torch.manual_seed(3)
    modules = ours(memory, device, tmp_path), nn.Embedding(ROWS, DIM).to(device)
    with torch.no_grad():
        modules[1].weight.copy_(modules[0].table.torch())
    optimizers = [case.make(module.parameters(), fused=True) for module in modules]
    scalers = [torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=5) for _ in modules]
    everything = torch.arange(ROWS, device=device)
    # Of torch's SGD a first step that is skipped leaves a momentum that nobody has set.
    skipped = {0 if case.kind is not torch.optim.SGD else 1, 3, 4, 21, 22, 23, 39}
    for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, 40, size=8)):
        ids, target = ids.to(device), target.to(device)
        if number % 11 == 10:
            ids, target = everything, target.new_zeros(ROWS, DIM)
        for module, optimizer, scaler in zip(modules, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = squared_loss(module(ids), target) * (math.inf if number in skipped else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if number % 7 == 2:
            with torch.no_grad():
                one, other = (module(everything) for module in modules)
            torch.testing.assert_close(one, other, rtol=0, atol=2e-4)
        if number == 30:
            modules[0].table.torch()  # writes rows that have caught up
    ours_here = modules[0].cpu().table.torch()  # the CPU cannot ask the device about the last step
    torch.testing.assert_close(ours_here, modules[1].weight.detach().cpu(), rtol=0, atol=2e-4)
