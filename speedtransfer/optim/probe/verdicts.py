"""Decide whether an optimizer trains rows of a table as it trains the whole parameter: by dense gradients, by sparse ones."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.interrupts import pass_on_interrupt
from speedtransfer.optim.probe.initial_values import initial_values, initial_values_of_sparse
from speedtransfer.optim.probe.trajectories import (
    STEPS,
    UPDATE,
    InitialValue,
    Training,
    Trajectory,
    difference,
    gradient_of_lookups,
    sparse_gradient,
)
from speedtransfer.optim.probe.trial import StateError, outside_state, words

ADVICE = "use a row-by-row optimizer (SGD, Adam, AdamW, Adamax, Adagrad, ...) for this embedding"
_SWAPS = "its {}() changes the whole parameter between steps, when no row is there"
# Of the few rows: one of them is active in every step, so that both count the same steps.
_FEW = [1, 3]
# Of many: some at both ends.
_SOME = [0, 5, 129]


def seed(device: torch.device, number: int) -> None:
    """Seed what a trial draws from: torch.manual_seed would seed the devices, too, that nobody restores."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def _tolerance(weights: Tensor) -> float:
    return 1e-3 if weights.dtype == torch.float32 else 0.1


def _subject(what: str) -> str:
    return "the update of a row" if what == UPDATE else f"state {what!r}"


# --- dense gradients ----------------------------------------------------------------------------------------------------


