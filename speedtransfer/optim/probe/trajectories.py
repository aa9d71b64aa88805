"""Trials of training by rows: as a table does it, a few rows at a time, and dense with idle rows put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.optim.leaves import leaves, put
from speedtransfer.optim.probe.trial import StateError, Trial

ROWS = 6
UPDATE = "the update"
STEPS = 24  # more than what optimizers do every five or ten steps
# Of rows 1 and 3 at least one is active in every step, and with others but once: what a step takes from all its rows shows.
# The last row is never active, and row 4 late. The number of rows changes, and does not.
_ACTIVE = (
    (0, 1, 3),
    (1, 2),
    (0, 3),
    (0, 1, 2),
    (2, 3),
    (1,),
    (0, 1, 2, 3),
    (1, 3, 4),
    (2, 3),
    (1, 4),
    (0, 1, 2, 3, 4),
    (0, 3),
)
_SCALES = (1.0, 0.01, 1.0, 10.0, 0.1, 3.0)


class HasStart(Protocol):
    """State that follows the rows."""

    def rows(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the state of untouched rows with these weights."""


@dataclass(frozen=True)
class Course:
    """How rows went.

    Attributes
    ----------
    moves : Tensor
        ``(steps, rows, dim)``, what each step added.
    weights : Tensor
        ``(rows, dim)`` at the end.
    planes : dict
        State of the rows at the end.
    shared : dict
        State that the rows share, and numbers that the group holds.
    swaps : str or None
        The method that changes the parameter between steps.
    """

    moves: Tensor
    weights: Tensor
    planes: dict[str, Tensor]
    shared: dict[str, Tensor]
    swaps: str | None = None

    def rows(self, which: list[int]) -> Course:
        """Return the same for the rows `which`."""
        planes = {name: value[which] for name, value in self.planes.items()}
        return Course(self.moves[:, which], self.weights[which], planes, self.shared)


