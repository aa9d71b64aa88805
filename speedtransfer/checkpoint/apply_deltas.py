"""Apply files of the rows that have changed to a copy of a model: all is checked first."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.delta_checks import (
    DeltaReader,
    changes_of,
    check_fits,
    check_follows,
    check_rows,
    check_stored,
    content_after,
    has_been_applied,
    state_of_ids,
)
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.checkpoint.load import check_names
from speedtransfer.checkpoint.marked_table import MarkedTable
from speedtransfer.checkpoint.marks import Mark, check_kind, contents_of, given_for_delta, held, marked_tables
from speedtransfer.checkpoint.model import SavedModel
from speedtransfer.checkpoint.objects import check_rng_states, set_rng_states, states_set
from speedtransfer.checkpoint.optimizer import SavedOptimizer
from speedtransfer.checkpoint.plain_data import decode
from speedtransfer.checkpoint.table_rows import Readers
from speedtransfer.checkpoint.together import processes_of
from speedtransfer.dtypes import rows_at
from speedtransfer.errors import InvalidValueError
from speedtransfer.interrupts import to_its_end
from speedtransfer.tables import PathLike, loading, row_chunks


def apply_delta(
    path: PathLike,
    model: nn.Module,
    mark: Mark | None = None,
    optimizer: Optimizer | None = None,
    *,
    progress: bool | None = None,
    **objects: Any,
) -> Mark:
    """Write what `save_delta` has saved into a copy of the model, which must hold what was there before.

    Everything is checked before anything changes: that the rows of the copy are those that the delta begins with, to the bit,
    that it follows the last one that was applied, which `mark` knows, and that the rows in the file are those that were saved.
    Lookups of other threads meanwhile see each row whole.

    Parameters
    ----------
    path : path-like
        Of tables of several processes all of them must call it, each with this file; by how many it was saved does not matter.
    model : nn.Module
        With tables of the same keys, storage dtypes and widths; ones that may grow get the rows that came.
    mark : Mark, optional
        What the last ``apply_delta`` of this model returned, if nothing else has written to it since. Without it all rows are
        read to find out what they are, and a missing delta is noticed by its rows alone, if it has changed any.
    optimizer : torch.optim.Optimizer, optional
        If the delta was saved with one: of the same class and groups. Then the states of the random number generators are set
        too, as by `load_checkpoint`, and the copy goes on training with the same bits; a process beyond those that have saved
        gets those of rank 0.
    progress : bool, optional
        A bar on standard error, for reading all rows. Default: on a terminal, if it takes more than a second.
    **objects : object
        As in `load_checkpoint`.

    Returns
    -------
    Mark
        What the model holds now, for the next delta.

    Raises
    ------
    InvalidTypeError, InvalidValueError, OptimizerError
        The delta begins with other rows (one before it is missing, it has been applied, or it is of another run), or the model
        has other tables, or the optimizer is another one, or missing.
    StorageError
        The file is missing, damaged, or no delta.
    ProcessGroupError
        Another process failed (its own message says why), or they do not do the same; nothing has changed.
    """
    processes = processes_of("loads", [model, optimizer, *objects.values()])
    path, optimizers, others, tables = given_for_delta(processes, path, model, optimizer, objects)
    with processes.together():
        delta = Delta(path)
        by_id = {key for key, facts in delta.tables.items() if facts.vocabulary is not None}
        tables = marked_tables(model, bool(optimizers), by_id)
        _check_given(delta, mark, optimizers, others, objects, tables)
    known = None if mark is None else (mark._place, mark.fingerprints)
    processes.check_same(f"the delta {delta.place} to {known}")
    # State that is read in inference mode could never be trained.
    with held(tables), torch.inference_mode(False), torch.no_grad():
        for table in tables.values():
            if table.handle.id_space.come_and_go:
                table.handle.id_space.vocabulary.settle()
            table.handle.rows.catch_up()
        before = contents_of(tables, progress) if mark is None else mark._contents
        with processes.together():
            for key, table in tables.items() if mark is not None else ():
                check_rows(delta, key, table, before[key])
            after = {key: content_after(delta, key, before[key]) for key in tables}
            # Rows are written last.
            if delta.changes and all(before[key].total == after[key].total for key in tables):
                raise has_been_applied(delta)
            with manifest.damage_told(path):
                readers = {role: Readers(DeltaReader(delta, role, tables), None) for role in manifest.ROLES}  # type: ignore[arg-type]
                states, rng = _read_objects(delta, readers["objects"].whole, tables, others, processes.rank)
                ids = {key: state_of_ids(delta, key, t) for key, t in tables.items() if t.of_ids and t.beside}
                of_ids = [table.handle for table in tables.values() if table.of_ids]
                saved: list[SavedModel | SavedOptimizer] = [
                    SavedModel(delta.content["model"], model, readers["model"], of_ids)
                ]
                for name, value in optimizers.items():
                    saved.append(SavedOptimizer(delta.content["optimizers"][name], value, name, readers["optimizer"]))
        with ExitStack() as stack:
            with processes.together(), states_set(others, states):
                # What may find no room comes first.
                for part in saved:
                    part.allocate()
                for key, table in marked_tables(model, bool(optimizers), by_id).items():
                    check_stored(delta, key, table)
                for key, table in tables.items():
                    _make_room(delta, key, table)
            processes.tell_sizes()
            # Rows that have got other ids are not told apart from those of another run.
            torn = {table.handle.table: str(table.handle) for table in tables.values() if table.beside}
            stack.enter_context(loading(torn, "st.load_checkpoint")).append(True)
            with processes.together():
                for part in saved:
                    part.load(lambda count: None)
                for key, table in marked_tables(model, bool(optimizers), by_id).items():
                    _write_rows(delta, key, table)
                    if key in ids:
                        table.handle.id_space.vocabulary.go_on_with(ids[key])
                        table.handle.rows.load_state_dict(delta.content["model"]["counters"].get(key, {}))
                if optimizers:
                    set_rng_states(rng)
    return Mark(after, bool(optimizers), delta.place)


def _check_given(
    delta: Delta,
    mark: Mark | None,
    optimizers: dict[str, Optimizer],
    others: dict[str, Any],
    objects: dict[str, Any],
    tables: dict[str, MarkedTable],
) -> None:
    """Raise unless a delta fits what it is given with."""
    path = delta.path
    if delta.of_optimizers != sorted(optimizers):
        raise InvalidValueError(
            f"{str(path)!r} has the state of {delta.of_optimizers or 'no optimizer'} but {sorted(optimizers) or 'none'} was "
            "given; pass what it was saved with"
        )
    check_names(delta.content, {*optimizers, *others}, set(objects), repr(str(path)))
    check_fits(delta, tables)
    if mark is not None:
        check_kind(mark, "mark", bool(optimizers))
        check_follows(delta, mark)
    for table in tables.values():
        table.handle.table.check_writable()
    if mark is not None and not (
        mark._contents.keys() == tables.keys()
        and all(table.has_as_many(mark._contents[key]) for key, table in tables.items())
    ):
        raise InvalidValueError("mark is of a model with other tables; pass what st.apply_delta returned for this one")


def _read_objects(
    delta: Delta, whole: Any, tables: dict[str, MarkedTable], names: Collection[str], rank: int
) -> tuple[dict[str, Any], Any]:
    """Return the states of the objects `names`, and those of the random number generators of `rank`."""
    states = {name: decode(delta.content["objects"][name], whole.read) for name in names}
    rng = decode(delta.content["rng"], whole.read)
    if 0 < rank <= len(delta.generators):
        own, read = delta.generators[rank - 1], DeltaReader(delta, f"rows-{rank}", tables).read
        rng = decode(own["rng"], read)
        states |= {name: decode(state, read) for name, state in own["objects"].items() if name in names}
    check_rng_states(rng)
    return states, rng


def _make_room(delta: Delta, key: str, table: MarkedTable) -> None:
    """Have a table take the rows that came."""
    if table.of_ids:
        table.make_room_for(delta.rows[key].ids.numpy(), delta.rows[key].gone.numpy())
    elif delta.tables[key].rows > table.count:
        table.handle.grow(delta.tables[key].rows)


def _write_rows(delta: Delta, key: str, table: MarkedTable) -> None:
    """Write the rows of a delta into a table."""
    found, handle = delta.rows[key], table.handle
    parts = found.parts
    if table.of_ids:
        handle.id_space.vocabulary.follow_changes(changes_of(delta, key, table))
        _write(table, torch.arange(len(found.reserved["weight"]), device="cpu"), found.reserved)
    # Rows that were read ahead are old.
    handle.owners.changes += 1
    at, rows = map(torch.from_numpy, table.owned(found.ids.numpy()))
    if not handle.owners.has_whole:
        parts = {name: rows_at(part, at) for name, part in parts.items()}
    _write(table, rows, parts)
    if table.of_ids:
        for name, values in table.beside.items():
            values[rows] = parts[name][:, 0]
    handle.table.wait()


def _write(table: MarkedTable, rows: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Write the rows `rows` (n,) of a table as they are stored, by plane."""
    target, device = table.handle.table, table.handle.table.device
    for some in row_chunks(len(rows), sum(part[:1].nbytes for part in parts.values())):
        values = {name: parts[name][some].to(device) for name in table.stored}
        numbers = rows[some].to(device)
        to_its_end(functools.partial(target.write, numbers, values, unsorted=True))
