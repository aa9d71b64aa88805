"""Steps by the kernel of step.cu, run on the CPU: the bits of torch's own optimizers, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import cpu_kernels
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

import speedtransfer as st
from speedtransfer.engines import HostEngine
from speedtransfer.errors import DeviceError
from speedtransfer.optim import fused_step
from speedtransfer.optim.fused_step import SWITCH

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: SGD(params, 0.1),
    "sgd-decay": lambda params: SGD(params, 0.1, weight_decay=0.03),
    "sgd-maximize": lambda params: SGD(params, 0.1, weight_decay=0.03, maximize=True),
    "sgd-momentum": lambda params: SGD(params, 0.1, momentum=0.9),
    "sgd-dampening": lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.4, weight_decay=0.03, maximize=True),
    "sgd-nesterov": lambda params: SGD(params, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd-integers": lambda params: SGD(params, 1, momentum=1, dampening=1, weight_decay=1),
    "adam": lambda params: Adam(params, 0.01),
    "adam-decay": lambda params: Adam(params, 0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1, maximize=True),
    "adam-amsgrad": lambda params: Adam(params, 0.01, betas=(0.3, 0.9), amsgrad=True),
    "adam-no-betas": lambda params: Adam(params, 0.01, betas=(0.0, 0.0), eps=0.1),
    "adam-half": lambda params: Adam(params, 0.01, betas=(0.5, 0.5)),
    "adamw": lambda params: AdamW(params, 0.01),
    "adamw-decay": lambda params: AdamW(params, 0.01, betas=(0.95, 0.97), weight_decay=0.3, amsgrad=True, maximize=True),
}
LAUNCHES = [(1, 1), (2, 32), (3, 7), (5, 64)]
NUM_ROWS = 23

# torch's CPU code without vectors, which it takes on a machine that has none, does not fuse products with sums.
fuses = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no vectors here")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Run the kernel on the CPU, in launches of odd sizes; return these."""
    kernels, made = cpu_kernels(), list[tuple[int, int]]()

    def launch(num_items: int, source: str, name: str, device: torch.device, packed: np.ndarray) -> None:
        assert (source, num_items > 0) == ("step.cu", True)
        made.append(LAUNCHES[len(made) % len(LAUNCHES)])
        kernels.launch(name, *made[-1], packed, backwards=bool(len(made) % 3))

    monkeypatch.setattr(fused_step, "launch_over", launch)
    return made


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round square roots as CUDA and IEEE do: torch takes those of the MKL, whose last bit may be another."""
    monkeypatch.setattr(Tensor, "sqrt", lambda values: torch.from_numpy(np.sqrt(values.detach().numpy())))


@pytest.fixture
def switched_on(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let tables on the CPU take the fused way; return the launches so far, those of the check left out."""
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(HostEngine, "runs_kernels", True)
    monkeypatch.setattr(HostEngine, "update", lambda self, queue: queue(), raising=False)
    assert fused_step._check(torch.device("cpu"))
    monkeypatch.setattr(fused_step, "is_trusted", lambda *args: True)
    launches.clear()
    return launches


def bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(torch.int32)


def state_of(optimizer: Optimizer, param: Any) -> dict[str, Any]:
    return dict(optimizer.state.get(param, {}))


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(bits(ours[name]), bits(value)), name


@fuses
@pytest.mark.parametrize("width", [1, 4, 7, 64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
class TestKernel:
    """The kernel against torch, from any values of weights and state."""

    def test_many_steps(self, make: Make, width: int, launches: list[Any], exact_roots: None) -> None:
        torch.manual_seed(width)
        dense = nn.Parameter(torch.randn(NUM_ROWS, width))
        optimizer = make([dense])
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        planes: dict[str, Tensor] = {}
        # Rows further apart than they are wide, and not where lanes of 16 bytes could be moved.
        stored = torch.full((NUM_ROWS, width + 3), 7.0)
        weight = stored[:, 1 : width + 1]
        weight.copy_(dense.detach())
        for number in range(40):
            dense.grad = torch.randn(NUM_ROWS, width) * 10.0 ** torch.randint(-12, 4, (NUM_ROWS, 1))
            if number == 0:
                optimizer.step()
                weight.copy_(dense.detach())
                planes = {name: v.clone() for name, v in state_of(optimizer, dense).items() if v.dim()}
            else:
                (group,) = optimizer.param_groups
                plan = fused_step._PLANS[type(optimizer)](group, optimizer.state[dense], dict.fromkeys(planes, ""))
                assert plan is not None
                ids = torch.tensor([*torch.randperm(NUM_ROWS), NUM_ROWS, NUM_ROWS, -1])
                exists = ids.clamp(0, NUM_ROWS - 1)
                rows, grad = weight[exists], dense.grad[exists]
                padding = rows[NUM_ROWS:].clone()
                fused_step._queue(plan, ids, grad, rows, weight, list(planes.values()))
                optimizer.step()
                assert torch.equal(bits(rows[:NUM_ROWS]), bits(weight[ids[:NUM_ROWS]]))
                assert torch.equal(rows[NUM_ROWS:], padding)
            schedule.step()
            assert torch.equal(bits(weight), bits(dense)), number
            for name, plane in planes.items():
                assert torch.equal(bits(plane), bits(optimizer.state[dense][name])), (number, name)
        assert (stored[:, 0] == 7).all()
        assert (stored[:, width + 1 :] == 7).all()
        assert len(launches) == 39
