"""What the tables of a model held at a time: a hash of each row, by which those that differ by now are found.

Rows are told apart by what they hold, not by who wrote them, so that no way to write one is missed: a step, ``weight[i] = 0``,
an array over the memory, a checkpoint. A mark takes 8 bytes a row, 16 of an id, and making one reads all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.checkpoint.arguments import check_arguments
from speedtransfer.checkpoint.first_state import store_all
from speedtransfer.checkpoint.model import tables_of
from speedtransfer.checkpoint.row_hashes import Content, hashes_of, reserved_sum
from speedtransfer.checkpoint.together import Processes, processes_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.optim import Handle
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import PathLike, row_chunks
from speedtransfer.tables.saving import check_safetensors_path

# What a vocabulary has by row.
_BY_ROW = ("ids", "last_use", "counts")


class MarkedTable:
    """A table as marks and deltas see it.

    Parameters
    ----------
    handle : Handle
    with_state : bool
        Whether a row is its weights, its state and what a vocabulary knows of it, or its weights alone.

    Attributes
    ----------
    of_ids : bool
        Whether rows are told apart by their ids, and may lie elsewhere in a copy.
    fills : dict of str to float or None
        The planes that a row consists of, each with the value of new rows; None: those have values of their own.
    beside : dict of str to Tensor
        Those of them, ``(num_rows,)``, that a vocabulary keeps.
    """

    def __init__(self, handle: Handle, with_state: bool) -> None:
        self.handle = handle
        has_ids = handle.id_space.come_and_go
        self.of_ids = has_ids and not with_state
        self.fills: dict[str, float | None] = {"weight" + part: None for part in handle.rows.part_specs("weight")}
        self.beside: dict[str, Tensor] = {}
        if with_state:
            self.fills |= handle.rows.state_fills()
        if with_state and has_ids:
            saved = handle.id_space.saved()
            self.beside = {OF_VOCABULARY + name: saved[name] for name in _BY_ROW if name in saved}
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

    def owned(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where among numbers of rows (n,) those that this process updates are, and their rows in the table here."""
        at, rows = self.handle.owners.owned(torch.from_numpy(numbers))
        return at.numpy(), rows.numpy()

    def hashes(self, rows: slice) -> np.ndarray:
        """Return the hashes of some rows, of all processes, (n,)."""
        numbers = np.arange(rows.start, rows.stop)
        at, here = (numbers, rows) if self.handle.owners.has_whole else self.owned(numbers)
        found = hashes_of(numbers[at] if at is not numbers else at, self.read(here), self.fills).view(np.int64)
        whole = self.handle.owners.to_all(torch.from_numpy(numbers), torch.from_numpy(found).unsqueeze(1))
        return whole[:, 0].numpy().view(np.uint64)

    def read(self, rows: np.ndarray | slice) -> dict[str, Tensor]:
        """Return rows by their numbers, as they are stored, by plane: ``(n, width)``."""
        table = self.handle.table
        if isinstance(rows, slice):
            found = {name: table.chunk(name, rows) for name in self.stored}
        else:
            found = dict(table.read(torch.from_numpy(rows).to(table.device), self.stored))
        return found | {name: values[rows].unsqueeze(1) for name, values in self.beside.items()}


class Place(NamedTuple):
    """Where deltas are: by what `mark` has drawn for them, how many there have been since, and the name of the last one."""

    run: str
    number: int = 0
    name: str = ""


class Mark:
    """What :func:`speedtransfer.mark` returns; `save_delta` and `apply_delta` take it and return the next one.

    Attributes
    ----------
    fingerprints : dict of str to str
        16 hexadecimal digits for each table, by its key in the state dict: equal where all rows are, to the bit, and
        their ids; and their state, if the mark was made with an optimizer.
    number : int
        Of the delta that the model was at, counted from `mark`; 0: it was at none, or nothing is known of them.
    """

    def __init__(self, contents: Mapping[str, Content], with_state: bool, place: Place) -> None:
        self._contents, self._with_state, self._place = dict(contents), with_state, place
        self.number = place.number
        self.fingerprints = {key: f"{found.total:016x}" for key, found in self._contents.items()}

    def __repr__(self) -> str:
        return f"Mark({self.fingerprints})"


