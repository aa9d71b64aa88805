"""What an optimizer does with the sparse gradients of ``nn.Embedding(sparse=True)``: found by trials, as in `probe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.probe.initial_values import Start, sparse_starts
from speedtransfer.optim.probe.trajectories import (
    ROWS,
    UPDATE,
    Course,
    dense_gradient,
    densely,
    difference,
    gradients,
    lazily,
    of_lookups,
    sparse_gradient,
    wholly,
)
from speedtransfer.optim.probe.trial import StateError, words

_MANY, _SOME = 130, (0, 5, 129)


@dataclass(frozen=True)
class BySparse:
    """An optimizer that trains rows by sparse gradients.

    Attributes
    ----------
    found : dict of str to Start
        The state that follows the rows.
    shared : set of str
        The names of the other tensors of state.
    either : bool
        It trains them by dense gradients of the active rows just the same.
    """

    found: dict[str, Start]
    shared: set[str]
    either: bool


def takes_sparse_only(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> bool:
    """Tell whether an optimizer that does not run with dense gradients runs with sparse ones."""
    return _Trials.of(optimizer, group, weights) is not None


def try_sparse(
    optimizer: Optimizer, group: dict[str, Any], visible: dict[str, Any], weights: Tensor
) -> BySparse | None:
    """Find out whether sparse gradients of the active rows train these as sparse gradients train the whole parameter.

    Parameters
    ----------
    optimizer : Optimizer
    group, visible : dict
        Hyperparameters, and the same with rates at which differences cannot drown.
    weights : Tensor
        ``(ROWS, dim)`` of the dtype and on the device that training has.

    Returns
    -------
    BySparse or None
        None: it takes no sparse gradients, or does with them what it does with dense ones of the whole parameter (SGD with
        momentum). Dense gradients are then right.

    Raises
    ------
    OptimizerError
        It takes sparse gradients and does with them what rows of a table cannot follow.
    """
    trials = _Trials.of(optimizer, visible, weights)
    if trials is None:
        return None
    name = type(optimizer).__name__
    advice = "make the module with sparse=False, or use an optimizer such as SparseAdam, SGD or Adagrad"
    try:
        found, shared = sparse_starts(optimizer, group, trials.weights)
        reason = trials.reason(found)
    except Exception as error:
        reason = _reason(error)
    if reason is not None:
        if trials.are_dense():
            return None
        raise OptimizerError(
            f"{name} cannot train rows of a table made with sparse=True: given sparse gradients, {reason}; {advice}"
        )
    either = trials.are_lazy(found)
    try:
        if (
            weights.dtype != trials.weights.dtype
        ):  # the dtype of the state, and what it starts from, is that of training
            found, shared = sparse_starts(optimizer, group, weights)
            reason = _Trials(optimizer, visible, weights, 1e-3 if weights.dtype == torch.float32 else 0.1).reason(found)
    except Exception as error:
        reason = _reason(error)
    if reason is None:
        return BySparse(found, shared, either)
    if either:
        return None
    raise OptimizerError(
        f"{name} cannot train rows of {weights.dtype} made with sparse=True: given sparse gradients, {reason}; {advice}"
    )


def _reason(error: Exception) -> str:
    return words(error) if isinstance(error, StateError) else f"a trial failed ({words(error)})"


class _Trials:
    """Trials of an optimizer with sparse gradients, and how it trains the whole parameter by them."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], weights: Tensor, rtol: float) -> None:
        self.optimizer, self.group, self.rtol = optimizer, group, rtol
        self.weights = weights
        self.scaled = weights * torch.logspace(-1, 1, ROWS, device="cpu").to(weights).unsqueeze(1)
        self.grads, self.active = gradients(weights)

    @classmethod
    def of(cls, optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> _Trials | None:
        """Return those in double precision, else in single; None: the optimizer takes no sparse gradients."""
        for exact, rtol in ((weights.double(), 1e-5), (weights.float(), 1e-3)):
            trials = cls(optimizer, group, exact, rtol)
            try:
                trials.whole(())
            except Exception:
                continue
            return trials
        return None

    def whole(self, found: Any, gradient: Any = of_lookups) -> Course:
        """Train the whole parameter as torch does."""
        # Torch warns once a process where nobody has said whether it should check what sparse tensors hold.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return wholly(self.optimizer, self.group, found, self.scaled, self.grads, self.active, gradient)

    def reason(self, found: dict[str, Start]) -> str | None:
        """Return what keeps rows of a table from being trained by sparse gradients, if anything does."""
        whole = self.whole(found)
        if whole.swaps:
            return f"its {whole.swaps}() changes the whole parameter between steps, when no row is there"
        with torch.sparse.check_sparse_tensor_invariants(False):
            rows = lazily(self.optimizer, self.group, found, self.scaled, self.grads, self.active, sparse=True)
        what = difference(whole, rows, self.rtol)
        if what is None:
            return self._reason_of_many(found)
        if difference(whole, self.whole(found), self.rtol) is not None:
            return "its update draws random numbers"
        if difference(self.whole(found, sparse_gradient), rows, self.rtol) is None:
            return "it tells the lookups of one row in a batch apart (it does not coalesce the gradient)"
        return f"{_subject(what)} depends on rows that the step does not name, or those do not stay as they are"

    def _reason_of_many(self, found: dict[str, Start]) -> str | None:
        """Return what differs where the parameter is long, and its active rows are few."""
        generator = torch.Generator("cpu").manual_seed(3)
        dim = self.weights.shape[1]
        many = torch.randn(_MANY, dim, generator=generator, device="cpu").to(self.weights)
        active = torch.zeros(2, _MANY, dtype=torch.bool, device=many.device)
        active[:, list(_SOME)] = True
        grads = torch.randn(*active.shape, dim, generator=generator, device="cpu").to(many) * active.unsqueeze(2)
        with torch.sparse.check_sparse_tensor_invariants(False):
            whole = wholly(self.optimizer, self.group, found, many, grads, active, of_lookups)
            rows = lazily(self.optimizer, self.group, found, many, grads, active, sparse=True)
        what = difference(whole, rows, self.rtol)
        return None if what is None else f"{_subject(what)} depends on the number of rows"

    def are_dense(self) -> bool:
        """Tell whether sparse gradients train the whole parameter as dense ones do, idle rows and all."""
        try:
            dense = self.whole((), dense_gradient)
        except Exception:
            return False
        moves = Course(dense.moves, dense.weights, {}, {})
        return difference(moves, self.whole(()), self.rtol) is None

    def are_lazy(self, found: dict[str, Start]) -> bool:
        """Tell whether sparse gradients train as dense ones do whose idle rows are put back."""
        try:
            dense = densely(self.optimizer, self.group, found, self.scaled, self.grads, self.active)
        except Exception:
            return False
        whole = self.whole(found)
        return dense.planes.keys() == whole.planes.keys() and difference(dense, whole, self.rtol) is None


def _subject(what: str) -> str:
    return "the update of a row" if what == UPDATE else f"state {what!r}"
