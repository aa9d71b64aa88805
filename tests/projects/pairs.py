"""A project trained three times: with torch.nn's embeddings, with them replaced by ours, and with our class in their place."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import take_step
from torch import nn

import speedtransfer
from speedtransfer.nn.table_module import TableModule

TORCH = (nn.Embedding, nn.EmbeddingBag)
OURS = (speedtransfer.Embedding, speedtransfer.EmbeddingBag)
WAYS = ("replace", "swap")
DENSE = "dense"
TOLERANCE = 1e-9  # in float64
DIGITS = 4  # as the projects print their losses and metrics


def in_both_ways(test):
    """Give a test the `way`, and whether what it compares is float64."""
    precisions = pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
    return pytest.mark.parametrize("way", WAYS)(precisions(test))


def stepped(optimizer, losses):
    """Make a step for each loss, which is computed then, and return them."""
    return [(take_step(optimizer, loss), loss.item())[1] for loss in losses]


@dataclass
class Outcome:
    """What came of training: what was printed, by name, and values, each a number or a nest of them; and the model."""

    printed: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None

    def state(self):
        return {} if self.model is None else self.model.state_dict()


@contextlib.contextmanager
def classes(way, *projects):
    """Within, the modules of `projects` (names of packages) that make an embedding make ours, if the way is "swap"."""
    if way != "swap":
        yield
        return
    ours = dict(zip(TORCH, OURS, strict=True))
    names = [name for name in sys.modules if name.split(".")[0] in projects or name in projects]
    undo = []
    for holder in (nn, *(sys.modules[name] for name in names)):
        for key, value in list(vars(holder).items()):
            if isinstance(value, type) and value in ours:
                undo.append((holder, key, value))
                setattr(holder, key, ours[value])
    try:
        yield
    finally:
        for holder, key, value in undo:
            setattr(holder, key, value)


def hand_over(model, way):
    """Replace the embeddings of `model` if the way is "replace"; check that it has tables, where it should."""
    if way == "replace":
        speedtransfer.replace_embeddings(model, min_rows=0)
    tables = [module for module in model.modules() if isinstance(module, TableModule)]
    dense = [module for module in model.modules() if type(module) in TORCH]
    assert bool(tables) == (way != DENSE), f"{way}: {len(tables)} tables"
    assert way == DENSE or not dense, f"{way}: left as they were: {dense}"
    return model


@contextlib.contextmanager
def in_float64():
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


def numbers(value):
    if isinstance(value, Mapping):
        return [number for key in value for number in numbers(value[key])]
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, str):
        return []
    if hasattr(value, "__iter__"):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def assert_same(ours, dense, tolerance):
    """Compare what was printed, the values and the weights: to a tolerance, or (None: float32) as printed, and to 1e-4."""
    assert ours.printed.keys() == dense.printed.keys()
    for key, expected in dense.printed.items():
        got, want = numbers(ours.printed[key]), numbers(expected)
        if tolerance is None:
            assert [f"{n:.{DIGITS}f}" for n in got] == [f"{n:.{DIGITS}f}" for n in want], key
        assert_near(key, got, want, tolerance)
    assert ours.values.keys() == dense.values.keys()
    for key, expected in dense.values.items():
        assert_near(key, numbers(ours.values[key]), numbers(expected), tolerance)
    weights, expected_weights = ours.state(), dense.state()
    assert weights.keys() == expected_weights.keys()
    for key, value in expected_weights.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert weights[key].shape == value.shape, key
            assert_near(key, numbers(weights[key]), numbers(value), tolerance)


def assert_near(name, got, want, tolerance):
    """Compare numbers to a share of the largest of them, or of 1."""
    assert len(got) == len(want) > 0, f"{name}: {len(got)} numbers, not {len(want)}"
    one, other = torch.tensor(got, dtype=torch.double), torch.tensor(want, dtype=torch.double)
    assert not other.isnan().any(), name
    scale = max(1.0, float(other[other.isfinite()].abs().max()))
    atol = (1e-4 if tolerance is None else tolerance) * scale
    torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


_dense = {}


def compare(run, way, double, *args):
    """Train by `run(way, *args)` and with torch.nn (once for both ways) and compare: float64 to 1e-9, float32 as printed."""
    with in_float64() if double else contextlib.nullcontext():
        key = (run, *args), double
        if key not in _dense:
            _dense[key] = run(DENSE, *args)
        ours = run(way, *args)
    assert_same(ours, _dense[key], TOLERANCE if double else None)
