"""Find out what an optimizer keeps for a row by running it on a few rows, not by knowing its name.

A trial of the user's optimizer class with the user's hyperparameters tells which entries of its state are planes (one row of
state per row of the parameter), which are shared by the whole table, their initial value in a row that was never touched, and
whether a row's update depends on that row and its state alone, without which rows cannot be trained apart from their table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.interrupts import pass_on_interrupt
from speedtransfer.optim.probe.initial_values import initial_values
from speedtransfer.optim.probe.outcomes import remembered
from speedtransfer.optim.probe.trajectories import ROWS, InitialValue, Training, difference
from speedtransfer.optim.probe.trial import StateError, without_gradients, words
from speedtransfer.optim.probe.verdicts import ADVICE, check_dense, check_sparse, seed, takes_sparse

_VISIBLE_LR = 1e-2
_VISIBLE_DECAY = 0.1


@dataclass(frozen=True)
class PlaneSpec:
    """One plane of state.

    Attributes
    ----------
    tail : tuple of int
        Shape of a row's state: ``(dim,)``, or ``()`` for one number a row.
    dtype : torch.dtype
    initial : float or None
        What an untouched row holds; None: a copy of its weights (averages, slow weights).
    late : bool
        The optimizer makes it in a later step than its first.
    """

    tail: tuple[int, ...]
    dtype: torch.dtype
    initial: float | None
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


@remembered
def probe_optimizer(optimizer: Optimizer, group: dict[str, Any], param: Tensor, sparse: bool = False) -> Findings:
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
    # Without counters kept in the group.
    bare = {key: value for key, value in group.items() if key in optimizer.defaults}
    with _isolated(optimizer, param.device):
        try:
            return _probe(optimizer, group, param, sparse)
        except OptimizerError:
            raise
        except Exception as error:
            pass_on_interrupt(error)
            reason = _reason(optimizer, group, param, error)
            try:
                if bare.keys() | {"params"} != group.keys():
                    return _probe(optimizer, bare, param, sparse)
            except OptimizerError:
                raise
            except Exception as again:  # the first reason is nearer to what the user did
                pass_on_interrupt(again)
            raise OptimizerError(f"{name} cannot train rows of a table: {reason}") from error


@remembered
def leaves_idle_rows(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> bool:
    """Tell whether a step of `optimizer` changes nothing of a row with a gradient of zero, neither its weights nor its state.

    Rows that a batch does not touch then go the same way whether they are there or not. `probe_optimizer` must accept the
    optimizer.
    """
    with _isolated(optimizer, param.device):
        try:
            weights = _weights(param)
            found, _ = initial_values(optimizer, group, weights)
            training = Training.of_few(optimizer, _visible(group), weights)
            put_back, as_they_go = training.whole(found, put_back=True), training.whole(found)
        except Exception as error:  # not known, then
            pass_on_interrupt(error)
            return False
        return difference(put_back, as_they_go, 0.0) is None


@contextlib.contextmanager
def _isolated(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Keep trials from what they must not change: random numbers, and parameters whose gradients the optimizer holds."""
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.enable_grad(),
        # Optimizers of torch 2.6 make their count of steps where the default device is.
        contextlib.nullcontext() if torch.empty(0, device=None).is_cpu else torch.device("cpu"),
        without_gradients(optimizer),
    ):
        seed(device, 0)
        yield


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
        return f"{text}; {ADVICE}"
    if takes_sparse(optimizer, _visible(group), _weights(param)) is not None:
        return f"it takes only sparse gradients ({text}); make the embedding with sparse=True, or use Adam or SGD"
    return f"a trial on {ROWS} dense rows failed ({text}); use a row-by-row optimizer such as Adam or SGD"


def _weights(param: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)  # whatever the default device is
    return torch.randn(ROWS, param.shape[1], generator=generator, device="cpu").to(param)


def _probe(optimizer: Optimizer, group: dict[str, Any], param: Tensor, sparse: bool) -> Findings:
    weights = _weights(param)
    by_sparse = check_sparse(optimizer, group, _visible(group), weights) if sparse else None
    if by_sparse is None:
        return _probe_densely(optimizer, group, weights)
    found, shared, either = by_sparse
    findings = _findings(found, shared, "sparse")
    if either:
        try:
            dense = _probe_densely(optimizer, group, weights)
        except Exception as error:  # sparse gradients it is, then
            pass_on_interrupt(error)
            return findings
        if dense == findings:
            dense.gradient = "either"
            return dense
    return findings


def _probe_densely(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> Findings:
    found, shared = initial_values(optimizer, group, weights)
    check_dense(optimizer, _visible(group), weights, found)
    return _findings(found, shared, "dense")


def _findings(found: dict[str, InitialValue], shared: set[str], gradient: str) -> Findings:
    findings = Findings(
        (name, PlaneSpec(tuple(value.made.shape[1:]), value.made.dtype, value.initial, value.late))
        for name, value in found.items()
    )
    findings.shared, findings.gradient = frozenset(shared), gradient
    return findings


def _visible(group: dict[str, Any]) -> dict[str, Any]:
    """Return `group` with rates at which dependence between rows cannot drown: a schedule may start from zero."""
    decays = {
        k: max(v, _VISIBLE_DECAY) for k, v in group.items() if k == "weight_decay" and isinstance(v, float) and v > 0
    }
    return {**group, **decays, **({"lr": _VISIBLE_LR} if "lr" in group else {})}
