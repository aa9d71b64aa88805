"""What an optimizer keeps for a row: found by running it on a few rows, not by knowing its name.

A trial of the user's optimizer class with the user's hyperparameters tells which entries of its state are planes (one row of
state per row of the parameter), which are shared by the whole table, what a row that was never touched starts from, and
whether a row's update depends on that row alone, without which rows cannot be trained apart from their table.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError

_ROWS = 5
_SUBSET = [3, 1]
_STEPS = 3
_VISIBLE_LR = 1e-2


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
    """

    tail: tuple[int, ...]
    dtype: torch.dtype
    start: float | None


def probe(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, PlaneSpec]:
    """Return the planes that `optimizer` keeps for a parameter of `group` with the dtype, width and device of `param`.

    Raises
    ------
    OptimizerError
        The update is not row by row, or the optimizer does not run on a few dense rows.
    """
    name = type(optimizer).__name__
    dim = param.shape[1]
    inner = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if inner is not None:  # a trial of it would step the real one
        raise OptimizerError(
            f"{name} wraps {type(inner).__name__}, whose parameters a trial would move; give the table to that one itself"
        )
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(_ROWS, dim, generator=generator)
        grads = torch.randn(_STEPS, _ROWS, dim, generator=generator)
        grads[:, [r for r in range(_ROWS) if r not in _SUBSET]] *= 100  # a norm over the parameter would notice
        weights, grads = weights.to(param), grads.to(param)
        try:
            planes = _planes(optimizer, group, weights, grads)
            # Dependence between rows must not drown in a small learning rate (warmup) or in the table's low precision.
            plain = {**group, "lr": _VISIBLE_LR} if "lr" in group else group
            exact = param.dtype if param.dtype == torch.float64 else torch.float32
            weights, grads = weights.to(exact), grads.to(exact)
            all_rows = _run(optimizer, plain, weights, grads)
            some_rows = _run(optimizer, plain, weights[_SUBSET], grads[:, _SUBSET])
        except Exception as error:
            raise OptimizerError(f"{name} cannot train rows of a table: {_reason(name, error)}") from error
    among = {"the update": (all_rows[0] - weights)[_SUBSET], **{key: all_rows[1][key][_SUBSET] for key in planes}}
    alone = {"the update": some_rows[0] - weights[_SUBSET], **some_rows[1]}
    for what, value in among.items():
        if not _close(value, alone.get(what)):
            raise OptimizerError(
                f"{name} is not row by row: {what} of a row depends on the other rows of the parameter, and most of a table "
                "is not there during a step; use a row-by-row optimizer (SGD, Adam, AdamW, Adamax, Adagrad, ...) for this "
                "embedding, in an optimizer of its own if need be"
            )
    return planes


def _reason(name: str, error: Exception) -> str:
    if "closure" in str(error):
        return "it evaluates the loss several times within a step (closure); use Adam or SGD"
    if name == "SparseAdam":
        return "it takes only sparse gradients and the active rows have a dense one; use Adam, its near equivalent"
    return f"a trial on {_ROWS} dense rows failed ({error}); use a row-by-row optimizer such as Adam or SGD"


def _planes(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, grads: Tensor) -> dict[str, PlaneSpec]:
    """Sort state into planes and shared entries; a zero-gradient step shows what an untouched row holds."""
    # With the learning rate as it is, zero too: Rprop's step_size starts from it.
    still = torch.zeros_like(grads[:1])
    moved, state = _run(optimizer, group, weights, still)
    _, fewer = _run(optimizer, group, weights[1:], still[:, 1:])
    _, at_zero = _run(optimizer, group, torch.zeros_like(weights), still)  # weight decay adds nothing there
    planes = {}
    for key, value in state.items():
        if not _follows_rows(value, _ROWS) or not _follows_rows(fewer[key], _ROWS - 1):
            continue
        if value.shape == moved.shape and torch.equal(value, moved):
            start = None
        else:
            values = at_zero[key].unique()
            if len(values) > 1:
                raise ValueError(f"state {key!r} of an untouched row has no one value to start from")
            start = float(values[0]) if len(values) else 0.0  # none: rows of no columns
            if start != 0 and _zero_does_as_well(optimizer, _moving(group), weights, grads, key, start):
                start = 0.0  # zero pages take no memory: Adamax's exp_inf would be eps all over
        planes[key] = PlaneSpec(tuple(value.shape[1:]), value.dtype, start)
    return planes


def _follows_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _zero_does_as_well(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, grads: Tensor, key: str, start: float
) -> bool:
    """Tell whether rows whose state `key` starts from zero go the same way as from `start`."""
    ends = []
    for first in (start, 0.0):
        param = nn.Parameter(weights.clone())
        trial = _like(optimizer, group, param)
        _step(trial, param, torch.zeros_like(weights))  # makes the state
        trial.state[param][key].fill_(first)
        for grad in grads:
            _step(trial, param, grad)
        ends.append((param.detach(), trial.state[param][key]))
    return all(torch.equal(kept, zeroed) for kept, zeroed in zip(*ends, strict=True))


def _step(trial: Optimizer, param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad.clone()
    step = type(trial).step
    # Without the hooks that others have registered for all optimizers: this step is no business of theirs.
    getattr(step, "__wrapped__", step)(trial) if getattr(step, "hooked", False) else trial.step()


def _run(optimizer: Optimizer, group: dict[str, Any], weights: Tensor, grads: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Step a fresh optimizer of the same kind on a copy of `weights`; return the rows and their state after it."""
    param = nn.Parameter(weights.clone())
    trial = _like(optimizer, group, param)
    for grad in grads:
        _step(trial, param, grad)
    return param.detach(), dict(trial.state[param])


def _moving(group: dict[str, Any]) -> dict[str, Any]:
    """Return `group` with a learning rate at which something shows: a schedule may start from zero."""
    lr = group.get("lr")
    return {**group, "lr": 1e-3} if lr is not None and float(lr) == 0.0 else group


def _like(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> Optimizer:
    """Return a fresh optimizer of the same class with the hyperparameters of `group`."""
    hyper = {key: value for key, value in group.items() if key != "params"}
    accepted = inspect.signature(type(optimizer).__init__).parameters
    try:
        # `defaults` may hold what the constructor does not take (AdamW's decoupled_weight_decay, a scheduler's initial_lr).
        trial = type(optimizer)([param], **{key: value for key, value in hyper.items() if key in accepted})
    except Exception:
        # A constructor of another form: a copy of the instance without its parameters, state, hooks and GradScaler.
        trial = object.__new__(type(optimizer))
        passing = ("step", "grad_scale", "found_inf")  # schedulers wrap step
        trial.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in passing})
        trial.__dict__.update({k: OrderedDict() for k, v in trial.__dict__.items() if k.endswith("_hooks") and v})
        trial.state = defaultdict(dict)
        trial.param_groups = [{"params": [param]}]
    else:  # hyperparameters may also be attributes of the instance
        trial.__dict__.update({k: v for k, v in optimizer.__dict__.items() if isinstance(v, bool | int | float | str)})
    trial.param_groups[0].update(hyper)  # also those that a constructor takes as **kwargs
    return trial


def _close(expected: Tensor, value: Any) -> bool:
    """Tell whether `value` is `expected`, but for the rounding of vector units at the end of an array."""
    if not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(expected, value)
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return torch.allclose(expected, value, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
