"""A project trained three times: with torch.nn's embeddings, with them replaced by ours, and with our class in their place."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import speedtransfer
from speedtransfer.nn.base import TableModule

OPTIONS: dict[str, Any] = {"idle": "exact"}
WAYS = ("replace", "swap")
DENSE = "dense"
TOLERANCE = 1e-9  # in float64
DIGITS = 4  # as the projects print their losses and metrics


class Embedding(speedtransfer.Embedding):
    """Ours with `OPTIONS`: what a user's changed import gives."""

    __init__ = functools.partialmethod(speedtransfer.Embedding.__init__, **OPTIONS)  # type: ignore[assignment]


class EmbeddingBag(speedtransfer.EmbeddingBag):
    """Ours with `OPTIONS`."""

    __init__ = functools.partialmethod(speedtransfer.EmbeddingBag.__init__, **OPTIONS)  # type: ignore[assignment]


@dataclass
class Outcome:
    """What training printed, by name, each a number or a list of them, and the model that came out."""

    printed: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    weights: dict[str, torch.Tensor] | None = None  # of the model, where another copy is to be compared


Run = Callable[[str], Outcome]


@contextlib.contextmanager
def classes(way: str, *projects: str) -> Iterator[None]:
    """Within, the modules of `projects` (names of packages) that make an embedding make ours, if the way is "swap"."""
    if way != "swap":
        yield
        return
    originals = {nn.Embedding: Embedding, nn.EmbeddingBag: EmbeddingBag}
    names = [name for name in sys.modules if name.split(".")[0] in projects or name in projects]
    undo: list[tuple[Any, str, Any]] = []
    for holder in (nn, *(sys.modules[name] for name in names)):
        for key, value in list(vars(holder).items()):
            if isinstance(value, type) and value in originals:
                undo.append((holder, key, value))
                setattr(holder, key, originals[value])
    try:
        yield
    finally:
        for holder, key, value in undo:
            setattr(holder, key, value)


def hand_over(model: nn.Module, way: str, **options: Any) -> nn.Module:
    """Replace the embeddings of `model` if the way is "replace"; check that it has tables, where it should."""
    if way == "replace":
        speedtransfer.replace_embeddings(model, min_rows=0, **{**OPTIONS, **options})
    tables = [module for module in model.modules() if isinstance(module, TableModule)]
    dense = [module for module in model.modules() if type(module) in (nn.Embedding, nn.EmbeddingBag)]
    assert bool(tables) == (way != DENSE), f"{way}: {len(tables)} tables"
    assert way == DENSE or not dense, f"{way}: left as they were: {dense}"
    return model


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Within, what a project makes in float32 is float64, also where its code says so: `.float()`, `torch.FloatTensor`."""
    with contextlib.ExitStack() as stack:
        before = torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.float64)
        for holder, name, value in (
            (torch.Tensor, "float", torch.Tensor.double),
            (torch, "FloatTensor", torch.DoubleTensor),
            (torch.sparse, "FloatTensor", torch.sparse.DoubleTensor),
        ):
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def numbers(value: Any) -> list[float]:
    """Return the numbers in `value`, however nested, in order."""
    if isinstance(value, Mapping):
        return [number for key in value for number in numbers(value[key])]
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, str):
        return []
    if hasattr(value, "__iter__"):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def assert_same(ours: Outcome, dense: Outcome, tolerance: float | None) -> None:
    """Compare what was printed, and the weights: to a tolerance, or (None: float32) to the printed digits."""
    assert ours.printed.keys() == dense.printed.keys()
    for key, expected in dense.printed.items():
        got, want = numbers(ours.printed[key]), numbers(expected)
        assert len(got) == len(want) > 0, f"{key}: {got} != {want}"
        assert all(number == number for number in want), f"{key}: {want}"
        if tolerance is None:
            assert [f"{n:.{DIGITS}f}" for n in got] == [f"{n:.{DIGITS}f}" for n in want], key
        else:
            for one, other in zip(got, want, strict=True):
                assert abs(one - other) <= tolerance * max(1.0, abs(other)), f"{key}: {got} != {want}"
    got_weights, weights = (
        outcome.model.state_dict() if outcome.weights is None and outcome.model is not None else outcome.weights or {}
        for outcome in (ours, dense)
    )
    assert got_weights.keys() == weights.keys()
    for key, value in weights.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            atol = (1e-4 if tolerance is None else tolerance) * max(
                1.0, float(value.abs().max()) if value.numel() else 0
            )
            torch.testing.assert_close(
                got_weights[key], value, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
            )


_dense: dict[tuple[Any, bool], Outcome] = {}


def compare(run: Callable[..., Outcome], way: str, double: bool, *args: Any) -> None:
    """Train by `run(way, *args)` and with torch.nn (once for both ways) and compare: float64 to 1e-9, float32 as printed."""
    with in_float64() if double else contextlib.nullcontext():
        key = (run, *args), double
        if key not in _dense:
            _dense[key] = run(DENSE, *args)
        ours = run(way, *args)
    assert_same(ours, _dense[key], TOLERANCE if double else None)
