"""What an id of a lookup means: the number of a row, or what a vocabulary gives rows to (`optim.vocabulary_ids`).

CONTRIBUTING.md adds another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedtransfer.optim.merge import Part
from speedtransfer.tables import Known
from speedtransfer.vocabulary.owned import IdOwners


class IdSpace:
    """Ids that are the numbers of their rows. What is based on it finds the rows of others, or gives rows to ids as they come.

    A handle asks it where that makes a difference.
    """

    # Whether ids are the numbers of their rows; whether rows can become those of other ids.
    by_row: ClassVar[bool] = True
    come_and_go: ClassVar[bool] = False
    # For messages.
    kind: ClassVar[str] = "row numbers"
    # What gives ids their rows; grows whenever one gets or loses a row.
    vocabulary: Any = None
    version: int = 0
    # Who knows the rows of which ids; what a checkpoint has of them, and when, these say.
    owners: Any = IdOwners()

    def find(self, ids: Any) -> Any:
        """Return the numbers of the rows of ids, in their shape, on any device; asked in each lookup unless ids are `by_row`.

        Of ids that come and go the module asks in another way (`nn.vocabulary_lookup`).

        Raises
        ------
        RowIndexError
            An id has no row.
        """
        return ids

    def rows_ahead(self, ids: Tensor) -> Tensor | None:
        """Return the rows that ids, int64, have by now, in their shape, to be read ahead; None: a lookup will find them."""
        return ids

    def padding_row(self, padding_idx: int | None) -> int | None:
        """Return the row of padding in the whole table, where that of the module is `padding_idx`."""
        return padding_idx

    def features_of(self, rows: Tensor, starts: Sequence[int]) -> Tensor:
        """Return the number of the feature of each of `rows` (n,), numbered as in all processes together.

        `starts` are the first rows of the features, where ids are row numbers.
        """
        # The last of those that begin at a row has it: others before have no rows.
        edges = torch.tensor(starts[1:], dtype=torch.int64, device="cpu").to(rows.device)
        return torch.bucketize(rows, edges, right=True)

    def reset_rows(self) -> bool:
        """Set the rows of known ids to their initial values; return whether they have such."""
        return False

    def check_written(self, what: str) -> None:
        """Raise if rows cannot be written by their numbers, in a way that is `what`."""

    def stamp(self, num_missed: int = 0, counted: bool = False) -> Any:
        """Return what a gradient must know of a lookup made now, which could not admit `num_missed` ids.

        `counted`: it was noted as a use of the others.
        """

    def pin(self, rows: Tensor, ids: Tensor | None, known: Known) -> None:
        """Let rows in a graph, ``(n, dim)``, be those of their ids until their gradient comes; `ids` (n,), or None: all."""

    def begin_deposit(self, part: Part, lookup: Any, whole: bool, summed: bool) -> tuple[Tensor, Any]:
        """Return what is trained of a gradient, ``(n, dim)``, and what `end_deposit` has to know.

        Raises
        ------
        InvalidValueError
            A row has become that of another id since the lookup.
        """
        return part[1], None

    def end_deposit(self, noted: Any) -> None:
        """End a deposit, with what `begin_deposit` has noted."""

    def of_same_ids(self, rows: Tensor, grad: Tensor, lookup: Any) -> Tensor:
        """Return the gradient of all rows, which a graph has had as `rows`, zero where other ids have them since `lookup`."""
        return grad

    def check_same_ids(self, rows: Tensor, known: Known, version: int) -> None:
        """Raise if one of `rows` (n,) has become that of another id since the `version`."""

    def own_gradient(self, ids: Tensor | None, grad: Tensor) -> Tensor:
        """Return the gradient of the rows `ids` (n,), ``(*, n, dim)``, or of all (None), without what is not trained."""
        return grad

    def note_late(self) -> None:
        """Note that the pending gradient may be of rows that were not looked up since the last step."""

    def note_written(self, rows: Tensor, known: Known) -> None:
        """Note that a lookup may have written to `rows` (n,)."""

    def note_cleared(self) -> None:
        """Note that there is no pending gradient any more."""

    def late_rows(self) -> Any:
        """Return what `count_step` has to know from before the step."""
        return None

    def count_step(self, late: Any) -> None:
        """Count a step, with what `late_rows` has returned before it."""

    def note_loaded_state(self, optimizer: Any) -> None:
        """Note that the state of an optimizer was loaded, which the next step takes."""

    def check_loaded_state(self, optimizer: Any) -> None:
        """Raise if it is not known whose state of rows an optimizer has loaded."""

    def step_ended(self) -> None:
        """Do what follows a step of all tables."""

    def fresh_rows(self) -> Tensor | None:
        """Return the rows, (n,), that have become those of new ids since the last step; None: rows keep their ids."""
        return None

    def check_dtype(self, dtype: Any) -> None:
        """Raise unless rows of `dtype` can hold what they begin with."""

    def rows_replaced(self) -> None:
        """Note that the handle has another table with the same rows."""

    def follow_growth(self) -> None:
        """Note that the table has grown."""

    def forget_state(self) -> None:
        """Note that the rows are to lose the state of their optimizer."""

    # --- copies -----------------------------------------------------------------------------------------------------------

    def copy_to(self, handle: Any, memo: dict[int, Any]) -> None:
        """Give the handle of a copy of the rows ids like these."""
        handle.id_space = self

    def pickled(self, made: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what `Handle.__reduce__` is to return, where `made` is that of a handle whose ids are row numbers."""
        return made
