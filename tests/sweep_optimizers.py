"""Train a small table by every optimizer class of four packages, beside the lazy oracle: none may differ in silence.

The oracle is the same optimizer on ``nn.Embedding``, with idle rows and their state put back after each of its steps. In the
middle of a run each side goes on from the state dicts of the other.

    pip install pytorch-optimizer torch-optimizer schedulefree lion-pytorch
    python tests/sweep_optimizers.py            # or: make optimizers
    python tests/sweep_optimizers.py AdamP Lion # these alone, which writes no file

Ends with status 1 where a class trains otherwise than the oracle, or fails with an error that is not this library's own. A
sweep of all writes docs/optimizer_sweep.json, which docs/optimizers.md shows.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cases import dtype_name
from lazy_oracle import LazyOracle, skewed_batches, squared_loss, tensors_in
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim.probe.trial import FirstStates, words

ROWS, DIM, STEPS, LOOK_EVERY = 60, 8, 300, 25
# Of the longest way that a weight went, and of a state's largest value. Rounding grows with the steps, the more where signs
# and quotients of small numbers decide.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
# State that starts as a copy of the weights, and is first set to memory that holds anything.
COPIES = ("slow_buffer",)
Make = Callable[[nn.Module], Optimizer]

PACKAGES = {
    "pytorch-optimizer": "pytorch_optimizer",
    "torch-optimizer": "torch_optimizer",
    "schedulefree": "schedulefree",
    "lion-pytorch": "lion_pytorch",
}
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "optimizer_sweep.json"
WORKS, REFUSED, FAILS, DIFFERS = "works", "refused", "fails on nn.Embedding too", "DIFFERS"

# How to make those that take something else than parameters, or need arguments.
ARGUMENTS = {
    **dict.fromkeys(
        ("Lookahead", "OrthoGrad", "PCGrad", "TRAC", "Magma", "SafeFP16Optimizer"),
        lambda kind, m: kind(SGD(m.parameters(), lr=1e-2, momentum=0.9)),
    ),
    "ScheduleFreeWrapper": lambda kind, m: kind(SGD(m.parameters(), lr=1e-2)),
    **dict.fromkeys(("SAM", "LookSAM", "FriendlySAM"), lambda kind, m: kind(m.parameters(), SGD, lr=1e-2)),
    "WSAM": lambda kind, m: kind(m, m.parameters(), SGD, lr=1e-2),
    "GSAM": lambda kind, m: _gsam(kind, m),
    "BSAM": lambda kind, m: kind(m.parameters(), num_data=100),
    **dict.fromkeys(("LOMO", "AdaLOMO", "AdamMini"), lambda kind, m: kind(m)),
    # Embeddings are what their own documentation gives to AdamW.
    **dict.fromkeys(
        ("Muon", "AdaMuon", "AdaGO", "NorMuon", "MuonClip", "DistributedMuon"),
        lambda kind, m: kind([{"params": list(m.parameters()), "use_muon": False}]),
    ),
    **dict.fromkeys(("SCION", "SCIONLight"), lambda kind, m: kind(m.parameters(), lr=1e-2)),
    "Ranger21": lambda kind, m: kind(m.parameters(), num_iterations=STEPS),
}
# Those whose own step writes all rows, and of which no hook of torch tells: exact rows, against dense training.
WHOLE = {("torch-optimizer", "Lookahead")}


def _gsam(kind, model):
    package = importlib.import_module("pytorch_optimizer")
    base = SGD(model.parameters(), lr=1e-2)
    rates = package.LinearScheduler(base, t_max=STEPS, max_lr=1e-2, min_lr=1e-3)
    return kind(model.parameters(), base, model, package.ProportionScheduler(rates, max_lr=1e-2, min_lr=1e-3))


# --- an embedding of ours and that of torch, trained alike by an optimizer that nobody here knows -----------------------


class SweepOracle(LazyOracle):
    """Learns what an untouched row starts from by what the optimizer first sets: of one without a gradient."""

    def __init__(self, optimizer, module):
        super().__init__(optimizer, module)
        holder = optimizer
        while isinstance(getattr(type(holder), "state", None), property):  # that of the optimizer which it wraps
            holder = holder.optimizer
        holder.state = FirstStates(holder.state)

    def _start(self, module, key, value, weight):
        first = tensors_in(getattr(self.optimizer.state[module.weight], "first", {}))
        made = weight if key in COPIES else first.get(key)
        return made if made is not None and made.shape == value.shape else torch.zeros_like(value)


class Side:
    """A module of a library and its optimizer; `whole`: torch's idle rows move too."""

    def __init__(self, library, make, dtype, whole, states=None):
        torch.manual_seed(3)
        idle = {} if library is nn else {"idle": "exact" if whole else "lazy"}
        self.module = library.Embedding(ROWS, DIM, dtype=dtype, **idle)
        if states is not None:
            self.module.load_state_dict(states[0])
        self.opt = make(self.module)
        if states is not None:
            self.opt.load_state_dict(states[1])
        if hasattr(self.opt, "train"):
            self.opt.train()
        self.oracle = SweepOracle(self.opt, self.module) if library is nn and not whole else None

    def states(self):
        return copy.deepcopy((self.module.state_dict(), self.opt.state_dict()))

    def step(self, ids, target, style):
        def loss():
            value = squared_loss(self.module(ids), target)
            value.backward(create_graph=style == "create_graph")
            return value

        (self.oracle or self.opt).zero_grad()
        number = float(loss().detach())
        closure = {"closure": loss, "loss": lambda: number}.get(style)
        step = self.opt.step if closure is None else lambda: self.opt.step(closure)
        self.oracle.step(step) if self.oracle else step()

    @property
    def weight(self):
        table = getattr(self.module, "table", None)
        return self.module.weight.detach() if table is None else table.torch()

    @property
    def state(self):
        return self.opt.state.get(self.module.weight, {})


