"""Files of the rows that have changed, by which a copy of a model follows one that is trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer.checkpoint.delta_file import (
    FORMAT,
    VERSION,
    Delta,
    TableFacts,
    checksum,
    digest,
    stored_as,
    vocabulary_facts,
)
from speedtransfer.checkpoint.marks import (
    Mark,
    contents_of,
    held,
    marked_tables,
    names_of,
    read,
)
from speedtransfer.checkpoint.model import dense_of, load_dense
from speedtransfer.checkpoint.tensors import PickedRows
from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.optim import Handle
from speedtransfer.tables import PathLike, files, row_chunks
from speedtransfer.tables.saving import check_safetensors_path


def save_delta(path: PathLike, model: nn.Module, since: Mark, *, progress: bool | None = None) -> Mark:
    """Write the rows of a model's tables that have changed since a mark, and all else of its state dict.

    With a vocabulary these are the rows of ids, and which ids are gone; not when and how often they were used. The file is
    written beside its place and renamed: it is whole, or not there. It does not hold the state of optimizers;
    `save_checkpoint` does.

    Parameters
    ----------
    path : path-like
        A ``.safetensors`` file.
    model : nn.Module
    since : Mark
        What the receiver has by now: of :func:`speedtransfer.mark`, or the last ``save_delta``.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Returns
    -------
    Mark
        What the model holds now, for the next delta.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        As :func:`speedtransfer.mark`; `since` is none, or of a model with other tables; the path has another suffix.
    StorageError
        It cannot be written.
    """
    path, tables = check_safetensors_path(path), marked_tables(model)
    if not isinstance(since, Mark):
        raise InvalidTypeError(f"since is a {type(since).__name__} but must be a mark; pass what st.mark returned")
    if since._contents.keys() != tables.keys():
        raise InvalidValueError(
            f"since is a mark of the tables {sorted(since._contents)} but the model has {sorted(tables)}; mark this model"
        )
    with held(tables), torch.no_grad():
        now = Mark(contents_of(tables, progress))
        written, described = list[files.Written](), {}
        for number, (key, handle) in enumerate(tables.items()):
            before, after = since._contents[key], now._contents[key]
            of_ids = handle.id_space.come_and_go
            if of_ids is not (before.ids is not None) or (len(before.keys) > len(after.keys) and not of_ids):
                raise InvalidValueError(
                    f"since has {len(before.keys)} rows of {key!r} but the table has {len(after.keys)}; mark this model"
                )
            was = before.of(after.keys)
            at = np.flatnonzero(was != after.hashes)
            described[key] = TableFacts(
                *(
                    len(before.keys),
                    len(after.keys),
                    *stored_as(handle),
                    f"{before.total:016x}",
                    f"{after.total:016x}",
                ),
                vocabulary_facts(handle),
                before.reserved,
            )._asdict()
            ids, rows = after.keys[at], at
            if of_ids:
                vocabulary = handle.id_space.vocabulary
                rows = vocabulary.rows(torch.from_numpy(ids)).numpy()
                gone = np.setdiff1d(before.keys, after.keys)
                written += [_column(f"{number}.gone", gone), _column(f"{number}.gone_before", before.of(gone))]
                written += _rows(f"{number}.reserved.", handle, np.arange(vocabulary.reserved))
            written += [*_rows(f"{number}.", handle, rows), _column(f"{number}.ids", ids)]
            written.append(_column(f"{number}.before", was[at]))
        dense = {key: value.detach().cpu().contiguous() for key, value in _dense_of(model, tables).items()}
        digests = {}
        for key, value in dense.items():
            if value.dtype not in SAFETENSORS_NAMES:
                raise InvalidTypeError(f"{key} has dtype {value.dtype}, which a file cannot hold; convert it first")
            digests[key] = digest(value)
            written.append((f"dense.{key}", value.dtype, tuple(value.shape), iter([value.reshape(-1)])))
        texts = {"tables": json.dumps(described), "dense": json.dumps(digests)}
        files.write(path, written, {"format": FORMAT, "version": VERSION, "sha256": checksum(texts), **texts})
    return now


def apply_delta(path: PathLike, model: nn.Module, mark: Mark | None = None, *, progress: bool | None = None) -> Mark:
    """Write what `save_delta` has saved into a copy of the model, which must hold what was there before.

    Everything is checked before anything changes: that the rows of the copy are those that the delta begins with, to the bit,
    and that those in the file are the ones that were saved. Lookups of other threads meanwhile see each row whole.

    Parameters
    ----------
    path : path-like
    model : nn.Module
        With tables of the same keys, storage dtypes and widths; ones that may grow get the rows that came.
    mark : Mark, optional
        What the last ``apply_delta`` of this model returned, if nothing else has written to it since. Without it all rows are
        read to find out what they are.
    progress : bool, optional
        A bar on standard error, for that. Default: on a terminal, if it takes more than a second.

    Returns
    -------
    Mark
        What the model holds now, for the next delta.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        The delta begins with other rows (one before it is missing, it has been applied, or it is of another run), or the model
        has other tables.
    StorageError
        The file is missing, damaged, or no delta.
    """
    path, tables = check_safetensors_path(path), marked_tables(model)
    delta = Delta(path)
    dense = _dense_of(model, tables)
    delta.check_fits(tables, dense)
    for handle in tables.values():
        handle.table.check_writable()
    with held(tables), torch.no_grad():
        if mark is not None and {key: len(found.keys) for key, found in mark._contents.items()} != {
            key: _count(handle) for key, handle in tables.items()
        }:
            raise InvalidValueError(
                "mark is of a model with other tables; pass what st.apply_delta returned for this one"
            )
        for handle in tables.values():
            handle.rows.catch_up()
        before = contents_of(tables, progress) if mark is None else mark._contents
        after = {key: delta.content_after(key, handle, before[key], mark is not None) for key, handle in tables.items()}
        same = all(before[key].total == after[key].total for key in tables)
        if same and delta.changes and all(digest(dense[key]) == digest(value) for key, value in delta.dense.items()):
            raise InvalidValueError(
                f"{str(path)!r} has been applied: the model holds what comes after it; leave it out"
            )
        # What may find no room comes first.
        for key, handle in tables.items():
            if handle.id_space.come_and_go:
                handle.id_space.vocabulary.update(delta.changes_of(key, handle))
            elif delta.tables[key].rows > handle.table.num_rows:
                handle.grow(delta.tables[key].rows)
        for key, handle in tables.items():
            found, rows = delta.rows[key], delta.rows[key].ids
            if handle.id_space.come_and_go:
                rows = handle.id_space.vocabulary.rows(rows)
                _write(handle, torch.arange(len(found.reserved[0])), found.reserved)
            _write(handle, rows, found.parts)
            handle.table.wait()
        load_dense(model, delta.dense)
    return Mark(after)


def _write(handle: Handle, rows: Tensor, parts: list[Tensor]) -> None:
    """Write the rows `rows` (n,) of a table as they are stored, by plane."""
    device = handle.table.device
    for some in row_chunks(len(rows), sum(part[:1].nbytes for part in parts)):
        values = {name: part[some].to(device) for name, part in zip(names_of(handle), parts, strict=True)}
        handle.table.write(rows[some].to(device), values, unsorted=True)


def _count(handle: Handle) -> int:
    """Return how many keys the rows of a table have."""
    return len(handle.id_space.vocabulary) if handle.id_space.come_and_go else handle.table.num_rows


def _dense_of(model: nn.Module, tables: Mapping[str, Handle]) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that are neither tables nor ids of one."""
    of_ids = [key for key, handle in tables.items() if handle.id_space.come_and_go]
    ids = tuple(f"{key.removesuffix('weight')}{OF_VOCABULARY}" for key in of_ids)
    return {key: value for key, value in dense_of(model).items() if not key.startswith(ids)}


def _rows(name: str, handle: Handle, rows: np.ndarray) -> list[files.Written]:
    """Return some rows of a table as they are written, by plane: read in chunks."""
    written = []
    for number, plane in enumerate(names_of(handle)):
        picked = PickedRows(
            handle.table.stored(plane),
            len(rows),
            lambda start, stop: rows[start:stop],
            functools.partial(_read_plane, handle, number),
        )
        written.append((name + plane, picked.dtype, tuple(picked.shape), picked.chunks()))
    return written


def _read_plane(handle: Handle, number: int, rows: np.ndarray) -> Tensor:
    return read(handle, rows)[number]


def _column(name: str, values: np.ndarray) -> files.Written:
    return name, torch.int64, (len(values), 1), iter([torch.from_numpy(values.view(np.int64)).unsqueeze(1)])