def gradients(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients ``(STEPS, rows, dim)`` of several scales and which rows are active, ``(STEPS, rows)``.

    A row that is not active has a gradient of zero.
    """
    generator = torch.Generator("cpu").manual_seed(2)
    active = torch.zeros(STEPS, ROWS, dtype=torch.bool, device="cpu")  # whatever the default device is
    for step in range(STEPS):
        active[step, list(_ACTIVE[step % len(_ACTIVE)])] = True
    grads = torch.randn(STEPS, *weights.shape, generator=generator, device="cpu")
    grads *= torch.tensor(_SCALES, device="cpu").repeat(STEPS // len(_SCALES)).view(-1, 1, 1)
    grads[:, [0, 2, 4]] *= 100  # a norm over the parameter would notice
    grads *= active.unsqueeze(2)
    return grads.to(weights), active.to(weights.device)


def sparse_gradient(values: Tensor, rows: Tensor | None = None, num_rows: int | None = None) -> Tensor:
    """Return the sparse gradient of a parameter of `num_rows` rows, of which `rows` (n,), sorted, have `values` (n, dim).

    By default the parameter has just those n rows. The memory of `values` is shared.
    """
    rows = torch.arange(len(values), device=values.device) if rows is None else rows
    shape = (len(values) if num_rows is None else num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True)


def of_lookups(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the same gradient as ``nn.Embedding(sparse=True)`` makes it of two lookups of each row: not coalesced."""
    index = torch.cat([rows, rows.flip(0)]).unsqueeze(0)
    halves = torch.cat([values, values.flip(0)]) / 2
    return torch.sparse_coo_tensor(index, halves, (num_rows, *values.shape[1:]), check_invariants=False)


def dense_gradient(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the same gradient with zeros for the other rows."""
    grad = values.new_zeros(num_rows, *values.shape[1:])
    grad[rows] = values
    return grad


def wholly(
    optimizer: Optimizer,
    group: dict[str, Any],
    found: Iterable[str],
    weights: Tensor,
    grads: Tensor,
    active: Tensor,
    gradient: Callable[[Tensor, Tensor, int], Tensor],
) -> Course:
    """Step an optimizer as torch does, on the whole parameter with a `gradient` made of that of the active rows."""
    trial = Trial(optimizer, group, weights)
    moves = []
    for grad, touched in zip(grads, active, strict=True):
        before = trial.param.detach().clone()
        trial.step(gradient(grad[touched], touched.nonzero().flatten(), len(weights)))
        moves.append(trial.param.detach() - before)
    planes = {name: value.clone() for name, value in leaves(trial.state).items() if name in found}
    weights = trial.param.detach().clone()
    return Course(torch.stack(moves), weights, planes, _shared(trial, planes), _swaps(trial))


def densely(
    optimizer: Optimizer,
    group: dict[str, Any],
    found: Mapping[str, HasStart],
    weights: Tensor,
    grads: Tensor,
    active: Tensor,
) -> Course:
    """Step a dense optimizer and put back the idle rows and their state after every step."""
    trial = Trial(optimizer, group, weights)
    moves = []
    for grad, touched in zip(grads, active, strict=True):
        before, idle = trial.param.detach().clone(), ~touched
        old = {name: value.clone() for name, value in leaves(trial.state).items() if name in found}
        now = trial.step(grad)
        trial.param.data[idle] = before[idle]
        for name in found.keys() & now.keys():
            kept = old[name] if name in old else found[name].rows(before, now[name].dtype)
            now[name][idle] = kept[idle]
        moves.append(trial.param.detach() - before)
    planes = {name: value.clone() for name, value in leaves(trial.state).items() if name in found}
    weights = trial.param.detach().clone()
    return Course(torch.stack(moves), weights, planes, _shared(trial, planes), _swaps(trial))


def lazily(
    optimizer: Optimizer,
    group: dict[str, Any],
    found: Mapping[str, HasStart],
    weights: Tensor,
    grads: Tensor,
    active: Tensor,
    sparse: bool = False,
) -> Course:
    """Step an optimizer whose parameter and state hold the active rows only, each time others."""
    trial = Trial(optimizer, group, weights[:0])
    table, moves = weights.clone(), []
    planes: dict[str, Tensor] = {}
    for grad, touched in zip(grads, active, strict=True):
        before = table.clone()
        trial.param.data = table[touched]
        made = {name: value for name, value in leaves(trial.state).items() if name in found and name not in planes}
        planes.update({name: found[name].rows(before, value.dtype) for name, value in made.items()})
        put(trial.state, {name: value[touched] for name, value in planes.items()})
        now = trial.step(sparse_gradient(grad[touched]) if sparse else grad[touched])
        for name in found.keys() & now.keys():
            if name not in planes:
                planes[name] = found[name].rows(before, now[name].dtype)
            if now[name].shape != planes[name][touched].shape:
                raise StateError(f"its state {name!r} does not keep its shape")
            planes[name][touched] = now[name]
        table[touched] = trial.param.detach()
        trial.param.data = weights[:0]
        trial.param.grad = None
        moves.append(table - before)
    return Course(torch.stack(moves), table, planes, _shared(trial, planes))


def _shared(trial: Trial, planes: dict[str, Tensor]) -> dict[str, Tensor]:
    shared = {name: value for name, value in leaves(trial.state).items() if name not in planes}
    group = {key: value for key, value in trial.optimizer.param_groups[0].items() if key != "params"}
    numbers = {key: torch.tensor(float(v), device="cpu") for key, v in group.items() if isinstance(v, float | int)}
    return {**numbers, **leaves(group), **shared}


def _swaps(trial: Trial) -> str | None:
    """Return the method by which the optimizer would change its parameter between training and evaluation."""
    before = trial.param.detach().clone()
    for name in ("eval", "train"):
        method = getattr(trial.optimizer, name, None)
        if callable(method):
            method()
            if not torch.equal(trial.param.detach(), before):
                return name
    return None


def difference(expected: Course, got: Course, rtol: float) -> str | None:
    """Return what differs between two courses, if anything does: the update, or a state."""
    # No more can be told of a move than the weights that it was added to hold of it.
    floor = 8 * torch.finfo(expected.weights.dtype).eps * expected.weights.abs().nan_to_num(0, 0, 0)
    largest = floor.amax(-1, keepdim=True) if floor.numel() else floor
    if not close(expected.moves, got.moves, rtol, largest):
        return UPDATE
    for name, value in expected.planes.items():
        if name not in got.planes or not close(value, got.planes[name], rtol):
            return name
    for name, value in expected.shared.items():
        if name not in got.shared or not close(value, got.shared[name], rtol):
            return name
    return None


def close(expected: Tensor, value: Tensor, rtol: float = 1e-3, floor: Tensor | float = 0.0) -> bool:
    """Tell whether `value` is `expected`, but for the rounding of vector units at the end of an array."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not expected.dtype.is_floating_point or not expected.numel():
        return torch.equal(expected, value)
    size = expected.abs().nan_to_num(0, 0, 0)
    scale = size.amax(-1, keepdim=True) if size.dim() > 1 else size  # each row by its own
    error = (expected - value).abs()
    same = (error <= rtol * scale + floor) | (expected == value) | (expected.isnan() & value.isnan())
    return bool(same.all())
