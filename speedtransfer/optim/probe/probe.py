"""What an optimizer keeps for a row: found by running it on a few rows, not by knowing its name.

A trial of the user's optimizer class with the user's hyperparameters tells which entries of its state are planes (one row of
state per row of the parameter), which are shared by the whole table, what a row that was never touched starts from, and
whether a row's update depends on that row and its state alone, without which rows cannot be trained apart from their table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.probe.initial_values import Start, starts
from speedtransfer.optim.probe.trajectories import (
    ROWS,
    STEPS,
    UPDATE,
    Course,
    dense_gradient,
    densely,
    difference,
    gradients,
    lazily,
    wholly,
)
from speedtransfer.optim.probe.trial import StateError, Trial, outside_state, without_gradients, words
from speedtransfer.optim.sparse import takes_sparse_only, try_sparse

_VISIBLE_LR = 1e-2
_VISIBLE_DECAY = 0.1
_MANY, _MANY_STEPS = 130, 2
_ADVICE = "use a row-by-row optimizer (SGD, Adam, AdamW, Adamax, Adagrad, ...) for this embedding"


@dataclass(frozen=True)
class PlaneSpec:
    """One plane of state.

    Attributes
    ----------
    tail : tuple of int
        Shape of a row's state: ``(dim,)``, or ``()`` for one number a row.
    dtype : torch.dtype
    start : float or None
        What an untouched row holds; None: a copy of its weights (averages, slow weights).
    late : bool
        The optimizer makes it in a later step than its first.
    """

    tail: tuple[int, ...]
    dtype: torch.dtype
    start: float | None
    late: bool = False


class Findings(dict[str, PlaneSpec]):
    """The planes by name.

    Attributes
    ----------
    shared : frozenset of str
        The names of the tensors that all rows share.
    gradient : {"dense", "sparse", "either"}
        What a step must find as the gradient of the active rows; "either": both train the same.
    """

    shared: frozenset[str] = frozenset()
    gradient: str = "dense"


def probe(optimizer: Optimizer, group: dict[str, Any], param: Tensor, sparse: bool = False) -> Findings:
    """Return the planes that `optimizer` keeps for a parameter of `group` with the dtype, width and device of `param`.

    A tensor within a list or a dict has a name such as ``"buffers.0"``. With `sparse` the gradients are what
    ``nn.Embedding(sparse=True)`` leaves, where the optimizer takes such.

    Raises
    ------
    OptimizerError
        The update is not row by row, or the optimizer does not run on a few dense rows.
    """
    name = type(optimizer).__name__
    inner = _wrapped(optimizer)
    if inner is not None:  # a trial of it would step the real one
        raise OptimizerError(
            f"{name} wraps {type(inner).__name__}, whose parameters a trial would move; give the table to that one itself"
        )
    devices = [param.device] if param.is_cuda else []
    bare = {
        key: value for key, value in group.items() if key in optimizer.defaults
    }  # without counters kept in the group
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_gradients(optimizer),
    ):
        _seed(param.device, 0)
        try:
            return _probe(optimizer, group, param, sparse)
        except OptimizerError:
            raise
        except Exception as error:
            reason = _reason(optimizer, group, param, error)
            try:
                if bare.keys() | {"params"} != group.keys():
                    return _probe(optimizer, bare, param, sparse)
            except OptimizerError:
                raise
            except Exception:  # the first reason is nearer to what the user did
                pass
            raise OptimizerError(f"{name} cannot train rows of a table: {reason}") from error


def leaves_idle_rows(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> bool:
    """Tell whether a step of `optimizer` changes nothing of a row with a gradient of zero, neither its weights nor its state.

    Rows that a batch does not touch then go the same way whether they are there or not. `probe` must accept the optimizer.
    """
    devices = [param.device] if param.is_cuda else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_gradients(optimizer),
    ):
        _seed(param.device, 0)
        try:
            weights, plain = _weights(param), _visible(group)
            found, _ = starts(optimizer, group, weights)
            grads, active = gradients(weights)
            put_back = densely(optimizer, plain, found, weights, grads, active)
            as_they_go = wholly(optimizer, plain, found, weights, grads, active, dense_gradient)
        except Exception:  # not known, then
            return False
        return difference(put_back, as_they_go, 0.0) is None


def _seed(device: torch.device, seed: int) -> None:
    """Seed what a trial draws from: torch.manual_seed would seed the devices, too, that nobody restores."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _wrapped(optimizer: Optimizer) -> Optimizer | None:
    for value in vars(optimizer).values():
        for item in value if isinstance(value, list | tuple) else value.values() if type(value) is dict else [value]:
            if isinstance(item, Optimizer):
                return item
    return None