def mark(model: nn.Module, optimizer: Optimizer | None = None, *, progress: bool | None = None) -> Mark:
    """Note what the tables of a model hold now, for a `save_delta` of what has changed since.

    Rows of ``idle="exact"`` first take the steps that they have missed. A mark takes 8 bytes a row, and reads all rows once.
    With tables that several processes own all of them must call it; each takes 8 bytes for each row of all.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer, optional
        With it the mark is one of rows and their state, for deltas by which a copy can go on training.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Returns
    -------
    Mark

    Raises
    ------
    InvalidTypeError, InvalidValueError
        `model` is no module, or has no table, or one with a vocabulary of several processes; `optimizer` is none.
    ProcessGroupError
        Another process failed, or has made other steps.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer; pass it, or leave it out"
        )
    if optimizer is not None:
        store_all(optimizer)
    with_state = optimizer is not None
    processes = processes_of("reads all rows", [model])
    with processes.together():
        tables = marked_tables(model, with_state)
    processes.prepare()
    with held(tables):
        return Mark(contents_of(tables, progress), with_state, Place(processes.unique()))


def given_for_delta(
    processes: Processes, path: PathLike, model: nn.Module, optimizer: Optimizer | None, objects: dict[str, Any]
) -> tuple[Path, dict[str, Optimizer], dict[str, Any], dict[str, MarkedTable]]:
    """Return the path of a delta, the optimizers and other objects by name, and the tables; raise where one is wrong."""
    with processes.together():
        file = check_safetensors_path(path)
        _, optimizers, others = check_arguments(file, model, optimizer, objects)
        for each in optimizers.values():
            store_all(each)
        tables = marked_tables(model, bool(optimizers))
    processes.check_same(f"the delta {str(file)!r} of {sorted(optimizers)}")
    processes.prepare()
    return file, optimizers, others, tables


def marked_tables(model: object, with_state: bool) -> dict[str, MarkedTable]:
    """Return the tables of a model by their keys in its state dict; raise where not all can be marked."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module; pass the model itself"
        )
    tables = tables_of(model)
    if not tables:
        raise InvalidValueError(
            f"model has no table whose rows could be marked ({type(model).__name__}); save it by torch.save, or make its "
            "embeddings tables: st.replace_embeddings(model)"
        )
    for key, handle in tables.items():
        if not handle.owners.has_whole and handle.id_space.come_and_go:
            raise InvalidValueError(
                f"{key} has a vocabulary that several processes share out, and ids in no order; use st.save_checkpoint"
            )
    return {key: MarkedTable(handle, with_state) for key, handle in tables.items()}


@contextlib.contextmanager
def held(tables: Mapping[str, MarkedTable]) -> Iterator[None]:
    """Keep other threads from stepping meanwhile."""
    with contextlib.ExitStack() as stack:
        for handle in (table.handle for table in tables.values()):
            handle.step.recover()
            if handle.id_space.come_and_go:
                handle.id_space.vocabulary.settle()
            stack.enter_context(handle.rows.lock)
        yield


def contents_of(tables: Mapping[str, MarkedTable], progress: bool | None = None) -> dict[str, Content]:
    """Return the hashes of all rows."""
    found = {}
    size = sum(table.row_bytes * table.handle.table.num_rows for table in tables.values())
    with ByteProgress("marking rows", size, progress) as bar:
        for key, table in tables.items():
            table.handle.rows.catch_up()
            ids, numbers, reserved = None, np.empty(0, np.int64), 0
            if table.of_ids:
                vocabulary = table.handle.id_space.vocabulary
                ids, numbers = vocabulary.by_id()
                reserved = reserved_sum(table.read(np.arange(vocabulary.reserved)))
            count = table.count if ids is None else len(ids)
            hashes = np.empty(count, np.uint64)
            for rows in row_chunks(count, table.row_bytes):
                rows = slice(rows.start, min(rows.stop, count))
                if ids is None:
                    hashes[rows] = table.hashes(rows)
                else:
                    hashes[rows] = hashes_of(ids[rows], table.read(numbers[rows]), table.fills)
                bar.advance((rows.stop - rows.start) * table.row_bytes)
            found[key] = Content(hashes, ids, reserved)
    return found


def check_kind(mark: object, name: str, with_state: bool) -> None:
    """Raise unless this is a mark that was made with an optimizer, or without, as a delta."""
    if not isinstance(mark, Mark):
        raise InvalidTypeError(
            f"{name} is a {type(mark).__name__} but must be a mark; pass what st.mark or the last delta returned"
        )
    if mark._with_state is not with_state:
        made, given = ("with an optimizer", "without one") if mark._with_state else ("without an optimizer", "with one")
        raise InvalidValueError(
            f"{name} was made {made} but this delta is {given}; make all of them with the optimizer (st.mark(model, "
            "optimizer)), or none"
        )
