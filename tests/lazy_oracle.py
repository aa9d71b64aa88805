"""What training lazily means, told by torch alone: dense embeddings whose idle rows are put back after every step.

A dense optimizer changes rows that no batch touched (momentum, weight decay). The oracle runs it on the full
``nn.Embedding`` and then restores those rows and their state. What all rows share (`step`, `mu_product`, ...) stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedtransfer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Arrays this small run three times slower on two threads. Acts on every module that imports it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors_in(container: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state by name, those in lists and dicts too: ``"buffers.0"``."""
    found = {}
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, dict | list | tuple):
            found.update(tensors_in(value, f"{prefix}{key}."))
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
    return found


def start_value(key: str, group: dict[str, Any], weight: Tensor) -> float | Tensor:
    """Return what the state `key` of a row is before anything has touched that row."""
    if key == "step_size":  # Rprop
        smallest, largest = group["step_sizes"]
        # Rprop lifts a step size below its smallest to it: zero does as well, and is what the probe then prefers.
        return min(float(group["lr"]), largest) if float(group["lr"]) > smallest else 0.0
    if key == "sum":  # Adagrad
        return float(group["initial_accumulator_value"])
    if key in ("ax", "slow"):  # an average of the weights, of one so far
        return weight
    return 0.0


class LazyOracle:
    """Dense embeddings and the optimizer that trains them, lazily.

    Parameters
    ----------
    optimizer : Optimizer
        Over the weights of `modules`, and over anything else.
    modules : nn.Embedding or nn.EmbeddingBag
        Those whose idle rows stay put.
    """

    def __init__(self, optimizer: Optimizer, *modules: nn.Module) -> None:
        self.optimizer, self.modules = optimizer, modules
        self._touched: dict[nn.Module, set[int]] = {module: set() for module in modules}
        for module in modules:
            module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:  # a batch touches its rows when backward comes by
            ids = args[0].flatten().tolist()
            output.register_hook(lambda grad: self._touched[module].update(ids))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for touched in self._touched.values():
            touched.clear()

    @torch.no_grad()
    def step(self, step: Callable[[], Any] | None = None) -> Any:
        """Run `step` (default: the optimizer's own) and put idle rows back."""
        before = {module: (module.weight.clone(), self._state(module)) for module in self.modules}
        with torch.enable_grad():  # a closure runs backward
            result = (step or self.optimizer.step)()
        for module, (weight, state) in before.items():
            self._put_back(module, weight, state)
        return result

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self._rows(module).items()}

    def _rows(self, module: nn.Module) -> dict[str, Tensor]:
        state = tensors_in(self.optimizer.state.get(module.weight, {}))
        return {k: v for k, v in state.items() if v.dim() > 0 and v.shape[0] == module.weight.shape[0]}

    def _put_back(self, module: nn.Module, weight: Tensor, state: dict[str, Tensor]) -> None:
        idle = torch.ones(weight.shape[0], dtype=torch.bool)
        idle[list(self._touched[module])] = False
        module.weight[idle] = weight[idle]
        for key, value in self._rows(module).items():
            value[idle] = state.get(key, self._start(module, key, value, weight))[idle].to(value.dtype)

    def _start(self, module: nn.Module, key: str, value: Tensor, weight: Tensor) -> Tensor:
        """Return what the state `key` of untouched rows is, ``(num_rows, *tail)``."""
        group = next(g for g in self.optimizer.param_groups if any(p is module.weight for p in g["params"]))
        start = start_value(key, group, weight)
        return start if isinstance(start, Tensor) else torch.full_like(value, start)


# --- comparing ----------------------------------------------------------------------------------------------------------


