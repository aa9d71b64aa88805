"""Write files of the rows that have changed, by which a copy of a model follows one that is trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.checkpoint.delta_file import (
    FORMAT,
    OF_PLACES,
    VERSION,
    TableFacts,
    checksum,
    digest,
    vocabulary_facts,
)
from speedtransfer.checkpoint.generators import gather_generators
from speedtransfer.checkpoint.marked_table import MarkedTable
from speedtransfer.checkpoint.marks import Mark, Place, check_kind, contents_of, given_for_delta, held, marked_tables
from speedtransfer.checkpoint.plain_data import find_tensors, set_num_rows
from speedtransfer.checkpoint.row_hashes import Content
from speedtransfer.checkpoint.save import plan_files
from speedtransfer.checkpoint.table_rows import StoredRows
from speedtransfer.checkpoint.tensors import PickedRows, TensorPlan, read_chunks
from speedtransfer.checkpoint.together import Processes, processes_of
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.rows import Rows
from speedtransfer.tables import PathLike, files


def save_delta(
    path: PathLike,
    model: nn.Module,
    since: Mark,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    progress: bool | None = None,
    **objects: Any,
) -> Mark:
    """Write the rows of a model's tables that have changed since a mark, and all else that `save_checkpoint` would save.

    Without an optimizer these are weights, for a copy that serves; with a vocabulary the rows of ids, and which ids are gone,
    not when and how often they were used. With an optimizer they are weights and state, for a copy that can go on training;
    with a vocabulary by their place, or by id where several processes share these out, with all that it knows. The file is
    written beside its place and renamed: it is whole, or not there.

    With tables that several processes own (``process_group=``) all of them must call it, with the same path and marks of the
    same time. Their rows go through rank 0, which needs memory for those that have changed and writes the file: it is as that
    of one process, with the objects of rank 0 and the generators of all.

    Parameters
    ----------
    path : path-like
        A ``.safetensors`` file.
    model : nn.Module
    since : Mark
        What the receiver has by now: of :func:`speedtransfer.mark`, or the last ``save_delta``. One that was made with an
        optimizer, or without, as this delta.
    optimizer : torch.optim.Optimizer, optional
        As in `save_checkpoint`.
    extra, **objects : optional
        As in `save_checkpoint`; `extra` is for the checkpoint that :func:`speedtransfer.merge` makes.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Returns
    -------
    Mark
        What the model holds now, for the next delta.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        As :func:`speedtransfer.mark` and `save_checkpoint`; `since` is none, or of a model with other tables; the path has
        another suffix.
    StorageError
        It cannot be written.
    ProcessGroupError
        Another process failed (its own message says why), or they do not do the same; nothing has changed.
    """
    processes = processes_of("saves", [model, optimizer, *objects.values()])
    path, optimizers, others, tables = given_for_delta(processes, path, model, optimizer, objects)
    with processes.together():
        check_kind(since, "since", bool(optimizers))
        if since._contents.keys() != tables.keys():
            raise InvalidValueError(
                f"since is a mark of the tables {sorted(since._contents)} but the model has {sorted(tables)}; mark this model"
            )
    processes.check_same(f"since a mark of {since._place} and {since.fingerprints}")
    with held(tables), torch.no_grad():
        now = contents_of(tables, progress)
        changed = {key: _changed(key, tables[key], since._contents[key], now[key]) for key in tables}
        picked = ChangedRows({table.handle.rows: (table, now[key].keys[changed[key]]) for key, table in tables.items()})
        if optimizers:
            processes.gather_ids()
        with processes.together():
            plans, content, _ = plan_files(Processes("saves", None), picked, model, optimizers, others, extra)
            processes.release()
        picked.gather(plans)
        generators = gather_generators(processes, others, plans)
        # Those of a state that was made just now are new.
        tables = marked_tables(model, bool(optimizers))
        written, said, names = list[files.Written](), dict[str, Any](), picked.names_in(plans)
        for number, (key, table) in enumerate(tables.items()):
            before, after, at = since._contents[key], now[key], changed[key]
            planes = names.get(table.handle.rows, {})
            planes = planes | _take_ids(key, table, after.keys[at], plans["model"], content)
            if planes.keys() != table.fills.keys():
                raise InvalidValueError(
                    f"{key} has state ({sorted(table.fills.keys() - planes.keys())[:3]}) of another optimizer, or of before a "
                    "load_state_dict; pass all optimizers of the table by name, or make a step first"
                )
            said[key] = TableFacts(
                *(len(before.keys), len(after.keys), table.handle.rows.encoding("weight"), planes, table.fills),
                *(f"{before.total:016x}", f"{after.total:016x}", vocabulary_facts(table), before.reserved),
                not table.handle.owners.has_whole,
            )._asdict()
            written += [_column(f"{number}.ids", after.keys[at])]
            written += [_column(f"{number}.before", before.of(after.keys[at]))]
            if table.of_ids:
                gone = np.setdiff1d(before.keys, after.keys)
                written += [_column(f"{number}.gone", gone), _column(f"{number}.gone_before", before.of(gone))]
                plans[f"{number}.reserved"] = TensorPlan()
                plans[f"{number}.reserved"].tensors.update(table.reserved())
        by_row = {name: facts for facts in said.values() for name in facts["planes"].values()}
        # Of ids those that there are.
        set_num_rows(content, {name: of["rows"] for name, of in by_row.items() if of["vocabulary"] is not None})
        digests = _add_tensors(written, plans, by_row)
        run, number, follows = since._place
        about = {"run": run, "number": number + 1, "follows": follows, "generators": generators}
        about["processes"] = 0 if processes.is_alone else processes.ranks
        text = json.dumps({**about, "tables": said, "digests": digests, "content": content})
        place = Place(run, number + 1, checksum(text))
        with processes.together():
            if processes.is_first:
                files.write(path, written, {"format": FORMAT, "version": VERSION, "sha256": place.name, "said": text})
        # Of the first process: what the others say of their generators is not written.
        place = Place(run, number + 1, next(filter(None, processes.texts(place.name if processes.is_first else ""))))
    return Mark(now, bool(optimizers), place)


def _add_tensors(written: list[files.Written], plans: dict[str, TensorPlan], by_row: Collection[str]) -> dict[str, str]:
    """Add the tensors of all plans to what is written, and return the digests of those that are not `by_row`."""
    tensors, digests = dict[str, Any](), dict[str, str]()
    for role, plan in plans.items():
        in_role = not role.endswith(".reserved")
        found = {f"{role}{'/' if in_role else '.'}{name}": tensor for name, tensor in plan.tensors.items()}
        # Copies: a step of another thread may write to the dense part before it is written, and locks only keep rows.
        whole = {n: t for n, t in found.items() if in_role and n not in by_row and isinstance(t, Tensor)}
        whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole.items()}
        tensors |= found | whole
        digests |= {name: digest(tensor) for name, tensor in whole.items()}
    # Wide dtypes first, so that all are aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        written.append((name, tensor.dtype, tuple(tensor.shape), read_chunks(tensor)))
    return digests


def _changed(key: str, table: MarkedTable, before: Content, after: Content) -> np.ndarray:
    """Return which keys have rows that have changed, by their place among them."""
    if table.of_ids is not (before.ids is not None) or (len(before.keys) > len(after.keys) and not table.of_ids):
        raise InvalidValueError(
            f"since has {len(before.keys)} rows of {key!r} but the table has {len(after.keys)}; mark this model"
        )
    return np.flatnonzero(before.of(after.keys) != after.hashes)


class ChangedRows(StoredRows):
    """Where a plan has the rows of tables from: those that have changed, by the keys that are given."""

    is_divided = False

    def __init__(self, changed: Mapping[Rows, tuple[MarkedTable, np.ndarray]]) -> None:
        self._changed = changed
        self._picked: dict[Rows, dict[str, Any]] = {}

    def plane(self, rows: Rows, name: str) -> Any:
        """Return the changed rows of a plane of a table."""
        if rows not in self._changed:
            raise InvalidValueError(
                f"an optimizer has the state of a table of {rows.table.num_rows} rows that the model does not have; pass a "
                "model with all tables"
            )
        table, keys = self._changed[rows]

        def read(some: np.ndarray) -> Tensor:
            _, here = table.owned(some)
            at = torch.from_numpy(here).to(rows.table.device)
            return table.to_all(some, rows.table.read(at, [name])[name])

        picked = PickedRows(rows.table.stored(name), len(keys), lambda start, stop: keys[start:stop], read)
        self._picked.setdefault(rows, {})[name] = picked
        return picked

    def gather(self, plans: Mapping[str, TensorPlan]) -> None:
        """Have tensors of the rows of several processes in the place of what would ask these as it is written. Collective."""
        several = {
            id(t)
            for rows, found in self._picked.items()
            if not self._changed[rows][0].handle.owners.has_whole
            for t in found.values()
        }
        whole = dict[int, Tensor]()
        for plan in plans.values():
            for name, tensor in plan.tensors.items():
                if id(tensor) in several:
                    parts = [torch.empty(0, dtype=tensor.dtype, device="cpu"), *map(torch.clone, read_chunks(tensor))]
                    whole[id(tensor)] = plan.tensors[name] = torch.cat(parts).view(tensor.shape)
        for found in self._picked.values():
            found.update({plane: whole.get(id(t), t) for plane, t in found.items()})

    def names_in(self, plans: Mapping[str, TensorPlan]) -> dict[Rows, dict[str, str]]:
        """Return by table and plane the name that the tensor of its rows has in the file."""
        names = {id(t): f"{role}/{name}" for role, plan in plans.items() for name, t in plan.tensors.items()}
        return {rows: {plane: names[id(t)] for plane, t in found.items()} for rows, found in self._picked.items()}


def _take_ids(
    key: str, table: MarkedTable, keys: np.ndarray, plan: TensorPlan, content: dict[str, Any]
) -> dict[str, str]:
    """Have a plan hold of what a vocabulary has by row the changed rows; nothing else where rows are without state.

    Where rows are told apart by ids it does not have their places. Collective. Returns their names in the file.
    """
    entries, start = content["model"]["entries"], key.removesuffix("weight")
    kept = {start + plane for plane in table.beside}
    for name in [name for name in entries if table.of_ids and name.startswith(start + OF_VOCABULARY)]:
        if not kept or (name not in kept and name.removeprefix(start + OF_VOCABULARY) in OF_PLACES):
            for tensor in find_tensors(entries.pop(name)):
                del plan.tensors[tensor]
    found, (_, here) = {plane: entries[start + plane]["v"] for plane in table.beside}, table.owned(keys)
    for plane, name in found.items():
        values = table.beside[plane][torch.from_numpy(here)].unsqueeze(1)
        plan.tensors[name] = table.to_all(keys, values)[:, 0]
    return {plane: f"model/{name}" for plane, name in found.items()}


def _column(name: str, values: np.ndarray) -> files.Written:
    return name, torch.int64, (len(values), 1), iter([torch.from_numpy(values.view(np.int64)).unsqueeze(1)])
