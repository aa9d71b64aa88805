"""Ids that come and go: a vocabulary says which row each has, and no pending gradient may reach the row of another id."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.dtypes import check_values
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.optim.id_owners import IdOwners, RankIdOwners
from speedtransfer.optim.id_space import IdSpace
from speedtransfer.optim.merge import Part
from speedtransfer.rows import LAST_STEP, Rows
from speedtransfer.tables import NOTHING, Known, loading
from speedtransfer.vocabulary import PADDING_ROW, UNSEEN_ROW, LoadPlan, Vocabulary
from speedtransfer.vocabulary.initial import check_range
from speedtransfer.vocabulary.loaded_state import unpack_features


class Stamp(NamedTuple):
    """When a lookup was made: which ids had the rows, of how many rows; how many ids it could not admit.

    And the clock, if it was noted as a use of the others, else -1: a step must note it.
    """

    generation: int
    num_rows: int
    clock: int
    missed: int


class VocabularyIds(IdSpace):
    """The ids of a table whose rows a vocabulary gives to them.

    The parameter has the shape of the table, in the order of rows. It reads as a whole; to write it as a whole raises, except
    for what fills it with initial values. The table begins with reserved rows, which no id has; of several processes those of
    rank 0 are the ones that are read, whoever has the id.

    Parameters
    ----------
    handle : Handle
        Whose ids these become.
    vocabulary : Vocabulary
        One that no other table has; of several processes it knows the ids of this one.
    padding_idx : int, optional
        The id of padding.
    """

    by_row, come_and_go, kind = False, True, "ids of a vocabulary"
    vocabulary: Vocabulary

    def __init__(self, handle: Any, vocabulary: Vocabulary, padding_idx: int | None = None) -> None:
        # It holds this object. The second serves its attributes, without a call.
        self._handle = weakref.ref(handle)
        self._of: Any = weakref.proxy(handle)
        # Rows in graphs whose gradient has not come, by the id() of the tensor of their ids, which is kept here, or of all.
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor | None, Known]] = {}
        # Ids that lookups of the pending gradient could not admit; whether it was warned of such.
        self._num_missed, self._has_warned = 0, False
        # Whether the pending gradient may be of rows that were not looked up since the last step.
        self._late = False
        # Whether the ids were loaded since the last step; optimizers whose state was loaded after them, and those of which it
        # is not known whose state they have, as other ids were loaded then.
        self._were_loaded = False
        self._with_state, self._unsure = weakref.WeakSet[Optimizer](), weakref.WeakSet[Optimizer]()
        vocabulary.bind(self, padding_idx)
        self.vocabulary = vocabulary
        self.owners = (IdOwners if handle.owners.is_alone else RankIdOwners)(handle, vocabulary)
        handle.id_space = self
        handle.set_padding(padding_idx)

    @property
    def handle(self) -> Any:
        """The handle of the table."""
        handle = self._handle()
        assert handle is not None
        return handle

    def __str__(self) -> str:
        return str(self._of)

    def padding_row(self, padding_idx: int | None) -> int | None:  # noqa: D102
        return None if self.vocabulary.padding_idx is None else PADDING_ROW * self.owners.processes

    def features_of(self, rows: Tensor, starts: Sequence[int]) -> Tensor:
        """Return the number of the feature of each of `rows` (n,), which this process has; 0: of none."""
        return self.vocabulary.features_of(rows // self.owners.processes)

    @property
    def unseen_row(self) -> int:
        """The row in the whole table that unseen ids read."""
        return UNSEEN_ROW * self.owners.processes

    # --- what the vocabulary asks (`vocabulary.owned.Owner`) ---------------------------------------------------------------

    @property
    def rows(self) -> Rows:
        """The rows of this process."""
        rows: Rows = self._of.rows
        return rows

    def grow(self, num_rows: int) -> None:
        """Give the table more rows."""
        self._of.grow(num_rows)

    def rows_in_use(self) -> np.ndarray | None:
        """Return the rows of which a gradient may come or is pending, (n,), some perhaps twice; None: of all."""
        pending = self._of.pending
        used: list[Any] = [(ids, known) for rows, ids, known in self._held.values() if rows() is not None]
        if any(ids is None for ids, _ in used) or (pending.used_whole and pending.grad is not None):
            return None
        used += [(rows, NOTHING) for rows in self.owners.rows_asked()]
        used += [(ids, known) for parts in pending.arriving.values() for ids, _, known in parts]
        # One that zero_grad(set_to_none=False) has made zero is that of no batch.
        if pending.ids is not None and not pending.is_cleared():
            used.append((pending.ids, pending.known))
        parts = [self._on_host(*each) for each in used]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def rows_released(self, rows: np.ndarray) -> None:
        """Leave `rows` (n,), which no id has any more, out of a gradient that is zero."""
        pending = self._of.pending
        if pending.ids is None or pending.grad is None or pending.assigned is not None:
            return
        if not np.isin(self._on_host(pending.ids, pending.known), rows).any():
            return
        ids = pending.ids.cpu().numpy()
        stay = torch.from_numpy(~np.isin(ids, rows) & (ids < self._of.table.num_rows)).to(pending.ids.device)
        if not bool(stay.all()):
            pending.set_gradient(pending.ids[stay], pending.grad[stay])
            # It is still one that the next backward replaces.
            pending.grad_version = -1

    def rows_changed(self, rows: np.ndarray) -> None:
        """Forget a pending gradient of one of `rows` (n,), which have other ids now, or none."""
        pending = self._of.pending
        if pending.ids is not None and np.isin(self._on_host(pending.ids, pending.known), rows).any():
            pending.clear()

    # --- lookups ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:  # type: ignore[override]
        """Grows whenever an id gets or loses a row."""
        return self.vocabulary.generation

    def rows_ahead(self, ids: Tensor) -> Tensor | None:  # noqa: D102
        if self.owners.processes > 1:
            # Their owners find them, when all look up.
            return None
        if ids.is_cuda and self._of.table.takes_padding:
            # None: the host is to map them, once they are there.
            found = self.vocabulary.find_on_device(ids.view(-1), counted=False)
            return None if found is None else found.view(ids.shape)
        rows = self.vocabulary.rows(ids)
        return rows.masked_fill_(rows < 0, UNSEEN_ROW)

    def stamp(self, num_missed: int = 0, counted: bool = False) -> Stamp:  # noqa: D102
        clock = self.vocabulary.clock if counted else -1
        return Stamp(self.vocabulary.generation, self._of.num_rows, clock, num_missed)

    def pin(self, rows: Tensor, ids: Tensor | None, known: Known) -> None:  # noqa: D102
        if self.owners.holds_lookups:
            if ids is not None:
                self.owners.hold(rows)
            return
        self._held = {key: entry for key, entry in self._held.items() if entry[0]() is not None}
        self._held[id(rows if ids is None else ids)] = weakref.ref(rows), ids, known

    def _on_host(self, ids: Tensor, known: Known) -> np.ndarray:
        """Return rows on the host, (n,), some perhaps twice; without padding."""
        noted = known.noted
        parts = [ids.cpu().numpy()] if noted is None else [self.vocabulary.noted_rows(part) for part in noted]
        rows = np.concatenate(parts)
        return rows[(rows >= 0) & (rows < self._of.table.num_rows)]

    # --- gradients --------------------------------------------------------------------------------------------------------

    def begin_deposit(self, part: Part, lookup: Any, whole: bool, summed: bool) -> tuple[Tensor, Any]:  # noqa: D102
        handle, (ids, grad, known) = self._of, part
        self._held.pop(id(ids), None)
        # `of_same_ids` has left out rows that have changed.
        if not whole:
            self._check_lookup(ids, known, lookup)
        # Ids that were not admitted are counted where they were looked up.
        goes_on = summed or handle.pending.grad is not None or handle.owners.has_left()
        missed = (self._num_missed if goes_on else 0) + (0 if lookup is None else lookup.missed)
        late = not isinstance(lookup, Stamp) or lookup.clock != self.vocabulary.clock
        return self.own_gradient(ids, grad), (missed, late)

    def end_deposit(self, noted: tuple[int, bool]) -> None:  # noqa: D102
        self._num_missed, late = noted
        self._late = self._late or late

    def _check_lookup(self, ids: Tensor, known: Known, lookup: Stamp | None) -> None:
        """Raise if a row of a lookup, (n,), is that of another id by now, or if it is not known when the lookup was."""
        if self.owners.holds_lookups:
            # The lookup is known by its number, and for how long a gradient may come for it.
            return
        if lookup is None:
            raise InvalidValueError(
                f"{self}: a gradient comes for rows whose lookup is not known, so that they may be those of other ids by now; "
                "look the ids up again"
            )
        self.check_same_ids(ids, known, lookup.generation)

    def check_same_ids(self, rows: Tensor, known: Known, version: int) -> None:  # noqa: D102
        if version != self.vocabulary.generation:
            numbers = self._on_host(rows, known)
            if self.vocabulary.have_changed(numbers[numbers < self._of.num_rows], version):
                raise InvalidValueError(
                    f"{self}: a gradient comes for rows of ids that were taken off since their lookup (a second backward "
                    "after a step, a gradient that was kept, or activate() without gradients); look the ids up again"
                )

    def of_same_ids(self, rows: Tensor, grad: Tensor, lookup: Stamp) -> Tensor:  # noqa: D102
        self._held.pop(id(rows), None)
        others = self.vocabulary.changed_rows(lookup.generation)
        others = others[others < len(grad)]
        if len(others):
            grad = grad.clone()
            grad[torch.from_numpy(others).to(grad.device)] = 0
        return grad

    def note_late(self) -> None:  # noqa: D102
        self._late = True

    def note_written(self, rows: Tensor, known: Known) -> None:  # noqa: D102
        # Several processes tell no changes.
        if self.owners.processes == 1:
            self.vocabulary.note_written(self._on_host(rows, known))

    def note_cleared(self) -> None:  # noqa: D102
        self._late = False

    def own_gradient(self, ids: Tensor | None, grad: Tensor) -> Tensor:
        """Return a gradient, ``(*, n, dim)``, that is zero for the row of unseen ids, unless that is trained."""
        return grad if self.vocabulary.unseen == "row" else _without(grad, ids, UNSEEN_ROW)

    # --- steps ------------------------------------------------------------------------------------------------------------

    def late_rows(self) -> np.ndarray | None:
        """Return the rows of the pending gradient, (n,), if some may not have been looked up since the last step."""
        handle = self._of
        # Several processes tell no changes.
        known = self._late and handle.pending.ids is not None and self.owners.processes == 1
        return self._on_host(handle.pending.ids, handle.pending.known) if known else None

    def count_step(self, late: np.ndarray | None) -> None:  # noqa: D102
        # A gradient that is not cleared is that of later steps too.
        self._late, self._were_loaded = True, False
        self.vocabulary.count_step(late)

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

    def fresh_rows(self) -> Tensor | None:
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
        handle = self._of
        handle.step.recover()
        with handle.rows.lock:
            if plan is None or not plan.is_for(state, num_saved):
                plan = self.vocabulary.plan_load(state, num_saved)
            # Before anything changes.
            handle.table.check_writable()
            if values is not None:
                check_values(values, f"{self}: what is to be loaded")
            if len(self._with_state) and self.vocabulary.would_move(plan):
                self._unsure.update(each for each in self._with_state if self._has_loose_state(each))
            with loading({handle.table: str(self)}, "load_state_dict") as changes:
                changes.append(True)
                self.vocabulary.load(plan)
                if values is not None:
                    handle.table.wait()
                    handle.rows.place("weight", values.detach(), plan.placement)
            self._were_loaded = True
            self._with_state.clear()

    def note_loaded_state(self, optimizer: Optimizer) -> None:  # noqa: D102
        self._unsure.discard(optimizer)
        if self._were_loaded:
            self._with_state.add(optimizer)

    def check_loaded_state(self, optimizer: Optimizer) -> None:  # noqa: D102
        if optimizer in self._unsure and self._has_loose_state(optimizer):
            raise OptimizerError(
                f"state of {type(optimizer).__name__} was loaded for the ids of {self}, and then other ids, before a step has "
                "taken it, so that it is not known whose it is; load the optimizer's state again, after the module's"
            )
        self._unsure.discard(optimizer)

    def _has_loose_state(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has state of the rows that is not in their planes."""
        handle = self._of
        state = optimizer.state.get(handle.param)
        own = handle.state is not None and handle.state.optimizer() is optimizer
        return bool(state) and not (own and handle.state.has_taken(state))

    # --- changes of the table ---------------------------------------------------------------------------------------------

    def forget_state(self) -> None:  # noqa: D102
        if LAST_STEP in self._of.table.planes:
            self.vocabulary.all_rows_changed()

    def follow_growth(self) -> None:  # noqa: D102
        self.vocabulary.follow()

    def check_dtype(self, dtype: Any) -> None:  # noqa: D102
        check_range(self.vocabulary.initial, dtype)

    def rows_replaced(self) -> None:  # noqa: D102
        self.vocabulary.follow()
        self.vocabulary.all_rows_changed()

    def reset_rows(self) -> bool:  # noqa: D102
        self.vocabulary.reset_rows()
        return True

    def fill(self, initial: Any) -> None:
        """Set what rows begin with, and the rows of all known ids to that."""
        self.vocabulary.set_initial(initial)

    def check_written(self, what: str) -> None:
        """Raise: rows are in no order that others know."""
        # No TypeError: Python would go on from `weight -= 1` to a new tensor.
        raise InvalidValueError(
            f"{self} has a vocabulary and rows in the order in which ids came, and cannot be {what}; use "
            "vocabulary.update(ids, rows), and for first values Vocabulary(initial=...) or torch.nn.init.normal_, uniform_, "
            "constant_"
        )

    # --- copies -----------------------------------------------------------------------------------------------------------

    def copy_to(self, handle: Any, memo: dict[int, Any]) -> None:  # noqa: D102
        made = copy.deepcopy(self.vocabulary, memo)
        VocabularyIds(handle, made, self.vocabulary.padding_idx)
        made.features = self.vocabulary.features
        made.load_state_dict(self.vocabulary.state_dict())

    def pickled(self, made: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: D102
        # `unpickle_with_ids` gets the arguments of the function that makes an ordinary handle.
        _, arguments, of_module = made
        state = {name: value.clone() for name, value in self.vocabulary.state_dict().items()}
        return unpickle_with_ids, (arguments, self.vocabulary, self.vocabulary.padding_idx, state), of_module


def unpickle_with_ids(
    arguments: tuple[Any, ...], vocabulary: Vocabulary, padding_idx: int | None, state: dict[str, Tensor]
) -> Any:
    """Return the handle that `VocabularyIds.pickled` was called for."""
    from speedtransfer.optim.handle import _unpickle

    handle = _unpickle(*arguments)
    VocabularyIds(handle, vocabulary, padding_idx)
    vocabulary.features = unpack_features(state)
    vocabulary.load_state_dict(state)
    return handle


def _without(grad: Tensor, ids: Tensor | None, row: int) -> Tensor:
    """Return a gradient, ``(*, n, dim)``, that is zero at `row`: the first of `ids` (n,), if it is there; None: all rows."""
    if not grad.shape[-2] or (ids is not None and not ids.is_cuda and int(ids[0]) != row):
        return grad
    first = torch.zeros_like(grad[..., :1, :])
    if ids is not None and ids.is_cuda:
        first = torch.where(ids[:1, None] == row, first, grad[..., :1, :])
    return torch.cat([first, grad[..., 1:, :]], dim=-2)