def _reason(optimizer: Optimizer, group: dict[str, Any], param: Tensor, error: Exception) -> str:
    if "closure" in str(error):
        return "it evaluates the loss several times within a step (closure); use Adam or SGD"
    text = words(error)
    if isinstance(error, StateError):
        return f"{text}; {_ADVICE}"
    if takes_sparse_only(optimizer, _visible(group), _weights(param)):
        return f"it takes only sparse gradients ({text}); make the embedding with sparse=True, or use Adam or SGD"
    return f"a trial on {ROWS} dense rows failed ({text}); use a row-by-row optimizer such as Adam or SGD"


def _weights(param: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)  # whatever the default device is
    return torch.randn(ROWS, param.shape[1], generator=generator, device="cpu").to(param)


def _probe(optimizer: Optimizer, group: dict[str, Any], param: Tensor, sparse: bool) -> Findings:
    weights = _weights(param)
    by_sparse = try_sparse(optimizer, group, _visible(group), weights) if sparse else None
    if by_sparse is None:
        return _probe_densely(optimizer, group, weights)
    findings = _findings(by_sparse.found, by_sparse.shared, "sparse")
    if by_sparse.either:
        try:
            dense = _probe_densely(optimizer, group, weights)
        except Exception:  # sparse gradients it is, then
            return findings
        if dense == findings:
            dense.gradient = "either"
            return dense
    return findings


def _findings(found: dict[str, Start], shared: set[str], gradient: str) -> Findings:
    findings = Findings(
        (key, PlaneSpec(tuple(start.value.shape[1:]), start.value.dtype, start.start, start.late))
        for key, start in found.items()
    )
    findings.shared, findings.gradient = frozenset(shared), gradient
    return findings


