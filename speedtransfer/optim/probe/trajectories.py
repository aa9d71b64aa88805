"""Train a few rows sparsely and densely, and compare the trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
_ACTIVE = [
    list(map(int, rows)) for rows in ["013", "12", "03", "012", "23", "1", "0123", "134", "23", "14", "01234", "03"]
]
_SCALES = (1.0, 0.01, 1.0, 10.0, 0.1, 3.0)
_MANY, _MANY_STEPS = 130, 2


@dataclass(frozen=True)
class InitialValue:
    """What an untouched row holds of a tensor of state that follows the rows.

    Attributes
    ----------
    made : Tensor
        That tensor after the step that made it.
    initial : float or None
        None: a copy of the weights.
    late : bool
        The optimizer makes it in a later step than its first.
    """

    made: Tensor
    initial: float | None
    late: bool

    def rows(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the state of untouched rows with these weights."""
        if self.initial is None:
            return weights.to(dtype, copy=True)
        return self.made.new_full((len(weights), *self.made.shape[1:]), self.initial, dtype=dtype)


@dataclass(frozen=True)
class Trajectory:
    """What each step added to rows, ``(steps, rows, dim)``, and at the end their weights, their state and what they share."""

    moves: Tensor
    weights: Tensor
    planes: dict[str, Tensor]
    shared: dict[str, Tensor]
    # The method that changes the parameter between steps.
    swaps: str | None = None

    def of(self, rows: list[int]) -> Trajectory:
        """Return the same for some of the rows."""
        planes = {name: value[rows] for name, value in self.planes.items()}
        return Trajectory(self.moves[:, rows], self.weights[rows], planes, self.shared)


# --- gradients ----------------------------------------------------------------------------------------------------------

# Of the active rows, (n, dim), which they are, (n,), and the number of all rows: the gradient of the parameter.
Gradient = Callable[[Tensor, Tensor, int], Tensor]


def sparse_gradient(values: Tensor, rows: Tensor | None = None, num_rows: int | None = None) -> Tensor:
    """Return the sparse gradient of a parameter of `num_rows` rows, of which `rows` (n,), sorted, have `values` (n, dim).

    By default the parameter has just those n rows. The memory of `values` is shared.
    """
    rows = torch.arange(len(values), device=values.device) if rows is None else rows
    shape = (len(values) if num_rows is None else num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, device=values.device, check_invariants=False, is_coalesced=True
    )


