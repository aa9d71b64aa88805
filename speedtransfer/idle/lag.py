"""Tracks the steps that idle rows have missed, for idle="exact", and applies them to rows that are read. It knows no table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.idle.history import History
from speedtransfer.idle.replay import Replay
from speedtransfer.idle.rule import IdleStep, Numbers, Rule

# Steps remembered; then every row is caught up.
_MAX_STEPS = 1 << 16
# The same of steps whose sums each further step changes: beta 1 close to 1.
_MAX_OPEN = 1 << 10
# The same of steps that rows take one after the other, so that none has to take very many at once.
_MAX_REPLAYED = 1 << 10


class Lag:
    """The remembered steps of one optimizer, and what they do to a row that has missed some.

    Parameters
    ----------
    rule : Rule
        What a step does to rows with zero gradient.
    dtype : torch.dtype
        That the weights are computed with.
    """

    def __init__(self, rule: Rule, dtype: Any) -> None:
        self._rule, self._dtype = rule, dtype
        self._history = self._new_history(0)
        self._before: Any = None  # what the rule needs of the state before a step

    def __bool__(self) -> bool:
        """Whether there may be rows that have missed steps."""
        return self._history.now > self._history.base

    @property
    def now(self) -> int:
        """The number of steps so far."""
        return self._history.now

    def _new_history(self, now: int) -> History | Replay:
        return Replay(self._rule, now) if self._rule.coupled else History(self._rule, self._dtype, now)

    def catch_up(self, rows: dict[str, Tensor], last: Tensor) -> None:
        """Apply to `rows`, by plane, each ``(n, *tail)``, the steps after the step `last` (n, 1) of each, in place."""
        self._history.catch_up(rows, last)

    def begin(self, group: dict[str, Any], state: dict[str, Any], catch_up_all: Callable[[], None]) -> None:
        """Note what matters of the `state` before a step with the hyperparameters `group`.

        Where these are of another form than before, every row is caught up first, by `catch_up_all`.

        Raises
        ------
        OptimizerError
            There is no rule for what they do to idle rows.
        """
        form = self._rule.form(group, state)
        if form != (self._rule.coupled, self._rule.denominator):
            catch_up_all()
            self._rule.take_form(form)
            self._history = self._new_history(self.now)
        self._before = self._rule.before(state)

    def step_made(
        self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]
    ) -> IdleStep | Numbers | None:
        """Return what the step just made does to idle rows; None: nothing, or the step was skipped."""
        overflow = getattr(optimizer, "found_inf", None)  # GradScaler's, for fused optimizers, which then do nothing
        if overflow is not None and float(overflow) != 0:
            return None
        return self._rule.made(group, state, self._before)

    def record(self, step: Any) -> None:
        """Remember a step that only some rows have taken."""
        self._history.record(step)

    def record_for_all(self) -> None:
        """Count a step that every row has taken; none has missed any before."""
        self._history.now += 1
        self._history.sweep()

    def forget(self) -> None:
        """Forget the steps so far: every row has been caught up."""
        self._history.sweep()

    @property
    def is_long(self) -> bool:
        """Whether so many steps are remembered that all rows should be caught up now."""
        length = self._history.length
        if isinstance(self._history, Replay):
            return length >= _MAX_REPLAYED
        return length >= _MAX_STEPS or length >= _MAX_OPEN <= self._history.horizon
