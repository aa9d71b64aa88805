"""Tracks the steps that idle rows have missed where a step may leave out features of a table: a `Lag` for each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.idle.lag import Lag


class FeatureLag:
    """Takes the place of the `Lag` of all features once every row is caught up.

    Parameters
    ----------
    lag : Lag
    names : sequence of str
        Of the features; what a step finds of each in the optimizer's state is in ``state["features"][name]``.
    feature_of : callable
        Returns the number of the feature of each of some rows, (n,).
    is_copyable : bool
        Whether a row is always of the same feature, so that a copy stays right while training goes on.
    """

    def __init__(
        self, lag: Lag, names: Sequence[str], feature_of: Callable[[Tensor], Tensor], is_copyable: bool
    ) -> None:
        self._names, self._feature_of, self.is_copyable = names, feature_of, is_copyable
        self._lags = [lag.anew() for _ in names]
        self.table_bytes = lag.table_bytes
        # Those that take part in the running step.
        self.stepping: Sequence[int] = ()

    def __bool__(self) -> bool:
        return any(self._lags)

    def copy(self) -> FeatureLag:
        """Return one that knows the steps so far, and is told of no other."""
        made = copy.copy(self)
        made._lags = [lag.copy() for lag in self._lags]
        return made

    def is_apart(self, plane: str) -> bool:
        """Tell whether `catch_up` takes a plane without the others, as `Lag`."""
        return all(lag.is_apart(plane) for lag in self._lags)

    @property
    def table_bytes(self) -> int:
        """Of the table, as `Lag`: steps of a feature take no more than its share."""
        return sum(lag.table_bytes for lag in self._lags)

    @table_bytes.setter
    def table_bytes(self, num_bytes: int) -> None:
        for lag in self._lags:
            lag.table_bytes = num_bytes // len(self._lags)

    def last_steps(self, count: int, device: torch.device, step: Any, ids: Tensor) -> Tensor:
        """Return what to write as the last step of the rows `ids`, as `Lag`."""
        last = torch.empty((count, 1), dtype=torch.int32, device=device)
        for number, at in self._by_feature(ids):
            made = None if step is None else step.get(number)
            last[at] = self._lags[number].last_steps(len(at), device, made)
        return last

    def _by_feature(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield features with the places of their rows among `ids`."""
        numbers = self._feature_of(ids)
        for number in numbers.unique().tolist():
            yield number, (numbers == number).nonzero().flatten()

    @property
    def now(self) -> int:
        """The number of steps that new rows count as having taken, which are of the first feature until they get an id."""
        return self._lags[0].now

    def settle(self) -> None:
        """Find out whether the newest step was made, as `Lag`."""
        for lag in self._lags:
            lag.settle()

    def catch_up(self, rows: dict[str, Tensor], last: Tensor, ids: Tensor) -> None:
        """Apply to `rows`, whose numbers are `ids`, the steps that each has missed, as `Lag`."""
        for number, at in self._by_feature(ids):
            if self._lags[number]:
                part = {name: values[at] for name, values in rows.items()}
                self._lags[number].catch_up(part, last[at])
                for name, values in part.items():
                    rows[name][at] = values

    def begin(self, group: dict[str, Any], state: dict[str, Any], catch_up_all: Callable[[], None]) -> None:
        """Note what matters of the `state` before a step, as `Lag`."""
        for number in self.stepping:
            self._lags[number].begin(group, self._of(number, state), catch_up_all)

    def _of(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        # Before a step leaves some out for the first time it is that of all.
        found: dict[str, Any] = state["features"].get(self._names[number], {}) if "features" in state else state
        return found

    def step_made(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Return what the step just made does to idle rows of each feature, as `Lag`."""
        made = {n: self._lags[n].step_made(optimizer, group, self._of(n, state)) for n in self.stepping}
        return {number: step for number, step in made.items() if step is not None} or None

    @property
    def mark(self) -> Any:
        """What changes when a step is recorded."""
        return [lag.mark for lag in self._lags]

    def record(self, step: Any, mark: Any = None) -> None:
        """Remember a step that only some rows have taken, as `Lag`."""
        for number, made in step.items():
            self._lags[number].record(made, None if mark is None else mark[number])

    def forget(self) -> None:
        """Forget the steps so far: every row has been caught up."""
        for lag in self._lags:
            lag.forget()

    @property
    def is_long(self) -> bool:
        """Whether all rows should be caught up now, as `Lag`."""
        return any(lag.is_long for lag in self._lags)
