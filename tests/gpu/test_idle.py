"""Exact idle rows on a CUDA device that skips steps, without a wait for it. Every optimizer: test_training.py."""

import math

import pytest
import torch
from lazy_oracle import skewed_batches, squared_loss
from optimizer_cases import case_named
from torch import nn

from gpu.tools import embedding_in

ROWS, DIM = 60, 16


FUSED = [case_named(name) for name in ("adamw", "adam-amsgrad", "adam-weight-decay", "sgd-momentum-weight-decay")]


@pytest.mark.parametrize(("memory", "trusted"), [("pinned", True), ("device", True), ("device", False)])
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_steps_that_a_scaler_skips_on_the_device(case, memory, trusted, device, tmp_path, monkeypatch):
    """A row may be read before the host knows of them; a full batch may step the rows in place."""
    if not trusted:
        for module in ("missed", "replay"):
            monkeypatch.setattr(f"speedtransfer.idle.{module}.is_trusted", lambda *_: False)
    torch.manual_seed(3)
    ours = embedding_in(memory, tmp_path, device, ROWS, DIM, idle="exact")
    modules = ours, nn.Embedding(ROWS, DIM).to(device)
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
