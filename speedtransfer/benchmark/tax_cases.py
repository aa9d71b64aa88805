"""The cases of suite `tax`: a matrix product and a training step of an MLP, in NumPy, on the device, and with copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.measure import Case

HOST, RESIDENT, COPIES = "NumPy", "on the device", "device, copies both ways"
BATCH, _LR = 256, 1e-2
_SPIN_S = 0.15


def _host(array: np.ndarray, device: torch.device) -> Tensor:
    """Return `array` as a tensor of host memory, page-locked for CUDA: the copies must have every chance."""
    tensor = torch.from_numpy(array.astype(np.float32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _close(got: Any, expected: np.ndarray, what: str, tolerance: float) -> None:
    """Raise AssertionError where `got` is further from `expected` than that share of its norm."""
    difference = np.linalg.norm(np.asarray(got, dtype=np.float64) - expected) / np.linalg.norm(expected)
    assert difference < tolerance, f"{what} is {difference:.1e} of its norm off"


class _Cores:
    """Keeps NumPy's threads out of torch's figures: those of OpenBLAS wait for more work at full speed, for 0.1 s.

    The first run of a case after one of another, which is not timed, waits for them.
    """

    def __init__(self) -> None:
        self._busy = True

    def busy_after(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run`, remembering that it has left threads at work."""

        def running() -> Any:
            self._busy = True
            return run()

        return running

    def free_before(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run`, which starts when such threads sleep."""

        def running() -> Any:
            if self._busy:
                time.sleep(_SPIN_S)
                self._busy = False
            return run()

        return running


# --- a matrix product ---------------------------------------------------------------------------------------------------


def matmul(size: int, device: torch.device, seed: int) -> list[Case]:
    """Return the three ways to multiply matrices ``(size, size)``."""
    generator = np.random.default_rng(seed)
    a, b, fetched = (_host(generator.standard_normal((size, size)), device) for _ in range(3))
    there, room = [t.to(device, copy=True) for t in (a, b)], [torch.zeros(size, size, device=device) for _ in range(2)]
    products = [torch.zeros(size, size, device=device) for _ in range(2)]
    in_numpy = np.zeros((size, size), dtype=np.float32)
    expected = a.double().numpy() @ b.double().numpy()

    def copies() -> None:
        for here, host in zip(room, (a, b), strict=True):
            here.copy_(host, non_blocking=True)
        fetched.copy_(torch.mm(*room, out=products[1]))  # waits for it: the host wants the result

    def case(name: str, run: Callable[[], Any], found: Callable[[], np.ndarray]) -> Case:
        return Case(name, run, lambda: _close(found(), expected, "the product", 1e-5))

    cores = _Cores()
    return [
        case(HOST, cores.busy_after(lambda: np.matmul(a.numpy(), b.numpy(), out=in_numpy)), lambda: in_numpy),
        case(RESIDENT, cores.free_before(lambda: torch.mm(*there, out=products[0])), lambda: products[0].cpu().numpy()),
        case(COPIES, cores.free_before(copies), lambda: fetched.numpy()),
    ]


# --- a small network ----------------------------------------------------------------------------------------------------


def mlp(size: int, device: torch.device, seed: int) -> list[Case]:
    """Return the three ways to train a network with a hidden layer of `size` units."""
    generator = np.random.default_rng(seed)
    batch = [_host(generator.standard_normal((BATCH, size)), device), _host(generator.standard_normal(BATCH), device)]
    first = [generator.standard_normal(shape) / size**0.5 for shape in ((size, size), (size, 1))]
    x, y = (t.numpy() for t in batch)
    exact = [w.astype(np.float32).astype(np.float64) for w in first]
    numpy_step(x.astype(np.float64), y.astype(np.float64), exact)

    weights = [w.astype(np.float32) for w in first]
    resident, copied = _TorchMLP(first, batch, device), _TorchMLP(first, [torch.zeros_like(t) for t in batch], device)

    def check(found: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """Compare the weights after one step with those of the same step in float64."""

        def compare() -> None:
            for got, before, after in zip(found(), first, exact, strict=True):
                # A unit whose sum is nearly zero may round to either side of the kink, and its gradient with it.
                _close(got - before.astype(np.float32), after - before, "the first update", 1e-2)

        return compare

    cores = _Cores()
    return [
        Case(HOST, cores.busy_after(lambda: numpy_step(x, y, weights)), check(lambda: weights)),
        Case(RESIDENT, cores.free_before(resident.step), check(resident.weights)),
        Case(COPIES, cores.free_before(lambda: copied.step_with_copies(batch)), check(copied.weights)),
    ]


def numpy_step(x: np.ndarray, y: np.ndarray, weights: list[np.ndarray]) -> float:
    """Take an SGD step on ``mean((relu(x @ w1) @ w2 - y)**2)``, written out, and return the loss before it."""
    w1, w2 = weights
    hidden = np.maximum(x @ w1, 0)
    error = (hidden @ w2)[:, 0] - y
    loss = float(np.mean(error**2))
    grad_out = (2 / len(y) * error)[:, None]
    grad_w2 = hidden.T @ grad_out
    grad_w1 = x.T @ (grad_out @ w2.T * (hidden > 0))
    w1 -= _LR * grad_w1
    w2 -= _LR * grad_w2
    return loss


class _TorchMLP:
    """The network in torch, trained as one does, with a batch on the device."""

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
        """Fetch the batch from the host, and the loss to it."""
        for there, host in zip(self.batch, batch, strict=True):
            there.copy_(host, non_blocking=True)
        return self.step().item()

    def weights(self) -> list[np.ndarray]:
        return [w.detach().cpu().numpy() for w in self.layers]