def run(make, dtype, style, whole=False):
    """Return how ours and the oracle differ; None: they do not.

    Raises
    ------
    OptimizerError
        Ours refuses.
    DenseError
        The optimizer fails on ``nn.Embedding``.
    """
    with _dense_errors():
        dense = Side(nn, make, dtype, whole)
    ours = Side(speedtransfer, make, dtype, whole)
    start = dense.weight.clone()
    for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, STEPS, size=12, dtype=dtype)):
        with _dense_errors():
            dense.step(ids, target, style)
        ours.step(ids, target, style)
        if not dense.weight.isfinite().all():
            raise DenseError("its weights become infinite or NaN", final=True)
        if number % LOOK_EVERY == LOOK_EVERY - 1 or number == 0:
            what = difference(ours, dense, start, TOLERANCE[dtype])
            if what is not None:
                return f"{what} at step {number + 1}"
        if number == STEPS // 2:
            # Each goes on from the state dicts of the other.
            with _dense_errors():
                theirs = dense.states()
                dense.opt.load_state_dict(copy.deepcopy(theirs[1]))  # or it cannot load at all
            mine = ours.states()
            ours, dense = Side(speedtransfer, make, dtype, whole, theirs), Side(nn, make, dtype, whole, mine)
    if torch.equal(dense.weight, start):
        raise DenseError("it moves no weight", final=True)
    return None


class DenseError(Exception):
    """The optimizer fails on nn.Embedding; `final`: however its step is called."""

    def __init__(self, reason, final=False):
        super().__init__(reason)
        self.final = final


@contextlib.contextmanager
def _dense_errors():
    try:
        yield
    except Exception as error:
        raise DenseError(words(error)) from error


def difference(ours, dense, start, tolerance):
    """Return what differs: the weights, or a tensor of state; containers, names, shapes and dtypes too."""
    mine, theirs = tensors_in(ours.state), tensors_in(dense.state)
    if mine.keys() != theirs.keys():
        return f"the names of state ({', '.join(sorted(mine.keys() ^ theirs.keys()))})"
    pairs = {"weights": (ours.weight, dense.weight, dense.weight - start)}
    pairs |= {f"state {name!r}": (mine[name], value, value) for name, value in theirs.items()}
    for what, (value, expected, ways) in pairs.items():
        largest = float(ways.double().abs().nan_to_num(0, 0, 0).max()) if ways.numel() else 0.0
        near = functools.partial(torch.allclose, rtol=0, atol=tolerance * largest, equal_nan=True)
        if value.shape != expected.shape or not near(value.double(), expected.double()):
            return what
    return None if _outline(ours.state) == _outline(dense.state) else "what holds the state"


def _outline(value):
    """Return containers and numbers without the tensors in them."""
    if isinstance(value, dict):
        return {key: _outline(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_outline, value))
    if isinstance(value, Tensor) or callable(value):
        return isinstance(value, Tensor)
    return f"{value:.5g}" if isinstance(value, float) else value


# --- every class of the packages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one class: `result` is one of the four, `detail` a reason or an amount."""

    package: str
    name: str
    result: str
    detail: str = ""


def outcome(package, kind):
    """Train by one class, in double and in single precision."""
    name, whole = kind.__name__, (package, kind.__name__) in WHOLE
    make = functools.partial(ARGUMENTS[name], kind) if name in ARGUMENTS else lambda m: kind(m.parameters())
    reasons = []
    for style in ("plain", "closure", "loss", "create_graph"):
        done = []
        for dtype in TOLERANCE:
            try:
                what = run(make, dtype, style, whole)
            except DenseError as error:
                if error.final:
                    return Outcome(package, name, FAILS, str(error))
                reasons.append(str(error))
                continue
            except OptimizerError as error:
                # Without the name of the optimizer and the advice.
                said = re.sub(r"^\w+ (cannot train rows of a table: |is |(?=wraps ))", "", str(error))
                return Outcome(package, name, REFUSED, said.split("; use ")[0].split("; give ")[0])
            except Exception as error:
                return Outcome(package, name, DIFFERS, f"fails with {type(error).__name__}: {words(error)}")
            if what is not None:
                return Outcome(package, name, DIFFERS, f"{what} ({dtype_name(dtype)})")
            done.append(dtype_name(dtype))
        if done:
            return Outcome(package, name, WORKS, "" if len(done) == len(TOLERANCE) else f"in {done[0]}")
    return Outcome(package, name, FAILS, reasons[0])


def classes(module_name):
    """Yield the optimizer classes that a package offers, by name."""
    package = importlib.import_module(module_name)
    for name, value in sorted(vars(package).items()):
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer:
            if value.__module__.startswith("torch.optim") or inspect.isabstract(value):
                continue
            if name == value.__name__:
                yield value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; default: all")
    names = set(parser.parse_args().names)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes = []
    for package, module_name in PACKAGES.items():
        for kind in classes(module_name):
            if not names or kind.__name__ in names:
                outcomes.append(one := outcome(package, kind))
                print(f"{one.package:18} {one.name:24} {one.result:23} {one.detail}", flush=True)
    counts = {result: sum(o.result == result for o in outcomes) for result in (WORKS, REFUSED, FAILS, DIFFERS)}
    print("\n" + ", ".join(f"{number} {result}" for result, number in counts.items()) + f", of {len(outcomes)}")
    if not names:
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        RESULTS.write_text(
            json.dumps({"versions": versions, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n",
            encoding="utf-8",
        )
        print(f"written to {RESULTS}")
    return 1 if counts[DIFFERS] else 0


if __name__ == "__main__":
    sys.exit(main())
