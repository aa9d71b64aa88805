"""An embedding of ours and one of torch, both made with ``sparse=True``, and optimizers that take their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lazy_oracle import Pair, tensors_in
from third_party import DecaysNamed, Descends, RowWiseAdagrad
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import speedtransfer

# Name -> optimizer, and what its steps get.
TAKERS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "sparse-adam": (functools.partial(SparseAdam, lr=0.05), "sparse"),
    "sparse-adam-maximize": (functools.partial(SparseAdam, lr=0.01, maximize=True), "sparse"),
    "row-wise": (RowWiseAdagrad, "sparse"),
    "row-wise-initial": (functools.partial(RowWiseAdagrad, initial=0.3), "sparse"),
    "decays-named": (DecaysNamed, "sparse"),
    "descends": (Descends, "either"),
    "sgd": (functools.partial(SGD, lr=0.1), "either"),
    "adagrad": (functools.partial(Adagrad, lr=0.1, initial_accumulator_value=0.2), "either"),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 5e-2}


class SparsePair(Pair):
    """Our embedding and that of torch, both made with ``sparse=True``."""

    size = 12

    def __init__(
        self, make: Callable[..., Optimizer], dtype: torch.dtype = torch.float32, rows: int = 41, **options: Any
    ) -> None:
        storage = {key: options.pop(key) for key in ("idle", "memory") if key in options}
        torch.manual_seed(3)
        ours = speedtransfer.Embedding(rows, 6, sparse=True, dtype=dtype, **options, **storage)
        torch.manual_seed(3)
        super().__init__(make, ours, nn.Embedding(rows, 6, sparse=True, dtype=dtype, **options))

    def assert_same(self, tolerance: float | None = None) -> None:
        tolerance = TOLERANCE[self.dense.weight.dtype] if tolerance is None else tolerance
        expected = self.dense.weight.detach()
        torch.testing.assert_close(self.ours.table.torch(), expected, rtol=tolerance, atol=tolerance)
        ours, theirs = (
            tensors_in(opt.state_dict()["state"].get(0, {})) for opt in self.optimizers
        )  # by name: parameter 0 of both
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            value = value.to_dense() if value.is_sparse else value
            value = value.to(ours[name].dtype)  # torch loads what it saved as int32 into the dtype of the weights
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)
