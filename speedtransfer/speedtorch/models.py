"""Role of the model factories: the rows of a variable live in a table, and the variable holds those of a batch."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from speedtransfer.cuda import wait_until_filled
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.optim import find_handle
from speedtransfer.speedtorch.rows import Rows
from speedtransfer.speedtorch.storage import OneArray

# Parameter -> weak reference to its switcher: some optimizers keep a copy of the weights.
_switchers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def all_weights(param: Tensor) -> Tensor | None:
    """Return all rows of the variable that a switcher has for `param`, if there is one and it has been initialised."""
    reference = _switchers.get(param)
    switcher = None if reference is None else reference()
    return None if switcher is None or switcher._held is None else switcher._rows.whole("weight")


def find_parameter(model: nn.Module, variable_name: str) -> nn.Parameter:
    """Return the parameter of that name, or of the module of that name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in (variable_name, f"{variable_name}.weight"):
        if name in named:
            return named[name]
    names = [name.removesuffix(".weight") for name in named]
    raise InvalidValueError(
        f"variable_name is {variable_name!r} but the model has no such parameter{suggest(variable_name, names or ['none'])}"
    )


class Models(OneArray):
    """What the model factories share; they differ in where the rows live."""

    _role = ("model_variable", "total_classes", "embed_dimension")
    _begin_by = (
        "zerosInit(), uniformDistributionInit(low, high), normalDistributionInit(mean, stdDev), customInit(function) or "
        "loadCupy(file)"
    )

    model_variable: nn.Module

    def _check(self) -> None:
        super()._check()
        kind, weight = type(self.model_variable).__name__, getattr(self.model_variable, "weight", None)
        if not isinstance(weight, Tensor):
            raise InvalidTypeError(f"model_variable is a {kind} without a weight; pass a module such as nn.Embedding")
        if find_handle(weight) is not None:
            raise InvalidTypeError(
                f"model_variable is a {kind} of speedtransfer, which moves its rows by itself; drop its factories, or pass an "
                "nn.Embedding"
            )
        _switchers[self._variable()] = weakref.ref(self)

    def _variable(self) -> Tensor:
        weight = self.model_variable.weight
        assert isinstance(weight, Tensor)
        return weight

    def zerosInit(self) -> None:
        """Set all rows to zero."""
        self._begin(lambda rows: rows.table.zero_())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draw all rows uniformly from ``[low, high)``, by torch's generator."""
        if not low <= high:
            raise InvalidValueError(f"low is {low} but must not be above high, {high}; swap them")
        self._begin(lambda rows: rows.table.uniform_(low, high))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draw all rows from a normal distribution, by torch's generator."""
        if not stdDev >= 0:
            raise InvalidValueError(f"stdDev is {stdDev} but must not be negative; pass {-stdDev}")
        self._begin(lambda rows: rows.table.normal_(mean, stdDev))

    def customInit(self, initFunction: Callable[..., Any], *args: Any) -> None:
        """Call ``initFunction(rows, *args)``, such as ``torch.nn.init.xavier_uniform_``, with all rows as one tensor.

        It fills the tensor in place, or returns another of the same shape.
        """

        def fill(rows: Rows) -> None:
            weights = rows.table.torch()
            with torch.no_grad():
                result = initFunction(weights, *args)
                if isinstance(result, Tensor) and result is not weights:
                    weights.copy_(result)
            wait_until_filled(weights)

        self._begin(fill)

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Return the dummy input of the model's forward pass: the places of a batch's rows in the variable.

        ``(batchSize, posPerBatch)`` int64 from 0 on; with `negPerBatch` also ``(batchSize, negPerBatch)``, going on there.
        """
        batch = check_size(batchSize, "batchSize")
        count = batch * check_size(posPerBatch, "posPerBatch")
        positive = np.arange(count).reshape(batch, posPerBatch)
        if negPerBatch is None:
            return positive
        negative = np.arange(count, count + batch * check_size(negPerBatch, "negPerBatch")).reshape(batch, negPerBatch)
        return positive, negative

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the rows of a batch into the model's variable, which gets as many rows as are named.

        Indexes are row numbers of any shape and integer dtype, on any device, or a mask of all rows; a negative number counts
        from the end. A row that is named several times comes as often, each one a copy of its own.
        """
        rows = self._rows
        index = rows.batch(retrievedPosIndexes, retrievedNegIndexes)
        with torch.inference_mode(False):  # an inference tensor could never be trained
            values = rows.read(index, ["weight"])["weight"]
            weight = self._variable()
            if weight.shape != values.shape:
                # A loss that is still held keeps autograd's notion of the old shape alive, which another dtype ends.
                other = torch.float32 if values.dtype == torch.float64 else torch.float64
                weight.data = values.new_empty(0, dtype=other)
            weight.data = values
            grad = weight.grad
            if grad is not None and any(getattr(grad, x) != getattr(values, x) for x in ("shape", "dtype", "device")):
                weight.grad = None  # of the rows of another batch

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the rows of the model's variable back where `beforeForwardPass` with the same indexes got them from.

        Where a row is named several times the last copy stays, as in an assignment of NumPy. Where it raises, such as for
        another number of rows than the variable holds, nothing has been written.
        """
        rows = self._rows
        rows.write(rows.batch(retrievedPosIndexes, retrievedNegIndexes), {"weight": self._variable().data})
