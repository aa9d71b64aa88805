"""Gradients that are clipped or scaled between backward and step, and steps that are skipped for it."""

from __future__ import annotations

import pytest
import torch
from lazy_oracle import (
    Twins,
    one_thread,  # noqa: F401 - a fixture
    pairs,
    squared_loss,
    twins,  # noqa: F401 - a fixture
)
from optimizer_cases import case_named
from torch import nn

# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(twins: Twins, norm_type: float) -> None:
    for ids, target in twins.batches(10):
        twins.zero_grad()
        twins.backward(ids, target)
        ours, dense = (
            nn.utils.clip_grad_norm_(m.parameters(), 2.0, norm_type=norm_type) for m in (twins.ours, twins.dense)
        )
        assert ours > 2.0  # it clips
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=0)
        twins.step()
    twins.assert_same(1e-5)  # the norm is a sum in another order


def test_clip_grad_value(twins: Twins) -> None:
    for ids, target in twins.batches(10):
        twins.zero_grad()
        twins.backward(ids, target)
        for module in (twins.ours, twins.dense):
            nn.utils.clip_grad_value_(module.parameters(), 0.3)
        twins.step()
    twins.assert_same()


def test_clipping_between_two_backwards(twins: Twins) -> None:
    for first, second, _ in pairs(twins):
        twins.zero_grad()
        twins.backward(*first)
        for module in (twins.ours, twins.dense):
            nn.utils.clip_grad_value_(module.parameters(), 0.3)
        twins.backward(*second)
        twins.step()
    twins.assert_same(1e-6)


# --- scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sgd-momentum-loop", "adamw-loop", "adamw-foreach", "rprop", "adam-fused", "adamw-fused"]
)
@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "clipped"])
def test_grad_scaler_with_skipped_steps(name: str, unscale: bool) -> None:
    twins = Twins(case_named(name).make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5) for _ in range(2)]
    for step, (ids, target) in enumerate(twins.batches(16)):
        twins.zero_grad()
        factor = float("inf") if step in (4, 9, 10) else 1.0
        for scaler, module, opt in zip(scalers, (twins.ours, twins.dense), twins.optimizers, strict=True):
            scaler.scale(squared_loss(module(ids), target) * factor).backward()
            if unscale:
                scaler.unscale_(opt)
                nn.utils.clip_grad_value_(module.parameters(), 0.5)
        scalers[0].step(twins.opt)
        twins.oracle.step(lambda: scalers[1].step(twins.oracle.optimizer))
        for scaler in scalers:
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 1024.0
    twins.assert_same()
    state = twins.opt.state[twins.ours.weight]
    if "step" in state:
        assert float(state["step"]) == 13  # three were skipped


@pytest.mark.parametrize("name", ["sgd-momentum-loop", "adam-fused", "rprop"])
def test_grad_scaler_skips_the_very_first_step(name: str) -> None:
    twins = Twins(case_named(name).make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    before = twins.ours.table.torch().clone()
    for step, (ids, target) in enumerate(twins.batches(5)):
        twins.zero_grad()
        for scaler, module in zip(scalers, (twins.ours, twins.dense), strict=True):
            scaler.scale(squared_loss(module(ids), target) * (float("nan") if step == 0 else 1.0)).backward()
        scalers[0].step(twins.opt)
        twins.oracle.step(lambda: scalers[1].step(twins.oracle.optimizer))
        for scaler in scalers:
            scaler.update()
        if step == 0:
            assert torch.equal(twins.ours.table.torch(), before)
    twins.assert_same()
