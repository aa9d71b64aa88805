"""Compute against transfer: the device is fast, but is it worth the way there and back?

A matrix product in NumPy, on the device, and on the device with copies both ways each time; and a small network trained in
the same three ways. ``python bench/record.py here --only tax``.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult

NOTE = (
    "Copies go from and to page-locked memory. Without CUDA the CPU is the device as well: what is copied then is memory to "
    "memory, and the lines show what copies and the overhead of torch cost, not what a device gains."
)
BY = ("size", "n")
HOST, RESIDENT, COPIES = "NumPy", "on the device", "device, copies both ways"

_MATMUL_SIZES = (50, 100, 200, 400, 800, 1600, 4000)  # 200 is the classic one
_MLP_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_CPU_LIMIT = {"matmul": 1600, "mlp": 1024}  # larger sizes take seconds, and the lines have met
_QUICK_LIMIT = {"matmul": 400, "mlp": 128}
_BATCH, _LR = 256, 1e-2
_SPIN_S = 0.15  # threads of OpenBLAS spin for 0.1 s after a product, and would disturb torch


def series(group: GroupResult) -> str:
    """Return what is computed."""
    return {"matmul": "matrix product, n x n", "mlp": "training step of an MLP, width n"}[group.params["experiment"]]


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each size of both experiments. On the CPU copies go from memory to memory."""
    cuda, found = device.type == "cuda", []
    for experiment, sizes, what, make in (
        ("matmul", _MATMUL_SIZES, "product of two {0:,} x {0:,} matrices", _matmul),
        ("mlp", _MLP_SIZES, f"training step of an MLP, width {{:,}}, batch {_BATCH}", _mlp),
    ):
        limit = _QUICK_LIMIT[experiment] if quick else math.inf if cuda else _CPU_LIMIT[experiment]
        for size in (s for s in sizes if s <= limit):
            params = {"experiment": experiment, "size": size, "cuda": cuda}
            found.append(Group(what.format(size), functools.partial(make, size, device, seed), params))
    return found


def _host(array: np.ndarray, device: torch.device) -> Tensor:
    """Return `array` in host memory, page-locked for CUDA so that copies are as fast as possible."""
    tensor = torch.from_numpy(array.astype(np.float32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _assert_close(got: Any, expected: np.ndarray, what: str, tolerance: float) -> None:
    difference = np.linalg.norm(np.asarray(got, dtype=np.float64) - expected) / np.linalg.norm(expected)
    assert difference < tolerance, f"{what} is {difference:.1e} of its norm off"


def _cases(methods: dict[str, tuple[Callable[[], Any], Callable[[], None]]]) -> list[Case]:
    """Return cases of which those of torch wait, untimed, for NumPy's threads to sleep."""
    return [
        Case(name, run, check, warm=None if name == HOST else lambda: time.sleep(_SPIN_S))
        for name, (run, check) in methods.items()
    ]


def _matmul(size: int, device: torch.device, seed: int) -> list[Case]:
    generator = np.random.default_rng(seed)
    a, b, fetched = (_host(generator.standard_normal((size, size)), device) for _ in range(3))
    there, room = [t.to(device, copy=True) for t in (a, b)], [torch.zeros(size, size, device=device) for _ in range(2)]
    products = [torch.zeros(size, size, device=device) for _ in range(2)]
    in_numpy = np.zeros((size, size), dtype=np.float32)
    expected = a.double().numpy() @ b.double().numpy()

    def copies() -> None:
        for here, host in zip(room, (a, b), strict=True):
            here.copy_(host, non_blocking=True)
        # Blocks, since the host wants the result.
        fetched.copy_(torch.mm(*room, out=products[1]))

    def check(found: Callable[[], Any]) -> Callable[[], None]:
        return lambda: _assert_close(found(), expected, "the product", 1e-5)

    return _cases(
        {
            HOST: (lambda: np.matmul(a.numpy(), b.numpy(), out=in_numpy), check(lambda: in_numpy)),
            RESIDENT: (lambda: torch.mm(*there, out=products[0]), check(lambda: products[0].cpu().numpy())),
            COPIES: (copies, check(lambda: fetched.numpy())),
        }
    )


def _mlp(size: int, device: torch.device, seed: int) -> list[Case]:
    generator = np.random.default_rng(seed)
    batch = [_host(generator.standard_normal((_BATCH, size)), device), _host(generator.standard_normal(_BATCH), device)]
    first = [generator.standard_normal(shape) / size**0.5 for shape in ((size, size), (size, 1))]
    x, y = (t.numpy() for t in batch)
    exact = [w.astype(np.float32).astype(np.float64) for w in first]
    _numpy_step(x.astype(np.float64), y.astype(np.float64), exact)
    weights = [w.astype(np.float32) for w in first]
    resident, copied = _TorchMLP(first, batch, device), _TorchMLP(first, [torch.zeros_like(t) for t in batch], device)

    def check(found: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """Compare the weights after one step with those of the same step in float64."""

        def checked() -> None:
            for got, before, after in zip(found(), first, exact, strict=True):
                # A unit whose sum is nearly zero may round to either side of the kink, and its gradient with it.
                _assert_close(got - before.astype(np.float32), after - before, "the first update", 1e-2)

        return checked

    return _cases(
        {
            HOST: (lambda: _numpy_step(x, y, weights), check(lambda: weights)),
            RESIDENT: (resident.step, check(resident.weights)),
            COPIES: (lambda: copied.step_with_copies(batch), check(copied.weights)),
        }
    )


def _numpy_step(x: np.ndarray, y: np.ndarray, weights: list[np.ndarray]) -> None:
    """Take an SGD step on ``mean((relu(x @ w1) @ w2 - y)**2)``."""
    w1, w2 = weights
    hidden = np.maximum(x @ w1, 0)
    grad_out = (2 / len(y) * ((hidden @ w2)[:, 0] - y))[:, None]
    grad_w2 = hidden.T @ grad_out
    grad_w1 = x.T @ (grad_out @ w2.T * (hidden > 0))
    w1 -= _LR * grad_w1
    w2 -= _LR * grad_w2


class _TorchMLP:
    def __init__(self, first: list[np.ndarray], batch: list[Tensor], device: torch.device) -> None:
        self.layers = [nn.Parameter(torch.from_numpy(w.astype(np.float32)).to(device)) for w in first]
        self.opt = torch.optim.SGD(self.layers, lr=_LR)
        self.batch = [t.to(device, copy=True) for t in batch]

    def step(self) -> Tensor:
        x, y = self.batch
        loss = F.mse_loss((torch.relu(x @ self.layers[0]) @ self.layers[1])[:, 0], y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss

    def step_with_copies(self, batch: list[Tensor]) -> float:
        """Copy the batch from the host, and the loss to it."""
        for there, host in zip(self.batch, batch, strict=True):
            there.copy_(host, non_blocking=True)
        return self.step().item()

    def weights(self) -> list[np.ndarray]:
        return [w.detach().cpu().numpy() for w in self.layers]
