"""Remember the steps that rows may have missed since all of them were caught up, and let rows take those.

Tables that one optimizer trains make the same steps. Their histories share the `Sums` of these, which the first of them that
is read after a step computes; one that makes another step, or misses one, goes on with a copy.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from speedtransfer.idle.missed import is_done_on_cuda, take_missed_steps
from speedtransfer.idle.rule import IdleStep, Rule
from speedtransfer.idle.sums import Sums
from speedtransfer.idle.unsure import Unsure
from speedtransfer.once import fork_safe_lock


class _Shared:
    """Sums, and the histories that share them: each has made the steps in the sums, and some the one that is to come."""

    def __init__(self, sums: Sums, lock: Any = None) -> None:
        self.sums = sums
        self.coming: IdleStep | None = None
        self.histories = weakref.WeakSet[History]()
        self.lock = lock or fork_safe_lock()  # also of those that go on by themselves

    def join(self, history: History) -> bool:
        """Let a history, whose first step is the one to come, share the sums if that has not come yet."""
        with self.lock:
            if self.sums.count == 0:
                self.histories.add(history)
                history._shared = self
                history.now += 1
            return self.sums.count == 0

    def part(self, histories: list[History]) -> None:
        """Let some histories, which have not made the step to come, go on by themselves."""
        other = _Shared(self.sums.copy(), self.lock)
        for history in histories:
            other.histories.add(history)
            # From here on it has others: `behind` passes it over if an interrupt comes now.
            history._shared = other
            self.histories.discard(history)

    def sums_of(self, length: int) -> Sums:
        """Return the sums of so many steps: of those in the sums or, which are then added, also the one to come."""
        if length > self.sums.count:
            assert self.coming is not None
            # One alone is the one that asks.
            if len(self.histories) > 1:
                own = [history for history in self.histories if history._shared is self]
                behind = [history for history in own if history.now - history.base < length]
                if behind:
                    self.part(behind)
            self.sums.take(self.coming)
            self.coming = None
        return self.sums


# By what their sums depend on: those that have begun with a step, which is to come.
_begun: weakref.WeakValueDictionary[tuple[Any, ...], _Shared] = weakref.WeakValueDictionary()
_begun_lock = fork_safe_lock()


class History:
    """Steps made, counted from 1; a row that was last touched at step s has missed the steps ``s + 1 .. now``.

    Parameters
    ----------
    rule : Rule
    now : int
        Steps that every row has taken already.
    """

    def __init__(self, rule: Rule, now: int = 0) -> None:
        self.rule = rule
        self.now = self.base = now  # no row was last touched before step `base`
        self._shared: _Shared | None = None
        # The first step that is remembered, if there is one.
        self._first: IdleStep | None = None

    @property
    def length(self) -> int:
        """Number of steps that are remembered."""
        return self.now - self.base

    @property
    def step_bytes(self) -> int:
        """What a step takes that is remembered."""
        return 0 if self._shared is None else self._shared.sums.table.strides[0]

    @property
    def horizon(self) -> int:
        """How many of the newest lines a further step changes."""
        return 1 if self._shared is None else self._shared.sums.horizon

    @property
    def sums(self) -> Sums:
        """The sums of the steps made."""
        if self._shared is None:
            return Sums(self.rule)
        with self._shared.lock:
            return self._shared.sums_of(self.length)

    def record(self, step: IdleStep) -> None:
        """Take in one more step."""
        if self._shared is None:
            self._first = step
            self._begin(step)
            return
        with self._shared.lock:
            self._shared.sums_of(self.now - self.base)
            if self._shared.coming not in (None, step):
                self._shared.part([self])
            self._shared.coming = step
            self.now += 1

    def _begin(self, step: IdleStep) -> None:
        """Take in the first step, together with others whose first it is."""
        key = type(self.rule), self.rule.denominator, self.rule.dtype == torch.float64, step
        with _begun_lock:
            shared = _begun.get(key)
            if shared is None or not shared.join(self):
                shared = _Shared(Sums(self.rule))
                shared.coming = step
                shared.join(self)
                # Last, when others can join it.
                _begun[key] = shared

    def takes_unsure(self, rows: dict[str, Tensor], last: Tensor) -> bool:
        """Tell whether `catch_up` can take an unsure step of such rows."""
        bounded = self.rule.taken.bounds is not None
        return (self._first is not None or not bounded) and is_done_on_cuda(self.rule, rows, last)

    def catch_up(self, rows: dict[str, Tensor], last: Tensor, unsure: Unsure | None = None) -> None:
        """Let rows take the steps that they have missed.

        Parameters
        ----------
        rows : dict of str to Tensor
            ``weight`` and the state planes, or one of `Lag.is_apart`, ``(n, dim)`` each, changed in place.
        last : Tensor
            ``(n, 1)`` int32: the step that touched each row last.
        unsure : Unsure, optional
            A step after those that are remembered.
        """
        if self._first is not None and self.rule.taken.bounds is not None:
            self.rule.bound(rows, self._first)
        if self._shared is not None:
            with self._shared.lock:
                sums = self._shared.sums_of(self.now - self.base)
                take_missed_steps(self.rule, sums, rows, last, self.base, unsure)
        elif unsure is not None:
            take_missed_steps(self.rule, self.sums, rows, last, self.base, unsure)

    def copy(self) -> History:
        """Return one that remembers the same steps, and takes in no more."""
        # The form of further steps may be another.
        made = History(copy.deepcopy(self.rule), self.now)
        made.base, made._first = self.base, self._first
        if self._shared is not None:
            with self._shared.lock:
                made._shared = _Shared(self._shared.sums_of(self.length).copy())
            made._shared.histories.add(made)
        return made

    def sweep(self) -> None:
        """Forget all steps: every row has been caught up."""
        if self._shared is not None:
            shared = self._shared
            with shared.lock:
                # In one go: an interrupt comes before it or after it.
                self._shared, self._first, self.base = None, None, self.now
                shared.histories.discard(self)
        self.base = self.now