def check_dense(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, found: dict[str, InitialValue]) -> None:
    """Raise unless dense gradients of the active rows train these as those of all rows do, with idle rows put back.

    Parameters
    ----------
    optimizer : Optimizer
    group : dict
        Hyperparameters, with rates at which differences cannot drown.
    weights : Tensor
        ``(ROWS, dim)`` of the dtype and on the device that training has.
    found : dict
        The state that follows the rows.

    Raises
    ------
    OptimizerError
    """
    if weights.dtype != torch.float64:  # what depends on the dtype, such as state of few bits, shows in that alone
        _check(Training.of_few(optimizer, group, weights, STEPS // 2), found, _tolerance(weights))
    try:
        _check_exactly(optimizer, group, weights.double(), found, 1e-5)
    except OptimizerError:
        raise
    except Exception as error:  # it does not compute in double precision
        pass_on_interrupt(error)
        _check_exactly(optimizer, group, weights.float(), found, 1e-3)


def _check(training: Training, found: dict[str, InitialValue], rtol: float) -> Trajectory:
    """Train rows as a table does, and a few of them alone; refuse where that is not the same. Return how the few went."""
    alone = training.of(_FEW).whole(found, put_back=True)
    failure, what = None, None
    try:
        what = difference(alone, training.by_rows(found).of(_FEW), rtol)
    except Exception as error:
        pass_on_interrupt(error)
        failure = error
    if failure is not None or what is not None:
        _explain(training, found, alone, rtol, failure)
    if alone.swaps:
        _refuse(training.optimizer, _SWAPS.format(alone.swaps))
    return alone


def _check_exactly(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, found: dict[str, InitialValue], rtol: float
) -> None:
    """Check with more precision than the table has, and also a long parameter: some factor the state of those only."""
    if any(value.made.dtype in (torch.float16, torch.bfloat16) for value in found.values()):
        found, _ = initial_values(optimizer, group, weights)  # which were rounded
    alone = _check(Training.of_few(optimizer, group, weights), found, rtol)
    if not alone.moves.any() and alone.moves.numel():
        _refuse(optimizer, "a trial moved no row (a rate of zero, or parameters held elsewhere than in param_groups)")
    many, few = Training.of_many(optimizer, group, weights), [0, 1]
    alone = many.of(few).whole(found, put_back=True)
    try:
        what = difference(alone, many.whole(found, put_back=True).of(few), rtol)
    except Exception as error:
        pass_on_interrupt(error)
        raise _dependent(optimizer, UPDATE) from error
    if what is not None:
        raise _dependent(optimizer, what)


def _explain(
    training: Training, found: dict[str, InitialValue], alone: Trajectory, rtol: float, failure: Exception | None
) -> NoReturn:
    """Raise with the reason for which rows of a table go another way than a few of them `alone`."""
    optimizer, weights = training.optimizer, training.weights
    seed(weights.device, 1)
    if difference(alone, training.of(_FEW).whole(found, put_back=True), rtol) is not None:
        _refuse(optimizer, "its update draws random numbers, so that a trial cannot tell whether it is row by row")
    outside = outside_state(optimizer, training.group, weights)
    what = difference(alone, training.whole(found, put_back=True).of(_FEW), rtol)
    if what is not None and what not in outside:
        raise _dependent(optimizer, what)
    if failure is not None and not outside:
        raise failure
    where = f" ({', '.join(outside)})" if outside else ""
    _refuse(optimizer, f"it keeps something of the rows outside optimizer.state{where}, where it does not follow them")


def _dependent(optimizer: Optimizer, what: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} is not row by row: {_subject(what)} depends on the other rows of the parameter, and most "
        f"of a table is not there during a step; {ADVICE}, in an optimizer of its own if need be"
    )


def _refuse(optimizer: Optimizer, reason: str) -> NoReturn:
    raise OptimizerError(f"{type(optimizer).__name__} cannot train rows of a table: {reason}; {ADVICE}")


# --- sparse gradients ---------------------------------------------------------------------------------------------------


def takes_sparse(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> tuple[Training, Tensor, float] | None:
    """Return training that runs with sparse gradients, in double precision or else in single, with weights and tolerance."""
    for exact, rtol in ((weights.double(), 1e-5), (weights.float(), 1e-3)):
        training = Training.of_few(optimizer, group, exact)
        try:
            training.whole({}, gradient_of_lookups)
        except Exception as error:
            pass_on_interrupt(error)
            continue
        return training, exact, rtol
    return None


def check_sparse(
    optimizer: Optimizer, group: dict[str, Any], visible: dict[str, Any], weights: Tensor
) -> tuple[dict[str, InitialValue], set[str], bool] | None:
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
    tuple of (dict, set, bool), or None
        The state that follows the rows, the names of the other, and whether dense gradients of the active rows train these
        just the same. None: the optimizer takes no sparse gradients, or does with them what it does with dense ones of the
        whole parameter (SGD with momentum). Dense gradients are then right.

    Raises
    ------
    OptimizerError
        It takes sparse gradients and does with them what rows of a table cannot follow.
    """
    taken = takes_sparse(optimizer, visible, weights)
    if taken is None:
        return None
    training, exact, rtol = taken
    found, shared, reason = _examine(training, group, exact, rtol)
    rows, gives_way = "a table", reason is not None and _is_dense(training, rtol)
    either = reason is None and _is_lazy(training, found, rtol)
    if reason is None and weights.dtype != exact.dtype:
        # The dtype of the state, and its initial value, is that of training.
        training = Training.of_few(optimizer, visible, weights)
        found, shared, reason = _examine(training, group, weights, _tolerance(weights))
        rows, gives_way = str(weights.dtype), either
    if reason is None:
        return found, shared, either
    if gives_way:
        return None
    raise OptimizerError(
        f"{type(optimizer).__name__} cannot train rows of {rows} made with sparse=True: given sparse gradients, {reason}; "
        "make the module with sparse=False, or use an optimizer such as SparseAdam, SGD or Adagrad"
    )


def _examine(
    training: Training, group: dict[str, Any], weights: Tensor, rtol: float
) -> tuple[dict[str, InitialValue], set[str], str | None]:
    """Return the state that follows the rows, the names of the other, and what keeps a table from training, if anything."""
    try:
        found, shared = initial_values_of_sparse(training.optimizer, group, weights)
        return found, shared, _reason(training, found, rtol)
    except StateError as error:
        return {}, set(), words(error)
    except Exception as error:
        pass_on_interrupt(error)
        return {}, set(), f"a trial failed ({words(error)})"


def _reason(training: Training, found: dict[str, InitialValue], rtol: float) -> str | None:
    whole = training.whole(found, gradient_of_lookups)
    if whole.swaps:
        return _SWAPS.format(whole.swaps)
    rows = training.by_rows(found, sparse=True)
    what = difference(whole, rows, rtol)
    if what is None:
        many = Training.of_many(training.optimizer, training.group, training.weights, _SOME)
        what = difference(many.whole(found, gradient_of_lookups), many.by_rows(found, sparse=True), rtol)
        return None if what is None else f"{_subject(what)} depends on the number of rows"
    if difference(whole, training.whole(found, gradient_of_lookups), rtol) is not None:
        return "its update draws random numbers"
    if difference(training.whole(found, sparse_gradient), rows, rtol) is None:
        return "it tells the lookups of one row in a batch apart (it does not coalesce the gradient)"
    return f"{_subject(what)} depends on rows that the step does not name, or those do not stay as they are"


def _is_dense(training: Training, rtol: float) -> bool:
    """Tell whether sparse gradients train the whole parameter as dense ones do, idle rows and all."""
    try:
        dense = training.whole({})
    except Exception as error:
        pass_on_interrupt(error)
        return False
    moves = Trajectory(dense.moves, dense.weights, {}, {})
    return difference(moves, training.whole({}, gradient_of_lookups), rtol) is None


def _is_lazy(training: Training, found: dict[str, InitialValue], rtol: float) -> bool:
    """Tell whether sparse gradients train as dense ones do whose idle rows are put back."""
    try:
        dense = training.whole(found, put_back=True)
    except Exception as error:
        pass_on_interrupt(error)
        return False
    whole = training.whole(found, gradient_of_lookups)
    return dense.planes.keys() == whole.planes.keys() and difference(dense, whole, rtol) is None
