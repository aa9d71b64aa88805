"""Pending gradients of a table whose rows belong to ids that come and go: none may reach the row of another id."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.handle import Handle
from speedtransfer.vocabulary import UNSEEN_ROW, NotedIds, Vocabulary


class VocabularyGradient(Handle):
    """The part of :class:`VocabularyHandle` that knows of which rows a gradient is pending or may come."""

    vocabulary: Vocabulary
    rows_of_ids = True
    # How many share the ids out.
    processes = 1
    # Whether the pending gradient may be of rows that were not looked up since the last step.
    _late = False

    def _start_holding(self) -> None:
        # Rows in graphs whose gradient has not come, by the id() of the tensor of their ids, which is kept here, or of all.
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        # Ids that lookups of the pending gradient could not admit.
        self._num_missed = 0

    def receive(self, grad: Tensor) -> None:
        """Raise: it is not known which ids the rows had."""
        self.refuse_node()

    def join(self, rows: Tensor, ids: Tensor | None, deposit: Callable[..., None], *features: Any) -> Tensor:
        """Join rows to a graph, as `Handle.join`; they stay those of their ids until their gradient comes."""
        key = rows if ids is None else ids
        self.date(key)
        self._held = {key: entry for key, entry in self._held.items() if entry[0]() is not None}
        self._held[id(key)] = weakref.ref(rows), ids
        return super().join(rows, ids, deposit, *features)

    def whole_in_graph(self) -> Tensor:
        """Return all rows in a graph, as `Handle.whole_in_graph`; each time anew, as each is held until its gradient comes."""
        self._whole = None
        return super().whole_in_graph()

    def date(self, tensor: Tensor) -> None:
        """Note on the rows of a lookup, (n,), or on a leaf over all rows, which ids the rows have now."""
        tensor._dated = self.vocabulary.generation, self.num_rows  # type: ignore[attr-defined]
        tensor._clock = self.vocabulary.clock  # type: ignore[attr-defined]

    def know(self, ids: Tensor, noted: NotedIds | None) -> None:
        """Let the host know the rows `ids` of a lookup by the ids looked up, so that it need not wait for the device."""
        if ids.is_cuda and noted is not None:
            ids._noted = (noted,)  # type: ignore[attr-defined]

    def _on_host(self, ids: Tensor) -> np.ndarray:
        """Return rows on the host, (n,), some perhaps twice; without padding."""
        noted = getattr(ids, "_noted", None)
        parts = [ids.cpu().numpy()] if noted is None else [self.vocabulary.noted_rows(part) for part in noted]
        rows = np.concatenate(parts)
        return rows[(rows >= 0) & (rows < self.num_rows)]

    def rows_in_use(self) -> np.ndarray | None:
        """Return the rows of which a gradient may come or is pending, (n,), some perhaps twice; None: of all."""
        held = [ids for leaf, ids in self._held.values() if leaf() is not None]
        if any(ids is None for ids in held) or (self.used_whole and self.grad is not None):
            return None
        arriving = [ids for ids, _ in self._arriving.values()]
        # One that zero_grad(set_to_none=False) has made zero is that of no batch.
        pending = [] if self.ids is None or self.is_cleared() else [self.ids]
        parts = [self._on_host(ids) for ids in (*held, *arriving, *pending) if ids is not None]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def rows_released(self, rows: np.ndarray) -> None:
        """Leave `rows` (n,), which no id has any more, out of a gradient that is zero."""
        if self.ids is None or self.grad is None or self._assigned is not None:
            return
        if not np.isin(self._on_host(self.ids), rows).any():
            return
        stay = torch.from_numpy(~np.isin(self.ids.cpu().numpy(), rows)).to(self.ids.device)
        if not bool(stay.all()):
            self._set_gradient(self.ids[stay], self.grad[stay])
            # It is still one that the next backward replaces.
            self._grad_version = -1

    def deposit(self, ids: Tensor, grad: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add a gradient, as `PendingGradient.deposit`; that of the row of unseen ids only if it is trained.

        Raises
        ------
        InvalidValueError
            A row has become that of another id since the lookup.
        """
        with self.rows.lock:
            self._held.pop(id(ids), None)
            # `deposit_whole` has left out rows that have changed.
            if not kwargs.get("whole"):
                self.check_lookup(ids)
            self._num_missed = getattr(ids, "_num_missed", 0) + (0 if self.grad is None else self._num_missed)
            before = self.ids
            late = self.vocabulary.by_time or getattr(ids, "_clock", None) != self.vocabulary.clock
            super().deposit(ids, self.own_gradient(ids, grad), *args, **kwargs)
            self._late = self._late or late
            self._join_noted(before, ids)

    def check_lookup(self, ids: Tensor) -> None:
        """Raise if a row of a lookup, (n,), is that of another id by now, or if it is not known when the lookup was."""
        dated = getattr(ids, "_dated", None)
        if dated is None:
            raise InvalidValueError(
                f"{self}: a gradient comes for rows whose lookup is not known, so that they may be those of other ids by now; "
                "look the ids up again"
            )
        generation, num_rows = dated
        if generation != self.vocabulary.generation:
            rows = self._on_host(ids)
            if self.vocabulary.have_changed(rows[rows < num_rows], generation):
                raise InvalidValueError(
                    f"{self}: a gradient comes for rows of ids that were taken off since their lookup (a second backward "
                    "after a step, or activate() without gradients); look the ids up again"
                )

    def _join_noted(self, *parts: Tensor | None) -> None:
        """Let the host know the rows of the pending gradient if it knows those that it was made of."""
        noted = [getattr(ids, "_noted", None) for ids in parts if ids is not None]
        if self.ids is not None and not any(self.ids is ids for ids in parts) and None not in noted:
            self.ids._noted = tuple(one for part in noted for one in part or ())  # type: ignore[attr-defined]

    def deposit_whole(self, rows: Tensor, grad: Tensor, features: int | None = None) -> None:
        """Add the gradient of all rows; that of rows which other ids, or new ones, have by now goes nowhere."""
        with self.rows.lock:
            self._held.pop(id(rows), None)
            generation, _ = rows._dated  # type: ignore[attr-defined]
            others = self.vocabulary.changed_rows(generation)
            others = others[others < len(grad)]
            if len(others):
                grad = grad.clone()
                grad[torch.from_numpy(others).to(grad.device)] = 0
            super().deposit_whole(rows, grad)
            self._late = True

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set or clear the gradient, as `PendingGradient.assign_gradient`."""
        super().assign_gradient(grad)
        self._late = grad is not None

    def clear(self) -> None:
        """Clear the gradient, as `PendingGradient.clear`."""
        super().clear()
        self._late = False

    def own_gradient(self, ids: Tensor | None, grad: Tensor) -> Tensor:
        """Return a gradient, ``(*, n, dim)``, that is zero for the row of unseen ids, unless that is trained."""
        return grad if self.vocabulary.unseen == "row" else _without(grad, ids, UNSEEN_ROW)

    def refresh(self) -> None:
        """Read the active rows, as `Stepping.refresh`; a gradient given for all rows trains the row of unseen ids no more."""
        given = self._touched is not None or self._assigned is not None or self.has_hooks()
        super().refresh()
        if given and self.ids is not None and self.grad is not None:
            self.grad = self.own_gradient(self.ids, self.grad)
            self._grad_version = self.grad._version

    def rows_changed(self, rows: np.ndarray) -> None:
        """Forget a pending gradient of one of `rows` (n,), which have other ids now, or none."""
        if self.ids is not None and np.isin(self._on_host(self.ids), rows).any():
            self.clear()


def _without(grad: Tensor, ids: Tensor | None, row: int) -> Tensor:
    """Return a gradient, ``(*, n, dim)``, that is zero at `row`: the first of `ids` (n,), if it is there; None: all rows."""
    if not grad.shape[-2] or (ids is not None and not ids.is_cuda and int(ids[0]) != row):
        return grad
    first = torch.zeros_like(grad[..., :1, :])
    if ids is not None and ids.is_cuda:
        first = torch.where(ids[:1, None] == row, first, grad[..., :1, :])
    return torch.cat([first, grad[..., 1:, :]], dim=-2)
