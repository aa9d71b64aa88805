"""Tracks the steps that idle rows have missed, for idle="exact", and applies them to rows that are read. It knows no table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.cuda import check_not_capturing
from speedtransfer.idle.history import History
from speedtransfer.idle.replay import Replay
from speedtransfer.idle.rule import Rule
from speedtransfer.idle.unsure import Unsure

# Steps remembered; then every row is caught up.
_MAX_STEPS = 1 << 16
# So many are remembered of a table of any size.
_MIN_STEPS = 1 << 8
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
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._form = rule.taken
        self._history = self._new_history(0)
        # Of the table: more than it has is not remembered, as all rows are caught up at less cost.
        self.table_bytes = 1 << 62
        self._before: Any = None  # what the rule needs of the state before a step
        self._unsure: Unsure | None = None  # the newest step, if the host does not know yet whether it was made

    # Whether a copy stays right while training goes on.
    is_copyable = True

    def __bool__(self) -> bool:
        """Whether there may be rows that have missed steps."""
        return self._history.now > self._history.base or self._unsure is not None

    @property
    def now(self) -> int:
        """The number of steps so far that are known to have been made."""
        return self._history.now

    def anew(self) -> Lag:
        """Return one of its own for rows that have missed no step, and go on from now."""
        made = Lag(copy.deepcopy(self._rule))
        made._history = made._new_history(self.now)
        return made

    def copy(self) -> Lag:
        """Return one that knows the steps so far, and is told of no other."""
        self.settle()
        made = Lag(copy.deepcopy(self._rule))
        made._form, made._history = self._form, self._history.copy()
        return made

    def last_steps(self, count: int, device: torch.device, step: Any, ids: Tensor | None = None) -> Tensor:
        """Return what to write as the last step of `count` rows, ``(count, 1)`` int32: now, or after the step just made.

        `step` is that of `step_made`; None: none. The same for all, whatever `ids` they have.
        """
        if device.type == "cuda":
            check_not_capturing("counting steps (idle='exact')")
        unsure = step if isinstance(step, Unsure) else self._unsure
        if unsure is not None and unsure is not step:
            unsure = self._unsure_on(device)
        number = self._history.now + (step is not None or unsure is not None)
        last = torch.full((count, 1), number, dtype=torch.int32, device=device)
        if unsure is not None:
            unsure.begin_use()
            last -= unsure.skipped
        return last

    def settle(self) -> None:
        """Find out whether the newest step was made: this may wait for the device."""
        unsure = self._unsure
        if unsure is None:
            return
        # The wait first: if it is interrupted the step is still unsure.
        made = unsure.was_made()
        if made:
            self._history.record(unsure.step)
        else:
            self._rule.scalars.forget()
        self._unsure = None

    def _unsure_on(self, device: torch.device) -> Unsure | None:
        """Return the newest step if the host does not know whether it was made, and `device` does."""
        if self._unsure is not None and (self._unsure.is_known() or self._unsure.skipped.device != device):
            self.settle()
        return self._unsure

    def _new_history(self, now: int) -> History | Replay:
        return Replay(self._rule, now) if self._rule.taken.coupled else History(self._rule, now)

    def catch_up(self, rows: dict[str, Tensor], last: Tensor, ids: Tensor | None = None) -> None:
        """Apply to `rows`, by plane, each ``(n, *tail)``, the steps after the step `last` (n, 1) of each, in place."""
        if last.is_cuda:
            check_not_capturing("catching up rows (idle='exact')")
        unsure = None if self._unsure is None else self._unsure_on(last.device)
        if unsure is not None and not self._history.takes_unsure(rows, last):
            self.settle()
            unsure = None
        if unsure is not None:
            unsure.begin_use()
        self._history.catch_up(rows, last, unsure)

    def is_apart(self, plane: str) -> bool:
        """Tell whether `catch_up` takes a plane without the others."""
        form = self._rule.taken
        return plane != "weight" and not form.coupled and self._rule.partner is None and form.bounds is None

    def begin(self, group: dict[str, Any], state: dict[str, Any], catch_up_all: Callable[[], None]) -> None:
        """Note what matters of the `state` before a step with the hyperparameters `group`.

        Where these are of another form than before, every row is caught up first, by `catch_up_all`.

        Raises
        ------
        OptimizerError
            There is no rule for what they do to idle rows.
        """
        form = self._rule.form(group, state)
        if form != self._form:
            catch_up_all()
            self._rule.take_form(form)
            self._history = self._new_history(self.now)
            # Last: after an interrupt all is done again.
            self._form = form
        self._before = self._rule.before(state)

    def step_made(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Return what the step just made does to idle rows, for `record`; None: nothing, or the step was skipped."""
        if self._unsure is not None:
            self.settle()
        # GradScaler's, for fused optimizers, which then do nothing: they take back the step that they have counted.
        found_inf = getattr(optimizer, "found_inf", None)
        self._rule.changes_of_count = 1 if found_inf is None else 2
        unsure = found_inf is not None and found_inf.is_cuda and self._rule.knows_count(state)
        if not unsure and found_inf is not None and float(found_inf) != 0:
            return None
        step = self._rule.made(group, state, self._before)
        return Unsure(step, found_inf) if unsure and found_inf is not None and step is not None else step

    @property
    def mark(self) -> Any:
        """What changes when a step is recorded."""
        return self._history.now

    def record(self, step: Any, mark: Any = None) -> None:
        """Remember a step that only some rows have taken, unless it was recorded since `mark`."""
        if isinstance(step, Unsure):
            self._unsure = step
        elif mark is None or mark == self._history.now:
            self._history.record(step)

    def record_for_all(self, step: Any, mark: Any = None) -> bool:
        """Count a step that every row has taken; none has missed any before. Return whether it was made."""
        made = not isinstance(step, Unsure) or step.was_made()
        if made:
            if mark is None or mark == self._history.now:
                self._history.now += 1
            self._history.sweep()
        else:
            self._rule.scalars.forget()
        return made

    def forget(self) -> None:
        """Forget the steps so far: every row has been caught up."""
        self.settle()
        self._history.sweep()

    @property
    def is_long(self) -> bool:
        """Whether so many steps are remembered that all rows should be caught up now."""
        history = self._history
        length = history.now - history.base
        if isinstance(history, Replay):
            return length >= _MAX_REPLAYED
        if length >= _MIN_STEPS and length * history.step_bytes > self.table_bytes:
            return True
        return length >= _MAX_STEPS or length >= _MAX_OPEN <= history.horizon