def assert_same_weights(ours: nn.Module, dense: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(ours.table.torch(), dense.weight.detach(), rtol=tolerance, atol=tolerance)


def assert_same_state(
    ours: Optimizer, our_module: nn.Module, dense: Optimizer, dense_module: nn.Module, tolerance: float = 0.0
) -> None:
    """Compare full planes, shared scalars and the names of both."""
    state, expected = ours.state.get(our_module.weight, {}), dense.state.get(dense_module.weight, {})
    ours_in, theirs = tensors_in(state), tensors_in(expected)
    assert (set(state), set(ours_in)) == (set(expected), set(theirs))
    for key, value in theirs.items():
        torch.testing.assert_close(
            ours_in[key], value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"state {key}: {text}"
        )
    for key, value in expected.items():
        assert type(state[key]) is type(value)
        assert isinstance(value, Tensor | list | tuple | dict) or state[key] == value, key


def assert_same(
    ours: Optimizer, our_module: nn.Module, oracle: LazyOracle, dense_module: nn.Module, tolerance: float = 0.0
) -> None:
    assert_same_weights(our_module, dense_module, tolerance)
    assert_same_state(ours, our_module, oracle.optimizer, dense_module, tolerance)


# --- batches ------------------------------------------------------------------------------------------------------------


def skewed_batches(
    num_rows: int, dim: int, steps: int, seed: int = 0, size: int = 24, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """Return (ids, target): a few rows in every batch and many times, most seldom, some late, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(steps):
        reach = num_rows - 1 if step >= steps // 3 else num_rows // 2  # rows that nothing touches at first
        ids = (torch.rand(size, generator=generator) ** 3 * reach).long().clamp_(max=reach - 1)
        target = torch.randn(size, dim, generator=generator).to(dtype)
        batches.append((ids.view(4, -1), target.view(4, -1, dim)))
    return batches


# Our modules with idle rows as the oracle has them.
LAZY = SimpleNamespace(
    Embedding=functools.partial(speedtransfer.Embedding, idle="lazy"),
    EmbeddingBag=functools.partial(speedtransfer.EmbeddingBag, idle="lazy"),
)


def both(num_rows: int = 12, dim: int = 5, kind: str = "Embedding", **options: Any) -> tuple[Any, Any]:
    """Return one of our modules and the same one of torch."""
    torch.manual_seed(2)
    ours = getattr(LAZY, kind)(num_rows, dim, **options)
    torch.manual_seed(2)
    return ours, getattr(nn, kind)(num_rows, dim, **options)


class Pair:
    """A module of ours and the same one of torch, each with the same kind of optimizer, fed the same batches."""

    size = 24
    ours: Any
    dense: Any
    opt: Any
    dense_opt: Any

    def __init__(self, make: Callable[[Any], Optimizer], ours: nn.Module, dense: nn.Module) -> None:
        self.ours, self.dense = ours, dense
        self.opt, self.dense_opt = (make(module.parameters()) for module in (ours, dense))

    @property
    def modules(self) -> tuple[Any, Any]:
        return self.ours, self.dense

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        return self.opt, self.dense_opt

    def schedulers(self, make: Callable[[Optimizer], Any]) -> list[Any]:
        return [make(optimizer) for optimizer in self.optimizers]

    def batches(self, steps: int = 30, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        weight = self.dense.weight
        return skewed_batches(*weight.shape, steps, seed, self.size, weight.dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, ids: Tensor, target: Tensor) -> None:
        for module in self.modules:
            squared_loss(module(ids), target).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, batches: list[tuple[Tensor, Tensor]], *schedulers: Any) -> None:
        for ids, target in batches:
            self.zero_grad()
            self.backward(ids, target)
            self.step()
            for scheduler in schedulers:
                scheduler.step()


class Twins(Pair):
    """An embedding of ours with lazy idle rows, and that of torch, whose optimizer the oracle steps."""

    def __init__(
        self, make: Callable[[list[Any]], Optimizer], num_rows: int = 41, dim: int = 16, **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.ours = speedtransfer.Embedding(num_rows, dim, idle="lazy", **options)
        torch.manual_seed(3)
        self.dense = nn.Embedding(num_rows, dim, **options)
        self.num_rows, self.dim = num_rows, dim
        self.make = make
        self.opt, self.oracle = make([self.ours.weight]), LazyOracle(make([self.dense.weight]), self.dense)

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        return self.opt, self.oracle.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none=set_to_none)
        self.oracle.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.opt.step()
        self.oracle.step()

    def assert_same(self, tolerance: float = 0.0) -> None:
        assert_same(self.opt, self.ours, self.oracle, self.dense, tolerance)


def squared_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.view_as(output)).square().sum() / 4


def dense_grad(module: nn.Module) -> Tensor:
    """Return the gradient deposited on one of our modules as the dense one, ``(num_rows, dim)``."""
    grad = module.weight.grad
    return torch.zeros_like(module.weight) if grad is None else grad.to_dense()


def assert_alike(ours: nn.Module, dense: nn.Module, *arguments: Any, **named: Any) -> None:
    """Look up and go back on both: the same output, gradient and table, bit for bit."""
    out, expected = ours(*arguments, **named), dense(*arguments, **named)
    assert (out.shape, out.dtype, out.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if expected.requires_grad:
        torch.manual_seed(9)
        weight = torch.randn(out.shape).to(out.dtype)
        out.backward(weight)
        expected.backward(weight)
        torch.testing.assert_close(dense_grad(ours), dense.weight.grad.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(ours.table.torch(), dense.weight.detach(), rtol=0, atol=0, equal_nan=True)


# Optimizers of every kind of state and implementation, for the tests of how a training loop may go.
FLOW_NAMES = ("sgd-momentum", "adamw-fused", "adagrad", "rprop", "nadam")
