"""Train a small table by every optimizer class of four packages, beside the lazy oracle: none may differ in silence.

The oracle is the same optimizer on ``nn.Embedding``, with idle rows and their state put back after each of its steps. In the
middle of a run each side goes on from the state dicts of the other.

    pip install pytorch-optimizer torch-optimizer schedulefree lion-pytorch
    python tests/sweep_optimizers.py            # or: make optimizers
    python tests/sweep_optimizers.py AdamP Lion # these alone, which writes no file

Ends with status 1 where a class trains otherwise than the oracle, or fails with an error that is not this library's own. A
sweep of all writes docs/optimizer_sweep.json, which docs/optimizers.md shows.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sweep_pair import STEPS, TOLERANCE, DenseError, Make, run
from torch import nn
from torch.optim import SGD, Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.probe.trial import words

PACKAGES = {
    "pytorch-optimizer": "pytorch_optimizer",
    "torch-optimizer": "torch_optimizer",
    "schedulefree": "schedulefree",
    "lion-pytorch": "lion_pytorch",
}
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "optimizer_sweep.json"
WORKS, REFUSED, FAILS, DIFFERS = "works", "refused", "fails on nn.Embedding too", "DIFFERS"

# How to make those that take something else than parameters, or need arguments.
ARGUMENTS: dict[str, Callable[[type[Any], nn.Module], Any]] = {
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


def _gsam(kind: type[Any], model: nn.Module) -> Any:
    package = importlib.import_module("pytorch_optimizer")
    base = SGD(model.parameters(), lr=1e-2)
    rates = package.LinearScheduler(base, t_max=STEPS, max_lr=1e-2, min_lr=1e-3)
    return kind(model.parameters(), base, model, package.ProportionScheduler(rates, max_lr=1e-2, min_lr=1e-3))


@dataclass(frozen=True)
class Outcome:
    """What became of one class: `result` is one of the four, `detail` a reason or an amount."""

    package: str
    name: str
    result: str
    detail: str = ""


def outcome(package: str, kind: type[Any]) -> Outcome:
    """Train by one class, in double and in single precision."""
    name, whole = kind.__name__, (package, kind.__name__) in WHOLE
    make: Make = functools.partial(ARGUMENTS[name], kind) if name in ARGUMENTS else lambda m: kind(m.parameters())
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
                return Outcome(package, name, REFUSED, _short(str(error)))
            except Exception as error:
                return Outcome(package, name, DIFFERS, f"fails with {type(error).__name__}: {words(error)}")
            if what is not None:
                return Outcome(package, name, DIFFERS, f"{what} ({_dtype(dtype)})")
            done.append(_dtype(dtype))
        if done:
            return Outcome(package, name, WORKS, "" if len(done) == len(TOLERANCE) else f"in {done[0]}")
    return Outcome(package, name, FAILS, reasons[0])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def classes(module_name: str) -> Iterator[type[Optimizer]]:
    """Yield the optimizer classes that a package offers, by name."""
    package = importlib.import_module(module_name)
    for name, value in sorted(vars(package).items()):
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer:
            if value.__module__.startswith("torch.optim") or inspect.isabstract(value):
                continue
            if name == value.__name__:
                yield value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; default: all")
    names = set(parser.parse_args().names)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: list[Outcome] = []
    for package, module_name in PACKAGES.items():
        for kind in classes(module_name):
            if not names or kind.__name__ in names:
                began = time.perf_counter()
                outcomes.append(outcome(package, kind))
                print(_line(outcomes[-1], time.perf_counter() - began), flush=True)
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


def _line(one: Outcome, seconds: float) -> str:
    return f"{one.package:18} {one.name:24} {one.result:23} {seconds:5.1f} s  {one.detail}"


def _short(detail: str) -> str:
    """Return a reason without the name of the optimizer and the advice."""
    detail = re.sub(
        r"^\w+ (cannot train rows of a table: |is |wraps )", lambda m: "wraps " if "wraps" in m[1] else "", detail
    )
    return detail.split("; use ")[0].split("; give ")[0]


if __name__ == "__main__":
    sys.exit(main())
