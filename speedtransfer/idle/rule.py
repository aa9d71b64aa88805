"""Describe the effect of an optimizer step on rows with zero gradient: what the `rules` of all optimizers are made of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

IDENTITY = (1.0, 0.0, 0.0, 1.0)


class IdleStep(NamedTuple):
    """The effect of one step on a row with zero gradient. Fields that a rule does not use stay as they are here.

    Attributes
    ----------
    decay : float
        Multiplies the weights, before anything is added to them.
    factors : tuple of float
        Multiply the planes of `Rule.factors`.
    mix : tuple of float
        ``(a, b, c, d)``: weights p and the plane q of `Rule.partner` become ``a p + b q`` and ``c p + d q``.
    scale, root, eps : float
        ``scale * m / (root * x + eps)`` is taken from the weights, m being the first plane of `Rule.factors` and x that of
        `Rule.denominator` (its root, unless `Rule.floor`), both after their factors.
    """

    decay: float = 1.0
    factors: tuple[float, ...] = ()
    mix: tuple[float, float, float, float] = IDENTITY
    scale: float = 0.0
    root: float = 1.0
    eps: float = 1.0

    @property
    def is_nothing(self) -> bool:
        """Whether rows stay as they are."""
        return self.scale == 0.0 and self == IdleStep(factors=(1.0,) * len(self.factors), root=self.root, eps=self.eps)


class Form(NamedTuple):
    """What steps that are remembered together have in common.

    Attributes
    ----------
    coupled : bool
        Whether weight decay is added to the gradient, so that rows take the steps one after the other.
    denominator : str or None
        As that of `Rule`.
    bounds : tuple of float or None
        Hyperparameters that bound state, which `IdleStep` does not tell. None: no state is bounded.
    """

    coupled: bool
    denominator: str | None
    bounds: tuple[float, ...] | None = None


Numbers = tuple[float, ...]
"""The numbers of a step with coupled weight decay, as `replay` lists them for each kind of optimizer."""


class Scalars:
    """Reads numbers that an optimizer keeps in tensors: of those on a device mostly without waiting for it.

    A tensor tells how often it was changed. One that was changed just as often as a step does it has the value that the step
    gives it, which the host can compute. Changed otherwise (by the user), or another tensor (a state that was loaded), it is
    read; or not changed at all, as it looks under a dispatch mode of torch, where lists of tensors change without a trace.
    """

    def __init__(self) -> None:
        self._known = dict[str, tuple[weakref.ref[Tensor], int, float]]()

    def read(self, name: str, number: Any, changes: int = 0, change: Callable[[float], float] | None = None) -> float:
        """Return the value of `number`, a number or tensor.

        Parameters
        ----------
        name : str
            The same at each call for the same number.
        number : float or Tensor
        changes : int
            How often it should have been changed since the last call.
        change : callable, optional
            Gives the value after these changes for the one before.
        """
        if not isinstance(number, Tensor) or number.device.type == "cpu" or number.is_inference():
            return float(number)
        if self.is_known(name, number, changes):
            value = self._known[name][2] if change is None else change(self._known[name][2])
        else:
            value = float(number)
        self._known[name] = weakref.ref(number), number._version, value
        return value

    def is_known(self, name: str, number: Any, changes: int) -> bool:
        """Tell whether `read` would not have to wait for a device."""
        if not isinstance(number, Tensor) or number.device.type == "cpu":
            return True
        known = None if number.is_inference() else self._known.get(name)
        return known is not None and known[0]() is number and number._version == known[1] + changes

    def forget(self) -> None:
        """Read all numbers anew."""
        self._known.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Copies read for themselves."""
        return {"_known": {}}


class Rule:
    """What an optimizer does to idle rows.

    Parameters
    ----------
    dtype : torch.dtype
        That the weights are computed with.

    Attributes
    ----------
    factors : tuple of str
        State that idle steps multiply.
    partner : str or None
        State that mixes with the weights.
    denominator : str or None
        State that the numerator is divided by.
    floor : bool
        The denominator is x itself and never less than eps (Adamax), instead of ``root * sqrt(x) + eps``.
    replay : str or None
        The kind of step, of those in `replay`, that rows take one after the other where weight decay is coupled.
    taken : Form
        The form of the steps from now on.
    """

    factors: tuple[str, ...] = ()
    partner: str | None = None
    denominator: str | None = None
    floor: bool = False
    replay: ClassVar[str | None] = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._rounded = dtype, functools.partial(rounded, dtype=dtype)
        self.taken = Form(False, self.denominator)
        self.scalars = Scalars()
        # How often a step changes the optimizer's count of steps; see `Lag.step_made`.
        self.changes_of_count = 1

    def form(self, group: dict[str, Any], state: dict[str, Any]) -> Form:
        """Return the form of a step with the hyperparameters `group` and the optimizer's `state` before it.

        Steps of one form cannot be put together with those of another: `take_form` wants rows that have missed nothing.
        """
        return Form(self.replay is not None and group.get("weight_decay", 0) != 0, self.denominator)

    def take_form(self, form: Form) -> None:
        """Let the steps from now on be of this form."""
        self.taken, self.denominator = form, form.denominator

    def bound(self, rows: dict[str, Tensor], first: IdleStep) -> None:
        """Bound the state of rows, by plane, in place, as the missed steps do that they are about to take.

        Called where the form has `bounds`. `first` is the first of the steps that are remembered: rows that have not missed it
        are within the bounds already.
        """

    def before(self, state: dict[str, Any]) -> Any:
        """Return what `step` must know of the optimizer's state before its step."""
        return None

    def step(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep:
        """Return what the step just made, with the hyperparameters `group` and `state` after it, did to idle rows."""
        return IdleStep(factors=(1.0,) * len(self.factors))

    def numbers(self, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        """Return the numbers of the step just made, for rows to take it themselves; only with coupled weight decay."""
        raise NotImplementedError(f"{type(self).__name__} has no steps that are taken one by one")

    def made(self, group: dict[str, Any], state: dict[str, Any], before: Any) -> IdleStep | Numbers | None:
        """Return the step just made, for `History.record` or, where coupled, `Replay.record`; None: idle rows stay."""
        if self.taken.coupled:
            return self.numbers(group, state)
        step = self.step(group, state, before)
        return None if step.is_nothing else step

    def _count(self, state: dict[str, Any]) -> float:
        """Return the number of the step just made; call it once a step."""
        return self.scalars.read("step", state["step"], self.changes_of_count, lambda count: count + 1)

    def knows_count(self, state: dict[str, Any]) -> bool:
        """Tell whether the number of the step just made is known, and does not depend on whether it was made."""
        return self.scalars.is_known("step", state.get("step"), self.changes_of_count)

    def _numbers(self, group: dict[str, Any], *names: str) -> list[float]:
        """Return hyperparameters, which may be tensors: those on a device are waited for.

        Writes through ``.data`` and by CUDA graphs leave no trace in the version of a tensor.
        """
        return [float(group.get(name, 0.0)) for name in names]


# Most steps ask for the same few numbers, once for each table.
@functools.lru_cache(maxsize=256)
def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of `dtype`."""
    if dtype == torch.float64:
        return value
    return float(np.float32(value)) if dtype == torch.float32 else float(torch.tensor(value, dtype=dtype, device="cpu"))
