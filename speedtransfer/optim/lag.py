"""Track, for exact idle rows, the last step that each row has taken, and apply the steps that it has missed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.idle import History, IdleStep, Replay, Rule, catch_up
from speedtransfer.idle.rule import Numbers
from speedtransfer.progress import ByteProgress
from speedtransfer.rows import RowStore
from speedtransfer.tables import row_chunks

LAST_STEP = "idle.last_step"  # the plane: int32, the step that touched a row last
_MAX_STEPS = 1 << 16  # steps remembered; then every row is brought up to date
_MAX_OPEN = 1 << 10  # and no more than so many whose sums each step changes: beta 1 close to 1
_MAX_REPLAYED = (
    1 << 10
)  # the same of steps that rows take one after the other, so that none has to take very many at once


class Lag:
    """What the rows of one table owe to the steps of one optimizer.

    Parameters
    ----------
    rule : Rule
        What a step does to rows that it does not touch.
    store : RowStore
        Gets the plane `LAST_STEP` with the first step that idle rows notice; plain SGD makes none.
    """

    def __init__(self, rule: Rule, store: RowStore) -> None:
        self._rule, self._dtype = rule, store.dtype
        self._history = self._new_history(0)
        self._has_plane = False
        self._before: Any = None  # what the rule must know of the state before a step
        self.lock = threading.RLock()  # other threads may read rows (evaluation) while steps are made

    def __bool__(self) -> bool:
        """Tell whether there are rows with steps to come."""
        return self._history.length > 0

    def _new_history(self, now: int) -> History | Replay:
        return Replay(self._rule, now) if self._rule.coupled else History(self._rule, self._dtype, now)

    def read(self, store: RowStore, ids: Tensor, planes: Sequence[str]) -> dict[str, Tensor]:
        """Return the rows `ids` (n,) of "weight" and the `planes` of state as they are after all steps so far."""
        with self.lock:
            rows = store.read(ids, ["weight", *planes, LAST_STEP])
            last = rows.pop(LAST_STEP)
            if isinstance(self._history, Replay):
                self._history.catch_up(rows, last)
            else:
                catch_up(self._history, rows, last)
        return rows

    def settle(self, store: RowStore, ids: Tensor | None, planes: Sequence[str]) -> None:
        """Bring the rows `ids` (n,), none twice, of the table up to date; None: all of them."""
        if not self:
            return
        if ids is not None:
            self._settle(store, ids, planes)
            return
        table = store.table
        row_bytes = max(table.nbytes // max(len(table), 1), 1)
        with ByteProgress("idle rows take the steps they missed", table.nbytes) as bar:
            for part in row_chunks(len(table), row_bytes):
                self._settle(store, torch.arange(part.start, part.stop, device=table.device), planes)
                bar.advance((part.stop - part.start) * row_bytes)
        self._history.sweep()  # last: whoever interrupts it finds every row with the steps it has taken

    def _settle(self, store: RowStore, ids: Tensor, planes: Sequence[str]) -> None:
        with self.lock:
            store.write(ids, {**self.read(store, ids, planes), LAST_STEP: self._stamp(ids, self._history.now)})

    @staticmethod
    def _stamp(ids: Tensor, step: int) -> Tensor:
        return torch.full((len(ids), 1), step, dtype=torch.int32, device=ids.device)

    def drop(self, store: RowStore) -> None:
        """Remove the plane."""
        if self._has_plane:
            store.drop(LAST_STEP)
            self._has_plane = False

    def begin(self, group: dict[str, Any], state: dict[str, Any], store: RowStore, planes: Sequence[str]) -> None:
        """Note what matters of the `state` before a step; raise `OptimizerError` where its idle rows have no rule.

        Where the hyperparameters `group` are of another form than those before, every row takes the steps so far.
        """
        form = self._rule.form(group, state)
        if form != (self._rule.coupled, self._rule.denominator):
            self.settle(store, None, planes)
            self._rule.take_form(form)
            self._history = self._new_history(self._history.now)
        self._before = self._rule.before(state)

    def end(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        state: dict[str, Any],
        store: RowStore,
        ids: Tensor,
        rows: dict[str, Tensor],
    ) -> None:
        """Write the rows `ids` (n,) after a step and record it."""
        step = self._made(optimizer, group, state)
        counts = step is not None
        with self.lock:  # the record last: where the write fails there was no step
            if counts and not self._has_plane:
                store.add(LAST_STEP, (1,), torch.int32, 0)
                self._has_plane = True
            stamp = {LAST_STEP: self._stamp(ids, self._history.now + counts)} if self._has_plane else {}
            store.write(ids, {**rows, **stamp})
            if counts:
                self._history.record(step)  # type: ignore[arg-type]  # a history of the form that the rule has

    def end_of_all(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any], store: RowStore) -> None:
        """Record a step that all rows have taken where they are stored; none had missed any before."""
        if self._made(optimizer, group, state) is None:
            return
        with self.lock:
            if not self._has_plane:
                store.add(LAST_STEP, (1,), torch.int32, 0)
                self._has_plane = True
            store.table.stored(LAST_STEP).fill_(self._history.now + 1)
            self._history.now += 1
            self._history.sweep()

    def _made(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> IdleStep | Numbers | None:
        """Return what the step just made does to idle rows; None: nothing, or there was none."""
        if _was_skipped(optimizer):
            return None
        if self._rule.coupled:
            return self._rule.numbers(group, state)
        step = self._rule.step(group, state, self._before)
        return None if step.is_nothing else step

    @property
    def is_long(self) -> bool:
        """Whether so many steps are remembered that all rows should take them now."""
        length = self._history.length
        if isinstance(self._history, Replay):
            return length >= _MAX_REPLAYED
        return length >= _MAX_STEPS or length >= _MAX_OPEN <= self._history.horizon


def _was_skipped(optimizer: Optimizer) -> bool:
    overflow = getattr(optimizer, "found_inf", None)  # GradScaler's, for the fused ones, which then do nothing
    return overflow is not None and float(overflow) != 0