def gradient_of_lookups(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the gradient that ``nn.Embedding(sparse=True)`` makes of two lookups of each row: not coalesced."""
    index = torch.cat([rows, rows.flip(0)]).unsqueeze(0)
    halves = torch.cat([values, values.flip(0)]) / 2
    shape = num_rows, *values.shape[1:]
    return torch.sparse_coo_tensor(index, halves, shape, device=values.device, check_invariants=False)


def dense_gradient(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the gradient with zeros for the other rows."""
    grad = values.new_zeros(num_rows, *values.shape[1:])
    grad[rows] = values
    return grad


# --- training -----------------------------------------------------------------------------------------------------------


# Torch warns once a process where nobody has said whether it should check what sparse tensors hold.
_unchecked = torch.sparse.check_sparse_tensor_invariants(False)


class Training:
    """A few rows to be trained by an optimizer like a given one, and the gradients to do it with.

    Parameters
    ----------
    optimizer : Optimizer
    group : dict
        Hyperparameters.
    weights : Tensor
        ``(rows, dim)``.
    grads, active : Tensor
        ``(steps, rows, dim)`` and bool ``(steps, rows)``: those of the other rows do not count.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], weights: Tensor, grads: Tensor, active: Tensor
    ) -> None:
        self.optimizer, self.group, self.weights = optimizer, group, weights
        self._grads, self._active = grads.to(weights), active.to(weights.device)

    @classmethod
    def of_few(cls, optimizer: Optimizer, group: dict[str, Any], weights: Tensor, steps: int = STEPS) -> Training:
        """Return the training of `ROWS` rows by gradients of several scales."""
        generator = torch.Generator("cpu").manual_seed(2)  # whatever the default device is
        active = torch.zeros(STEPS, ROWS, dtype=torch.bool, device="cpu")
        for step in range(STEPS):
            active[step, list(_ACTIVE[step % len(_ACTIVE)])] = True
        grads = torch.randn(STEPS, *weights.shape, generator=generator, device="cpu")
        grads *= torch.tensor(_SCALES, device="cpu").repeat(STEPS // len(_SCALES)).view(-1, 1, 1)
        # The scale of gradients and weights differs by row: a norm over the parameter would notice.
        grads[:, [0, 2, 4]] *= 100
        weights = weights * torch.logspace(-1, 1, ROWS, device="cpu").to(weights).unsqueeze(1)
        return cls(optimizer, group, weights, grads[:steps], active[:steps])

    @classmethod
    def of_many(
        cls, optimizer: Optimizer, group: dict[str, Any], weights: Tensor, rows: slice | list[int] = slice(None)
    ) -> Training:
        """Return the training of `rows` in a long parameter with the width of `weights`, in every step."""
        generator = torch.Generator("cpu").manual_seed(3)
        many = torch.randn(_MANY, weights.shape[1], generator=generator, device="cpu").to(weights)
        active = torch.zeros(_MANY_STEPS, _MANY, dtype=torch.bool, device="cpu")
        active[:, rows] = True
        grads = torch.randn(_MANY_STEPS, *many.shape, generator=generator, device="cpu")
        return cls(optimizer, group, many, grads, active)

    def of(self, rows: list[int]) -> Training:
        """Return the training of some of the rows, alone in their parameter."""
        weights = self.weights[rows]
        return Training(self.optimizer, self.group, weights, self._grads[:, rows], self._active[:, rows])

    def _steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, by step, the gradient of the active rows and which they are."""
        for grad, active in zip(self._grads, self._active, strict=True):
            yield grad[active], active

    @_unchecked
    def whole(
        self, found: dict[str, InitialValue], gradient: Gradient = dense_gradient, put_back: bool = False
    ) -> Trajectory:
        """Step on the whole parameter, as torch does, and where `put_back` restore the idle rows after every step.

        Parameters
        ----------
        found : dict
            The state that follows the rows, by name.
        gradient : callable
            Makes that of the parameter.
        """
        trial = Trial(self.optimizer, self.group, self.weights)
        moves = []
        for grad, active in self._steps():
            before = trial.param.detach().clone()
            old = _cloned(trial, found) if put_back else {}
            now = trial.step(gradient(grad, active.nonzero().flatten(), len(self.weights)))
            if put_back:
                trial.param.data[~active] = before[~active]
                for name in found.keys() & now.keys():
                    kept = old[name] if name in old else found[name].rows(before, now[name].dtype)
                    now[name][~active] = kept[~active]
            moves.append(trial.param.detach() - before)
        weights, planes = trial.param.detach().clone(), _cloned(trial, found)
        return Trajectory(torch.stack(moves), weights, planes, _shared(trial, planes), _swaps(trial))

    @_unchecked
    def by_rows(self, found: dict[str, InitialValue], sparse: bool = False) -> Trajectory:
        """Step with a parameter and state of the active rows only, each time others, as a table does."""
        trial = Trial(self.optimizer, self.group, self.weights[:0])
        table, moves = self.weights.clone(), []
        planes: dict[str, Tensor] = {}

        def add_planes(state: dict[str, Any], weights: Tensor) -> None:
            for name in found.keys() & state.keys() - planes.keys():
                planes[name] = found[name].rows(weights, state[name].dtype)

        for grad, active in self._steps():
            before = table.clone()
            trial.param.data = table[active]
            add_planes(leaves(trial.state), before)
            put(trial.state, {name: value[active] for name, value in planes.items()})
            now = trial.step(sparse_gradient(grad) if sparse else grad)
            add_planes(now, before)
            for name in planes.keys() & now.keys():
                if now[name].shape != planes[name][active].shape:
                    raise StateError(f"its state {name!r} does not keep its shape")
                planes[name][active] = now[name]
            table[active] = trial.param.detach()
            trial.param.data, trial.param.grad = self.weights[:0], None
            moves.append(table - before)
        return Trajectory(torch.stack(moves), table, planes, _shared(trial, planes))


def _cloned(trial: Trial, found: dict[str, InitialValue]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in leaves(trial.state).items() if name in found}


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


# --- comparison ---------------------------------------------------------------------------------------------------------


def difference(expected: Trajectory, got: Trajectory, rtol: float) -> str | None:
    """Return what differs between two trajectories, if anything does: the update, or a state."""
    # No more can be told of a move than the weights that it was added to hold of it.
    floor = 8 * torch.finfo(expected.weights.dtype).eps * expected.weights.abs().nan_to_num(0, 0, 0)
    largest = floor.amax(-1, keepdim=True) if floor.numel() else floor
    if not close(expected.moves, got.moves, rtol, largest):
        return UPDATE
    for values, others in ((expected.planes, got.planes), (expected.shared, got.shared)):
        for name, value in values.items():
            if name not in others or not close(value, others[name], rtol):
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
