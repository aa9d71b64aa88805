"""Role of the optimizer factories: the state lives in a table, and the optimizer holds that of a batch.

What an optimizer keeps for a row, and from which values that starts, is found by a trial of it, so that any optimizer that
updates row by row will do.
"""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError
from speedtransfer.optim import PlaneSpec, probe_optimizer
from speedtransfer.optim.leaves import cloned, leaves, put
from speedtransfer.optim.probe import Trial, sparse_gradient, without_gradients
from speedtransfer.speedtorch.arrays import dtype_of, stored_dtype
from speedtransfer.speedtorch.models import all_weights, find_parameter
from speedtransfer.speedtorch.rows import Column, Rows
from speedtransfer.speedtorch.storage import Shaped


class Optimizers(Shaped):
    """What the optimizer factories share; they differ in where the rows live."""

    _role = ("given_optimizer", "total_classes", "embed_dimension", "model", "variable_name")
    _several = True
    _begin_by = "optInit()"

    given_optimizer: Optimizer
    embed_dimension: int
    model: nn.Module
    variable_name: str
    dtype: Any

    def _check(self) -> None:
        if not isinstance(self.given_optimizer, Optimizer):
            kind = type(self.given_optimizer).__name__
            raise InvalidTypeError(f"given_optimizer is a {kind} but must be a torch.optim.Optimizer; pass one")
        super()._check()
        self.datatype, self._wanted = self.dtype, dtype_of(self.dtype, "dtype")
        self._param = find_parameter(self.model, self.variable_name)
        self._try()

    def _try(self) -> None:
        """Find what the optimizer keeps for a row, with the variable and the hyperparameters as they are now."""
        self._like = self._param.detach().new_empty(0, self.embed_dimension)
        optimizer, sparse = self.given_optimizer, isinstance(self.given_optimizer, torch.optim.SparseAdam)
        with torch.device("cpu"):  # whatever the default device: where it matters a trial names it
            self._specs = probe_optimizer(optimizer, self._group(), self._like, sparse)
        self.optVarList = list(self._specs)
        self._columns = {
            name: Column(spec.tail, self._wanted if self._is_like_weights(spec) else spec.dtype)
            for name, spec in self._specs.items()
        }

    def _group(self) -> dict[str, Any]:
        """Return the group of the variable, which load_state_dict replaces."""
        for group in self.given_optimizer.param_groups:
            if any(other is self._param for other in group["params"]):
                return group
        raise InvalidValueError(
            f"given_optimizer does not train {self.variable_name!r}, the variable_name; make the optimizer with it"
        )

    def _is_like_weights(self, spec: PlaneSpec) -> bool:
        return spec.tail == (self.embed_dimension,) and spec.dtype == self._like.dtype

    def _dtype_of(self, name: str) -> torch.dtype:
        # A model factory of another dtype may have given the variable that since the trial.
        return self._param.dtype if self._is_like_weights(self._specs[name]) else self._specs[name].dtype

    def _variable(self) -> Tensor:
        return self._param

    def optInit(self) -> None:
        """Make the state of all rows: what the optimizer gives a row that no step has touched.

        Copies of the weights (ASGD's averages, slow weights) are made when the first rows are asked for.
        """
        self._try()
        self._held = self._make()

    def _make(self) -> Rows:
        table = self._new_table(self.total_classes, 0, torch.float32)
        for name, spec in self._specs.items():
            column = self._columns[name]
            table.add_plane(name, math.prod(column.tail), stored_dtype(column.dtype), spec.initial or 0)
        # Whether state was loaded, so that it may be another than the optimizer begins with; what is to be a copy of weights.
        self._is_set, self._copies = False, [name for name, spec in self._specs.items() if spec.initial is None]
        return Rows(table, self._columns)

    @property
    def _rows(self) -> Rows:
        rows = super()._rows
        if self._copies:
            self._copy_weights(rows)
        return rows

    def _copy_weights(self, rows: Rows) -> None:
        """Begin the states that start as a copy of the weights."""
        weights = all_weights(self._param)
        if weights is None:
            raise OptimizerError(
                f"state {self._copies[0]!r} of {type(self.given_optimizer).__name__} starts as a copy of the weights, which "
                f"are not there; make and initialise a model factory for {self.variable_name!r} first"
            )
        for name in self._copies:
            plane = rows.table.plane(name)
            if plane.shape != weights.shape:
                raise OptimizerError(
                    f"state {name!r} has shape {tuple(plane.shape)} but starts as a copy of the weights, which have "
                    f"{tuple(weights.shape)}; make both factories for one shape"
                )
            rows.fill(name, weights)
        self._copies = []

    def _take(self, tensors: list[Tensor]) -> None:
        if self._held is None:
            self._try()
        super()._take(tensors)
        self._is_set, self._copies = True, []

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the state of a batch's rows into the optimizer. What all rows share (the number of steps) stays there.

        Indexes are those of the model's factory. Raises `OptimizerError` where a state starts as a copy of the weights, and
        there is no model factory with them.
        """
        rows = self._rows
        index = rows.batch(retrievedPosIndexes, retrievedNegIndexes)
        state = self.given_optimizer.state.get(self._param)
        if not state:
            if not (self._is_set or rows.lent):
                return  # the optimizer makes its own first state, by its rules for a first step
            state = self.given_optimizer.state[self._param]
            state.update(self._first_state())
        names = [name for name in self.optVarList if name in leaves(state)]
        found = rows.read(index, names)
        put(state, {name: found[name].to(self._dtype_of(name)) for name in names})

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the optimizer's state back where `beforeForwardPass` with the same indexes got it from.

        Where a row is named several times the last copy stays, as in an assignment of NumPy. Where it raises nothing has been
        written: the state is that of another number of rows, or what the optimizer did not keep when the factory was made.
        """
        rows = self._rows
        index = rows.batch(retrievedPosIndexes, retrievedNegIndexes)
        state = leaves(self.given_optimizer.state.get(self._param) or {})
        unknown = [name for name, value in state.items() if name not in self._specs and value.dim() > 0]
        if unknown:
            raise OptimizerError(
                f"{type(self.given_optimizer).__name__} made state {unknown[0]!r} that it did not make in a trial; make the "
                "factory anew after a change of hyperparameters"
            )
        rows.write(index, {name: state[name] for name in self.optVarList if name in state})

    def _first_state(self) -> dict[str, Any]:
        """Return the state that the optimizer begins with, of some rows."""
        with torch.inference_mode(False), without_gradients(self.given_optimizer):
            weights = self._like.new_zeros(1, self.embed_dimension)
            trial = Trial(self.given_optimizer, self._group(), weights)
            grad = torch.zeros_like(weights)
            trial.step(sparse_gradient(grad) if self._specs.gradient == "sparse" else grad)
            late = {name for name, spec in self._specs.items() if spec.late}
            return {key: cloned(value) for key, value in trial.first.items() if key not in late}
