"""The handle of a table whose rows belong to ids that come and go: a vocabulary says which."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import InvalidTypeError
from speedtransfer.interrupts import to_its_end
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.vocabulary_gradient import VocabularyGradient
from speedtransfer.rows import LAST_STEP, Rows
from speedtransfer.tables import loading
from speedtransfer.vocabulary import PADDING_ROW, UNSEEN_ROW, LoadPlan, Vocabulary


class VocabularyHandle(VocabularyGradient):
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
        self._start_holding()
        # Whether it was warned of ids that lookups could not admit.
        self._has_warned = False
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

    # --- steps --------------------------------------------------------------------------------------------------------

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
            with loading({self.table: str(self)}, "load_state_dict") as changes:
                changes.append(True)
                self.vocabulary.load(plan)
                if values is not None:
                    self.table.wait()
                    self.rows.place("weight", values.detach(), plan.placement)

    # --- changes of the table -----------------------------------------------------------------------------------------

    def grow(self, num_rows: int) -> None:
        """Give the table more rows."""
        before = self.ids
        try:
            super().grow(num_rows)
        finally:
            to_its_end(lambda: self._follow_rows(before))

    def _follow_rows(self, before: Tensor | None) -> None:
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
            f"{self} has a vocabulary and rows in the order in which ids came, and cannot be {what}; use "
            "vocabulary.update(ids, rows), and for first values Vocabulary(initial=...) or torch.nn.init.normal_, uniform_, "
            "constant_"
        )

    # --- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        made = copy.deepcopy(self.vocabulary, memo)
        padding = self.vocabulary.padding_idx
        duplicate = VocabularyHandle(self.rows.copy(), made, padding, self.requires_grad, self.idle)
        duplicate.__dict__.update(self._of_module())
        made.load_state_dict(self.vocabulary.state_dict())
        memo[id(self)] = duplicate
        return duplicate

    def __reduce__(self) -> Any:
        # `_unpickle` gets the arguments of the function that makes an ordinary handle.
        _, arguments, of_module = super().__reduce__()
        return _unpickle, (arguments, self.vocabulary, self.vocabulary.padding_idx, self._state()), of_module

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.vocabulary.state_dict().items()}


def _unpickle(
    arguments: tuple[Any, ...], vocabulary: Vocabulary, padding_idx: int | None, state: dict[str, Tensor]
) -> VocabularyHandle:
    from speedtransfer.optim.handle import _unpickle as plain

    handle = plain(*arguments)
    made = VocabularyHandle(handle.rows, vocabulary, padding_idx, handle.requires_grad, handle.idle)
    vocabulary.load_state_dict(state)
    return made