def _probe_densely(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> Findings:
    found, shared = starts(optimizer, group, weights)
    plain = _visible(group)
    if weights.dtype != torch.float64:  # what depends on the dtype, such as state of few bits, shows in that alone
        _check(optimizer, plain, weights, found, 1e-3 if weights.dtype == torch.float32 else 0.1, STEPS // 2)
    try:
        _check_exactly(optimizer, plain, weights.double(), found, 1e-5)
    except OptimizerError:
        raise
    except Exception:  # it does not compute in double precision
        _check_exactly(optimizer, plain, weights.float(), found, 1e-3)
    return _findings(found, shared, "dense")


def _visible(group: dict[str, Any]) -> dict[str, Any]:
    """Return `group` with rates at which dependence between rows cannot drown: a schedule may start from zero."""
    decays = {
        k: max(v, _VISIBLE_DECAY) for k, v in group.items() if k == "weight_decay" and isinstance(v, float) and v > 0
    }
    return {**group, **decays, **({"lr": _VISIBLE_LR} if "lr" in group else {})}


def _check(
    optimizer: Optimizer,
    group: dict[str, Any],
    weights: Tensor,
    found: dict[str, Start],
    rtol: float,
    steps: int = STEPS,
) -> Course:
    """Train rows as a table does, and a few of them alone and dense; refuse where that is not the same.

    Returns how the few went.
    """
    # The scale of the rows' weights differs: a norm over the parameter would notice.
    grads, active = (values[:steps] for values in gradients(weights))
    few = [1, 3]  # of which one is active in every step, so that both count the same steps
    weights = weights * torch.logspace(-1, 1, ROWS, device="cpu").to(weights).unsqueeze(1)

    def course(rows: list[int]) -> Course:
        return densely(optimizer, group, found, weights[rows], grads[:, rows], active[:, rows])

    alone = course(few)
    failure, what = None, None
    try:
        what = difference(alone, lazily(optimizer, group, found, weights, grads, active).rows(few), rtol)
    except Exception as error:
        failure = error
    if failure is not None or what is not None:
        _explain(optimizer, group, weights, alone, course, few, rtol, failure)
    if alone.swaps:
        _refuse(optimizer, f"its {alone.swaps}() changes the whole parameter between steps, when no row is there")
    return alone


def _check_exactly(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, found: dict[str, Start], rtol: float
) -> None:
    """Check with more precision than the table has, and also a long parameter: some factor the state of those only."""
    if any(start.value.dtype in (torch.float16, torch.bfloat16) for start in found.values()):
        found, _ = starts(optimizer, group, weights)  # what rows start from was rounded
    alone = _check(optimizer, group, weights, found, rtol)
    if not alone.moves.any() and alone.moves.numel():
        _refuse(optimizer, "a trial moved no row (a rate of zero, or parameters held elsewhere than in param_groups)")
    generator = torch.Generator("cpu").manual_seed(3)
    many = torch.randn(_MANY, weights.shape[1], generator=generator, device="cpu").to(weights)
    grads = torch.randn(_MANY_STEPS, *many.shape, generator=generator, device="cpu").to(weights)
    active = torch.ones(_MANY_STEPS, _MANY, dtype=torch.bool, device=weights.device)
    few = [0, 1]
    alone = densely(optimizer, group, found, many[few], grads[:, few], active[:, few])
    try:
        what = difference(alone, densely(optimizer, group, found, many, grads, active).rows(few), rtol)
    except Exception as error:
        raise _dependent(optimizer, UPDATE) from error
    if what is not None:
        raise _dependent(optimizer, what)


def _dependent(optimizer: Optimizer, what: str) -> OptimizerError:
    subject = "the update of a row" if what == UPDATE else f"state {what!r}"
    return OptimizerError(
        f"{type(optimizer).__name__} is not row by row: {subject} depends on the other rows of the parameter, and most of a "
        f"table is not there during a step; {_ADVICE}, in an optimizer of its own if need be"
    )


def _explain(
    optimizer: Optimizer,
    group: dict[str, Any],
    weights: Tensor,
    alone: Course,
    course: Callable[[list[int]], Course],
    few: list[int],
    rtol: float,
    failure: Exception | None,
) -> None:
    """Raise with the reason for which rows of a table go another way than a few of them `alone`."""
    _seed(weights.device, 1)
    if difference(alone, course(few), rtol) is not None:
        _refuse(optimizer, "its update draws random numbers, so that a trial cannot tell whether it is row by row")

    def stepped(rows: int) -> Optimizer:
        trial = Trial(optimizer, group, weights[:rows])
        trial.step(torch.ones_like(weights[:rows]))
        return trial.optimizer

    outside = outside_state(stepped, (ROWS, ROWS - 1))
    what = difference(alone, course(list(range(ROWS))).rows(few), rtol)
    if what is not None and what not in outside:
        raise _dependent(optimizer, what)
    if failure is not None and not outside:
        raise failure
    where = f" ({', '.join(outside)})" if outside else ""
    _refuse(optimizer, f"it keeps something of the rows outside optimizer.state{where}, where it does not follow them")


def _refuse(optimizer: Optimizer, reason: str) -> None:
    raise OptimizerError(f"{type(optimizer).__name__} cannot train rows of a table: {reason}; {_ADVICE}")
