"""The handle of a table whose rows belong to ids that come and go: a vocabulary says which."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim.handle import Handle
from speedtransfer.rows import LAST_STEP, Rows
from speedtransfer.vocabulary import PADDING_ROW, UNSEEN_ROW, LoadPlan, NotedIds, Vocabulary


class VocabularyHandle(Handle):
    """Tie a parameter to a table whose rows a vocabulary gives to ids.

    The parameter has the shape of the table, in the order of rows. It reads as a whole; to write it as a whole raises, except
    for what fills it with initial values.

    Parameters
    ----------
    rows : Rows
    vocabulary : Vocabulary
        One that no other table has.
    padding_idx : int, optional
        The id of padding.
    requires_grad : bool
    idle : {"auto", "exact", "lazy"}
    """

    acts_after_steps = True
    vocabulary: Vocabulary
    # How many share the ids out.
    processes = 1
    # Whether the pending gradient may be of rows that were not looked up since the last step.
    _late = False
    # What other processes know of the last ids that were found.
    asked: Any = None

    def __init__(
        self,
        rows: Rows,
        vocabulary: Vocabulary,
        padding_idx: int | None = None,
        requires_grad: bool = True,
        idle: str = "lazy",
    ) -> None:
        super().__init__(rows.table, requires_grad, idle, rows)
        self._bind(vocabulary, padding_idx)

    def _bind(self, vocabulary: Vocabulary, padding_idx: int | None) -> None:
        """Have `vocabulary` give ids the rows of the table."""
        # Leaves whose gradient has not come, by the id() of the tensor of their rows, which is kept here, or of a leaf of all.
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        # Ids that lookups of the pending gradient could not admit; whether that was warned of.
        self._num_missed, self._has_warned = 0, False
        vocabulary.bind(self, padding_idx)
        self.vocabulary, self.padding_idx = vocabulary, None if padding_idx is None else PADDING_ROW

    @property
    def aliased(self) -> bool:
        """No tensor is the memory of a table that may grow, and whose rows belong to other ids later."""
        return False

    def set_padding(self, padding_idx: int | None) -> None:
        """Do nothing: the padding of a vocabulary is an id, and its row is known."""

    @property
    def unseen_row(self) -> int:
        """The row that unseen ids read."""
        return UNSEEN_ROW

    @property
    def padding_row(self) -> int | None:
        """The row of padding."""
        return None if self.vocabulary.padding_idx is None else PADDING_ROW

    def to_whole(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in the whole table of `rows` (n,) here, -1 for -1."""
        return rows

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Tell of each id (n,) whether it is one of this process: all are."""
        return np.ones(len(ids), dtype=bool)

    def together(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``."""
        return call()

    def to_owners(self, ids: np.ndarray, values: Tensor | None = None) -> tuple[np.ndarray, Any]:
        """Return `ids` (n,) and `values`: all are known here."""
        return ids, values

    def sum(self, number: int) -> int:
        """Return `number`."""
        return number

    def find(self, ids: np.ndarray, admit: bool) -> np.ndarray:
        """Return the row of each id, (n,) int64, -1 where it has none; with `admit` after new ones were admitted."""
        return self.vocabulary.find_in_training(ids) if admit else self.vocabulary.find(ids)

    def saved_ids(self) -> dict[str, Tensor]:
        """Return the state of the vocabulary, for a state dict."""
        return self.vocabulary.state_dict()

    def any_unknown(self, ids: np.ndarray) -> bool:
        """Tell whether one of `ids` (n,) has no row; of several processes, one of those of any."""
        return bool((self.vocabulary.rows(ids) < 0).any())

    def refuse_ids(self, admit: bool) -> None:
        """Do nothing: no other process waits for ids that cannot be looked up."""

    # --- rows in use --------------------------------------------------------------------------------------------------

    def track_leaf(self, leaf: Tensor, ids: Tensor | None) -> None:
        """Remember a leaf of autograd, as `Handle.track_leaf`; its rows stay those of their ids until its gradient comes."""
        super().track_leaf(leaf, ids)
        self._hold(leaf, ids)

    def whole_leaf(self) -> Tensor:
        """Return all rows as a leaf of autograd, as `Handle.whole_leaf`: maybe one that has got a gradient already."""
        leaf = super().whole_leaf()
        self._hold(leaf, None)
        return leaf

    def _hold(self, leaf: Tensor, ids: Tensor | None) -> None:
        key = leaf if ids is None else ids
        self.date(key)
        self._held = {key: entry for key, entry in self._held.items() if entry[0]() is not None}
        self._held[id(key)] = weakref.ref(leaf), ids

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
            generation, num_rows = getattr(ids, "_dated", (self.vocabulary.generation, 0))
            if generation != self.vocabulary.generation:
                rows = self._on_host(ids)
                if self.vocabulary.have_changed(rows[rows < num_rows], generation):
                    raise InvalidValueError(
                        f"{self}: a gradient comes for rows of ids that were taken off since their lookup (a second backward "
                        "after a step, or activate() without gradients); look the ids up again"
                    )
            self._num_missed = getattr(ids, "_num_missed", 0) + (0 if self.grad is None else self._num_missed)
            before = self.ids
            late = self.vocabulary.by_time or getattr(ids, "_clock", None) != self.vocabulary.clock
            super().deposit(ids, self.own_gradient(ids, grad), *args, **kwargs)
            self._late = self._late or late
            self._join_noted(before, ids)

    def _join_noted(self, *parts: Tensor | None) -> None:
        """Let the host know the rows of the pending gradient if it knows those that it was made of."""
        noted = [getattr(ids, "_noted", None) for ids in parts if ids is not None]
        if self.ids is not None and not any(self.ids is ids for ids in parts) and None not in noted:
            self.ids._noted = tuple(one for part in noted for one in part or ())  # type: ignore[attr-defined]

    def deposit_whole(self, leaf: Tensor, grad: Tensor) -> None:
        """Add the gradient of a leaf over all rows; that of rows which other ids, or new ones, have by now goes nowhere."""
        with self.rows.lock:
            self._held.pop(id(leaf), None)
            generation, _ = leaf._dated  # type: ignore[attr-defined]
            others = self.vocabulary.changed_rows(generation)
            others = others[others < len(grad)]
            if len(others):
                grad = grad.clone()
                grad[torch.from_numpy(others).to(grad.device)] = 0
            super().deposit_whole(leaf, grad)
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

    def end_step(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """End a step, as `Stepping.end_step`, which the clock of the vocabulary counts."""
        # Several processes tell no changes.
        late = None
        if self._late and self.ids is not None and self.processes == 1:
            late = self._on_host(self.ids)
        super().end_step(optimizer, group)
        # A gradient that is not cleared is that of later steps too.
        self._late = True
        self.vocabulary.count_step(late)

    def drop_state(self, reason: str) -> None:
        """Remove the state of the rows, as `Binding.drop_state`."""
        if LAST_STEP in self.table.planes:
            self.vocabulary.all_rows_changed()
        super().drop_state(reason)

    def step_ended(self) -> None:
        """Let the vocabulary admit ids that are deferred, and take rows from those that have to go."""
        missed, self._num_missed = self._num_missed, 0
        if missed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step of {self} follows lookups of {missed} ids without rows, which did not admit them, and does not train "
                "them: the module was in evaluation mode, or activate() was called without gradients; call module.train() "
                "before such lookups, with gradients enabled",
                stacklevel=2,
            )
        self.vocabulary.settle()
        self.vocabulary.evict_after_step()

    def fresh_rows(self) -> Tensor:
        """Return the rows (n,) that ids got, or lost, since the last step."""
        return torch.from_numpy(self.vocabulary.changed_rows(self.vocabulary.generation_of_step))

    def rows_changed(self, rows: np.ndarray) -> None:
        """Forget a pending gradient of one of `rows` (n,), which have other ids now, or none."""
        if self.ids is not None and np.isin(self._on_host(self.ids), rows).any():
            self.clear()

    # --- saved state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_saved(
        self, state: Mapping[str, Tensor], num_saved: int, values: Tensor | None, plan: LoadPlan | None = None
    ) -> None:
        """Go on with the ids of a saved table, in the rows that `Vocabulary.plan_load` finds, and with their weights.

        Parameters
        ----------
        state : mapping of str to Tensor
            That of its vocabulary; empty: it had none.
        num_saved : int
            Its rows.
        values : Tensor, optional
            ``(num_saved, dim)``. None: they will be written later, by `Rows.placement`.
        plan : LoadPlan, optional
            What `Vocabulary.plan_load` returned before. It is made anew where it was for another state.
        """
        self.recover()
        with self.rows.lock:
            if plan is None or not plan.is_for(state, num_saved):
                plan = self.vocabulary.plan_load(state, num_saved)
            self.vocabulary.load(plan)
            if values is not None:
                self.table.wait()
                self.rows.place("weight", values.detach(), plan.placement)

    # --- changes of the table -----------------------------------------------------------------------------------------

    def grow(self, num_rows: int) -> None:
        """Give the table more rows."""
        before = self.ids
        super().grow(num_rows)
        self._join_noted(before)
        self.vocabulary.follow()

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the table to `dtype`, as `Binding.convert`."""
        self.vocabulary.check_dtype(dtype)
        super().convert(dtype)
        self.vocabulary.follow()
        self.vocabulary.all_rows_changed()

    def fill(self, initial: Any) -> None:
        """Set what rows begin with, and the rows of all known ids to that."""
        self.vocabulary.set_initial(initial)

    def normal_(self, start: int = 0, stop: int | None = None) -> None:
        """Set the rows of known ids to their initial values."""
        self.vocabulary.reset_rows()

    def store(self, values: Tensor) -> None:
        """Refuse to set all rows."""
        self._refuse("written as a whole")

    def set_whole(self, values: Tensor) -> None:
        """Refuse to set all rows."""
        self._refuse("assigned")

    def take_param(self, param: Any, kind: Any) -> None:
        """Refuse another weight."""
        self._refuse("replaced by another parameter")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidTypeError(
            f"{self} has rows of ids that come and go, in the order in which they came, and cannot be {what}; use "
            "vocabulary.update(ids, rows), and for first values Vocabulary(initial=...) or torch.nn.init.normal_, uniform_, "
            "constant_"
        )

    # --- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        self.rows.catch_up()
        made = copy.deepcopy(self.vocabulary, memo)
        padding = self.vocabulary.padding_idx
        duplicate = VocabularyHandle(self.rows.copy(), made, padding, self.requires_grad, self.idle)
        duplicate.name = self.name
        made.load_state_dict(self.vocabulary.state_dict())
        memo[id(self)] = duplicate
        return duplicate

    def __reduce__(self) -> Any:
        # `_unpickle` gets the arguments of the function that makes an ordinary handle.
        return _unpickle, (super().__reduce__()[1], self.vocabulary, self.vocabulary.padding_idx, self._state())

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.vocabulary.state_dict().items()}


def _without(grad: Tensor, ids: Tensor | None, row: int) -> Tensor:
    """Return a gradient, ``(*, n, dim)``, that is zero at `row`: the first of `ids` (n,), if it is there; None: all rows."""
    if not grad.shape[-2] or (ids is not None and not ids.is_cuda and int(ids[0]) != row):
        return grad
    first = torch.zeros_like(grad[..., :1, :])
    if ids is not None and ids.is_cuda:
        first = torch.where(ids[:1, None] == row, first, grad[..., :1, :])
    return torch.cat([first, grad[..., 1:, :]], dim=-2)


def _unpickle(
    arguments: tuple[Any, ...], vocabulary: Vocabulary, padding_idx: int | None, state: dict[str, Tensor]
) -> VocabularyHandle:
    from speedtransfer.optim.handle import _unpickle as plain

    handle = plain(*arguments)
    made = VocabularyHandle(handle.rows, vocabulary, padding_idx, handle.requires_grad, handle.idle)
    vocabulary.load_state_dict(state)
    return made
