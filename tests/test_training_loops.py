"""Each loop of `training_loops` on a table and on ``nn.Embedding``: lazily, exactly, and with sparse gradients."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_oracle import Twins, exact, sparse, squared_loss, tensors_in
from optimizer_cases import case_named
from third_party import TAKERS
from torch import Tensor, nn
from training_loops import PROGRAMS, Program

import speedtransfer

# torch warns once a process that it does not check what sparse tensors hold.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
# Every kind of state and implementation.
LAZY = ("sgd-momentum", "adamw-fused", "adagrad", "rprop", "nadam", "adamw-foreach", "adam-fused")


def run(program: Program, module: Any, opt: Any, batches: list[tuple[Tensor, Tensor]], oracle: Any = None) -> list[Any]:
    """Run a program on one side and return what it saw; `oracle` makes the steps of the dense side of lazy ones."""

    def loss(ids: Tensor, target: Tensor) -> Tensor:
        return squared_loss(module(ids), target)

    def step(function: Callable[[], Any] | None = None) -> Any:
        return (function or opt.step)() if oracle is None else oracle.step(function)

    def train(some: list[tuple[Tensor, Tensor]]) -> None:
        for batch in some:
            zero_grad()
            loss(*batch).backward()
            step()

    def put(index: list[int]) -> None:
        if isinstance(module, speedtransfer.Embedding):
            module.table[index] = torch.ones(len(index), module.embedding_dim, device=device)
        else:
            module.weight.data[index] = 1.0

    def fail() -> None:
        """Raise after the work of a step: rows and their state stay, and what all rows share has counted it, as in torch."""
        if isinstance(module, speedtransfer.Embedding):
            opt._optimizer_step_code = lambda: [].pop()  # torch calls it before the hooks after a step
            with pytest.raises(IndexError, match="pop from empty list"):
                opt.step()
            del opt._optimizer_step_code
            (weight,) = opt.param_groups[0]["params"]
            assert weight.shape == module.weight.shape
        elif opt.state:
            planes = [module.weight.data, *(it for it in tensors_in(opt.state[module.weight]).values() if it.dim())]
            before = [plane.clone() for plane in planes]
            opt.step()
            for plane, values in zip(planes, before, strict=True):
                plane.copy_(values)

    device = module.weight.device
    zero_grad = opt.zero_grad if oracle is None else oracle.zero_grad
    names = {
        "collections": collections,
        "copy": copy,
        "torch": torch,
        "nn": nn,
        "math": math,
        "seen": list[Any](),
        "batches": batches,
        "module": module,
        "opt": opt,
        "device": device.type,
    }
    names |= {"loss": loss, "step": step, "train": train, "put": put, "fail": fail, "zero_grad": zero_grad}
    names["threes"] = list(zip(batches[::3], batches[1::3], batches[2::3], strict=True))
    names["empty"] = (
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, module.embedding_dim, device=device),
    )
    exec(compile(program.code, f"<{program}>", "exec"), names)
    return names["seen"]


def compare(program: Program, pair: Any, tolerance: float | None, oracle: Any = None) -> None:
    """Run a program on both sides of a pair, and compare what was seen, weights and state."""
    modules, batches = pair.modules, pair.batches(24)
    ours, dense = pair.optimizers
    seen = run(program, modules[0], ours, batches), run(program, modules[1], dense, batches, oracle)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)
    pair.assert_same(tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_lazily(program: Program, name: str) -> None:
    """As torch with idle rows put back after each step: bit for bit, where sums are made in the same order."""
    twins = Twins(case_named(name).make)
    compare(program, twins, program.rounding, twins.oracle)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adamw-fused", "adamw", "sgd-momentum-weight-decay"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_exactly(program: Program, name: str) -> None:
    compare(program, exact(case_named(name)), None)


# Those of `third_party` take no closure.
SPARSE = [
    (program, name)
    for program in PROGRAMS
    for name in TAKERS
    if not program.dense and ("closure" not in program.code or name in ("sparse-adam", "sgd", "adagrad"))
]


@pytest.mark.sweep("program", "name")
@pytest.mark.parametrize(("program", "name"), SPARSE, ids=str)
def test_with_sparse_gradients(program: Program, name: str) -> None:
    compare(program, sparse(TAKERS[name][0]), program.rounding * 10 or None)


def test_gradients_written_by_hand_equal_autograd() -> None:
    for name in LAZY[:5]:
        twins = Twins(case_named(name).make)
        for ids, target in twins.batches(8):
            twins.zero_grad()
            squared_loss(twins.dense(ids), target).backward()
            active = twins.ours.activate(ids)
            with torch.no_grad():
                flat = ((active.rows[active.inverse] - target) * 0.25 * 2).view(-1, twins.dim)
                active.add_grad(torch.zeros_like(active.rows).index_add_(0, active.inverse.flatten(), flat))
            twins.step()
        twins.assert_same(1e-6)
