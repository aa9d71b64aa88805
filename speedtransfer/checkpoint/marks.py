"""What the tables of a model held at a time: a hash of each row, by which those that differ by now are found.

Rows are told apart by what they hold, not by who wrote them, so that no way to write one is missed: a step, ``weight[i] = 0``,
an array over the memory, a checkpoint. A mark takes 8 bytes a row, 16 of an id, and making one reads all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from speedtransfer.checkpoint.arguments import check_arguments
from speedtransfer.checkpoint.first_state import store_all
from speedtransfer.checkpoint.marked_table import MarkedTable
from speedtransfer.checkpoint.model import tables_of
from speedtransfer.checkpoint.row_hashes import Content
from speedtransfer.checkpoint.together import Processes, processes_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim.state_dicts import handles_of
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import PathLike
from speedtransfer.tables.saving import check_safetensors_path


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
        `model` is no module, or has no table; `optimizer` is none, or rows that it trains have the state of another.
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
        for handle, _ in [] if optimizer is None else handles_of(optimizer):
            if handle.rows.state_fills() and (handle.state is None or handle.state.optimizer() is not optimizer):
                raise InvalidValueError(
                    f"{handle} has state of another optimizer until this {type(optimizer).__name__} makes a step, so that a "
                    "checkpoint has none of it; make a step first"
                )
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


def marked_tables(model: object, with_state: bool, by_id: Collection[str] = ()) -> dict[str, MarkedTable]:
    """Return the tables of a model by their keys in its state dict; raise where not all can be marked.

    Those of `by_id` are so also with their state.
    """
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
    return {key: MarkedTable(handle, with_state, key in by_id) for key, handle in tables.items()}


@contextlib.contextmanager
def held(tables: Mapping[str, MarkedTable]) -> Iterator[None]:
    """Keep other threads from stepping meanwhile."""
    with contextlib.ExitStack() as stack:
        for handle in (table.handle for table in tables.values()):
            handle.step.recover()
            stack.enter_context(handle.rows.lock)
        yield


def contents_of(tables: Mapping[str, MarkedTable], progress: bool | None = None) -> dict[str, Content]:
    """Return the hashes of all rows."""
    found = {}
    size = sum(table.row_bytes * table.handle.table.num_rows for table in tables.values())
    with ByteProgress("marking rows", size, progress) as bar:
        for key, table in tables.items():
            table.handle.rows.catch_up()
            found[key] = table.by_id(bar.advance) if table.of_ids else table.by_number(bar.advance)
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
