"""A table as marks and deltas see it: rows by their numbers or by ids, of one process or of several, and their hashes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint.row_hashes import Content, hashes_of, reserved_sum
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.optim import Handle
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.owned import IdOwners

# What a vocabulary has by row, beside the ids themselves.
_OF_USES = ("last_use", "counts")


class MarkedTable:
    """A table as marks and deltas see it.

    Parameters
    ----------
    handle : Handle
    with_state : bool
        Whether a row is its weights, its state and what a vocabulary knows of it, or its weights alone.
    by_id : bool
        Whether rows are told apart by their ids though they are with state and this process has all.

    Attributes
    ----------
    of_ids : bool
        Whether rows are told apart by their ids, and may lie elsewhere in a copy.
    fills : dict of str to float or None
        The planes that a row consists of, each with the value of new rows; None: those have values of their own.
    beside : dict of str to Tensor
        Those of them, ``(num_rows,)``, that a vocabulary keeps.
    """

    def __init__(self, handle: Handle, with_state: bool, by_id: bool = False) -> None:
        self.handle = handle
        self._id_owners: IdOwners = handle.id_space.owners
        has_ids = handle.id_space.come_and_go
        # A copy of rows with their state may have them at the same places, but not where several processes share them out.
        self.of_ids = has_ids and (not with_state or by_id or not handle.owners.has_whole)
        self.fills: dict[str, float | None] = {"weight" + part: None for part in handle.rows.part_specs("weight")}
        self.beside: dict[str, Tensor] = {}
        if with_state:
            self.fills |= handle.rows.state_fills()
        if with_state and has_ids:
            saved, names = handle.id_space.vocabulary.state_dict(), _OF_USES if self.of_ids else ("ids", *_OF_USES)
            self.beside = {OF_VOCABULARY + name: saved[name] for name in names if name in saved}
            self.fills |= dict.fromkeys(self.beside)

    @property
    def count(self) -> int:
        """How many rows there are, or ids."""
        return len(self.handle.id_space.vocabulary) if self.of_ids else self.handle.num_rows

    @property
    def stored(self) -> list[str]:
        """The planes of the table itself."""
        return [name for name in self.fills if name not in self.beside]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return sum(self.handle.table.stored(name)[:1].nbytes for name in self.stored) + 8 * len(self.beside)

    def has_as_many(self, content: Content) -> bool:
        """Tell whether there are as many rows, or ids of this process, as in what may be the content of the table."""
        if content.ids is None or not self.of_ids:
            return content.ids is None and not self.of_ids and len(content.hashes) == self.count
        return int(self.owns(content.ids).sum()) == self.count

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Tell of each id (n,) whether it is one of this process."""
        return self._id_owners.owns(ids)

    def owned(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where among ids or numbers (n,) those that this process updates are, and their rows in the table here."""
        if self.of_ids:
            found = self.handle.id_space.vocabulary.rows_here(keys)
            there = np.flatnonzero(found >= 0)
            return there, found[there]
        at, rows = self.handle.owners.owned(torch.from_numpy(keys))
        return at.numpy(), rows.numpy()

    def to_all(self, keys: np.ndarray, values: Tensor) -> Tensor:
        """Return ``(n, width)`` values by key, of which each process gives those that it has `owned`. Collective."""
        if self.of_ids:
            return self._id_owners.to_all(keys, values)
        return self.handle.owners.to_all(torch.from_numpy(keys), values)

    def make_room_for(self, ids: np.ndarray, gone: np.ndarray) -> None:
        """Have rows for those of ids (n,) that are of this process, once the ids `gone` (m,) are; raise where it cannot be."""
        self.handle.id_space.vocabulary.make_room_for(ids[self.owns(ids)], gone)

    def by_id(self, advance: Callable[[int], None]) -> Content:
        """Return the hashes of the rows of all ids. Collective."""
        vocabulary = self.handle.id_space.vocabulary
        ids, rows = vocabulary.by_id()
        hashes = np.empty(len(ids), np.uint64)
        for some in row_chunks(len(ids), self.row_bytes):
            hashes[some] = hashes_of(ids[some], self.read(rows[some]), self.fills)
            advance(len(rows[some]) * self.row_bytes)
        ids, whole = self._id_owners.joined(ids, torch.from_numpy(hashes.view(np.int64)).unsqueeze(1))
        # Those of the first process are the ones that are read.
        reserved = {name: self._id_owners.from_first(part) for name, part in self.reserved().items()}
        return Content(whole[:, 0].numpy().view(np.uint64), ids, reserved_sum(reserved, self.fills))

    def reserved(self) -> dict[str, Tensor]:
        """Return the rows here that belong to no id, by plane of the table: ``(n, width)``."""
        rows = self.read(np.arange(self.handle.id_space.vocabulary.reserved))
        return {name: rows[name] for name in self.stored}

    def by_number(self, advance: Callable[[int], None]) -> Content:
        """Return the hashes of all rows, of all processes. Collective."""
        hashes = np.empty(self.count, np.uint64)
        for rows in row_chunks(self.count, self.row_bytes):
            numbers = np.arange(rows.start, rows.stop)
            at, here = (numbers, rows) if self.handle.owners.has_whole else self.owned(numbers)
            found = hashes_of(numbers[at] if at is not numbers else at, self.read(here), self.fills).view(np.int64)
            whole = self.to_all(numbers, torch.from_numpy(found).unsqueeze(1))
            hashes[rows] = whole[:, 0].numpy().view(np.uint64)
            advance(len(numbers) * self.row_bytes)
        return Content(hashes)

    def read(self, rows: np.ndarray | slice) -> dict[str, Tensor]:
        """Return rows by their numbers, as they are stored, by plane: ``(n, width)``."""
        table = self.handle.table
        if isinstance(rows, slice):
            found = {name: table.chunk(name, rows) for name in self.stored}
        else:
            found = dict(table.read(torch.from_numpy(rows).to(table.device), self.stored))
        return found | {name: values[rows].unsqueeze(1) for name, values in self.beside.items()}
