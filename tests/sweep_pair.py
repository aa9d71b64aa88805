"""An embedding of ours and that of torch, trained alike by an optimizer that nobody here knows, and compared."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lazy_oracle import LazyOracle, skewed_batches, squared_loss, tensors_in
from torch import Tensor, nn
from torch.optim import Optimizer

import speedtransfer
from speedtransfer.optim.probe.trial import FirstStates, words

ROWS, DIM, STEPS, LOOK_EVERY = 60, 8, 300, 25
# Of the longest way that a weight went, and of a state's largest value. Rounding grows with the steps, the more where signs
# and quotients of small numbers decide.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
# State that starts as a copy of the weights, and is first set to memory that holds anything.
COPIES = ("slow_buffer",)
Make = Callable[[nn.Module], Optimizer]


class SweepOracle(LazyOracle):
    """Learns what an untouched row starts from by what the optimizer first sets: of one without a gradient."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer, module)
        holder = optimizer
        while isinstance(getattr(type(holder), "state", None), property):  # that of the optimizer which it wraps
            holder = holder.optimizer
        holder.state = FirstStates(holder.state)

    def _start(self, module: nn.Module, key: str, value: Tensor, weight: Tensor) -> Tensor:
        first = tensors_in(getattr(self.optimizer.state[module.weight], "first", {}))
        made = weight if key in COPIES else first.get(key)
        return made if made is not None and made.shape == value.shape else torch.zeros_like(value)


class Side:
    """A module and its optimizer."""

    def __init__(
        self, module: nn.Module, make: Make, states: tuple[Any, Any] | None = None, lazily: bool = True
    ) -> None:
        self.module = module
        if states is not None:
            module.load_state_dict(states[0])
        self.opt = make(module)
        if states is not None:
            self.opt.load_state_dict(states[1])
        if hasattr(self.opt, "train"):
            self.opt.train()
        self.oracle = SweepOracle(self.opt, module) if lazily and type(module) is nn.Embedding else None

    def states(self) -> tuple[Any, Any]:
        return copy.deepcopy(self.module.state_dict()), copy.deepcopy(self.opt.state_dict())

    def step(self, ids: Tensor, target: Tensor, style: str) -> None:
        def loss() -> Tensor:
            value = squared_loss(self.module(ids), target)
            value.backward(create_graph=style == "create_graph")
            return value

        (self.oracle or self.opt).zero_grad()
        number = float(loss().detach())
        closure = {"closure": loss, "loss": lambda: number}.get(style)
        step = self.opt.step if closure is None else lambda: self.opt.step(closure)
        self.oracle.step(step) if self.oracle else step()

    @property
    def weight(self) -> Tensor:
        table = getattr(self.module, "table", None)
        return self.module.weight.detach() if table is None else table.torch()

    @property
    def state(self) -> dict[Any, Any]:
        return self.opt.state.get(self.module.weight, {})


class Pair:
    """Ours and the same in torch, under one kind of optimizer."""

    def __init__(self, make: Make, dtype: torch.dtype, whole: bool) -> None:
        self.make, self.dtype, self.whole = make, dtype, whole
        with _dense_errors():
            self.dense = self._dense(None)
        self.ours = self._ours(None)

    def _dense(self, states: Any) -> Side:
        torch.manual_seed(3)
        return Side(nn.Embedding(ROWS, DIM, dtype=self.dtype), self.make, states, lazily=not self.whole)

    def _ours(self, states: Any) -> Side:
        torch.manual_seed(3)
        idle = "exact" if self.whole else "lazy"
        return Side(speedtransfer.Embedding(ROWS, DIM, dtype=self.dtype, idle=idle), self.make, states)

    def swap_states(self) -> None:
        """Let each side go on from the state dicts of the other."""
        with _dense_errors():
            theirs = self.dense.states()
            self.dense.opt.load_state_dict(copy.deepcopy(theirs[1]))  # or it cannot load at all
        mine = self.ours.states()
        self.ours, self.dense = self._ours(theirs), self._dense(mine)


def run(make: Make, dtype: torch.dtype, style: str, whole: bool = False) -> str | None:
    """Return how ours and the oracle differ; None: they do not.

    Raises
    ------
    OptimizerError
        Ours refuses.
    DenseError
        The optimizer fails on ``nn.Embedding``.
    """
    torch.manual_seed(0)
    pair = Pair(make, dtype, whole)
    start = pair.dense.weight.clone()
    for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, STEPS, size=12, dtype=dtype)):
        with _dense_errors():
            pair.dense.step(ids, target, style)
        pair.ours.step(ids, target, style)
        if not pair.dense.weight.isfinite().all():
            raise DenseError("its weights become infinite or NaN", final=True)
        if number % LOOK_EVERY == LOOK_EVERY - 1 or number == 0:
            what = difference(pair.ours, pair.dense, start, TOLERANCE[dtype])
            if what is not None:
                return f"{what} at step {number + 1}"
        if number == STEPS // 2:
            pair.swap_states()
    if torch.equal(pair.dense.weight, start):
        raise DenseError("it moves no weight", final=True)
    return None


class DenseError(Exception):
    """The optimizer fails on nn.Embedding; `final`: however its step is called."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@contextlib.contextmanager
def _dense_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DenseError(words(error)) from error


def difference(ours: Side, dense: Side, start: Tensor, tolerance: float) -> str | None:
    """Return what differs: the weights, or a tensor of state; containers, names, shapes and dtypes too."""
    moved = (dense.weight - start).abs().nan_to_num(0, 0, 0).max()
    if not _close(ours.weight, dense.weight, tolerance * float(moved)):
        gap = float((ours.weight - dense.weight).abs().max())
        return f"weights by {gap:.1e}, having moved by {float(moved):.1e},"
    mine, theirs = tensors_in(ours.state), tensors_in(dense.state)
    if mine.keys() != theirs.keys():
        return f"the names of state ({', '.join(sorted(mine.keys() ^ theirs.keys()))})"
    for name, value in theirs.items():
        if mine[name].shape != value.shape:
            return f"the shape of state {name!r} ({tuple(mine[name].shape)}, not {tuple(value.shape)})"
        size = float(value.double().abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
        if not _close(mine[name], value, tolerance * size):
            return f"state {name!r}"
    return _containers(ours.state, dense.state)


def _close(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    value, expected = value.double(), expected.double()
    same = ((value - expected).abs() <= tolerance) | (value == expected) | (value.isnan() & expected.isnan())
    return bool(same.all())


def _containers(mine: Any, theirs: Any, path: str = "") -> str | None:
    """Return where the state of one is a list, tuple, dict or number, and that of the other is not, or another."""
    if isinstance(theirs, dict):
        pairs = [(key, mine.get(key), value) for key, value in theirs.items()]
    elif isinstance(theirs, list | tuple):
        if type(mine) is not type(theirs) or len(mine) != len(theirs):
            return f"the container {path!r}"
        pairs = list(zip(range(len(theirs)), mine, theirs, strict=True))
    elif isinstance(theirs, Tensor):
        return None if isinstance(mine, Tensor) else f"the type of state {path!r}"
    elif isinstance(theirs, float):
        return None if abs(mine - theirs) <= 1e-6 * abs(theirs) else f"the number {path!r}"
    else:
        return None if type(mine) is type(theirs) and (callable(mine) or mine == theirs) else f"the entry {path!r}"
    for key, value, expected in pairs:
        what = _containers(value, expected, f"{path}.{key}" if path else str(key))
        if what is not None:
            return what
    return None
