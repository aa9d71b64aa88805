"""Files of the rows that have changed, by which a copy of a model follows one that is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer.checkpoint.marks import Mark, hashed, hashes_of, held, marked_tables, names_of, total
from speedtransfer.checkpoint.model import dense_of, load_dense
from speedtransfer.checkpoint.tensors import PickedRows
from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.optim import Handle
from speedtransfer.tables import PathLike, files, row_chunks
from speedtransfer.tables.saving import check_safetensors_path
from speedtransfer.untrusted import parse_json

_FORMAT = "speedtransfer.delta"


def save_delta(path: PathLike, model: nn.Module, since: Mark, *, progress: bool | None = None) -> Mark:
    """Write the rows of a model's tables that have changed since a mark, and all else of its state dict.

    The file is written beside its place and renamed: it is whole, or not there. It does not hold the state of optimizers;
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
    if since._hashes.keys() != tables.keys():
        raise InvalidValueError(
            f"since is a mark of the tables {sorted(since._hashes)} but the model has {sorted(tables)}; mark this model"
        )
    with held(tables), torch.no_grad():
        now = Mark(hashed(tables, progress))
        written, described = list[files.Written](), {}
        for number, (key, handle) in enumerate(tables.items()):
            before, after = since._hashes[key], now._hashes[key]
            if len(before) > len(after):
                raise InvalidValueError(
                    f"since has {len(before)} rows of {key!r} but the table has {len(after)}; mark this model"
                )
            same = np.zeros(len(after), bool)
            same[: len(before)] = before == after[: len(before)]
            ids = torch.from_numpy(np.flatnonzero(~same))
            described[key] = _Table(
                *(len(before), len(after), *_stored_as(handle), f"{total(before):016x}", f"{total(after):016x}")
            )._asdict()
            written += [_rows(f"{number}.{name}", handle, n, ids) for n, name in enumerate(names_of(handle))]
            was = np.zeros(len(after), np.uint64)
            was[: len(before)] = before
            for name, values in (("ids", ids), ("before", torch.from_numpy(was[ids.numpy()].view(np.int64)))):
                written.append((f"{number}.{name}", torch.int64, (len(ids), 1), iter([values.unsqueeze(1)])))
        dense = {key: value.detach().cpu().contiguous() for key, value in dense_of(model).items()}
        digests = {}
        for key, value in dense.items():
            if value.dtype not in SAFETENSORS_NAMES:
                raise InvalidTypeError(f"{key} has dtype {value.dtype}, which a file cannot hold; convert it first")
            digests[key] = _digest(value)
            written.append((f"dense.{key}", value.dtype, tuple(value.shape), iter([value.reshape(-1)])))
        metadata = {"tables": json.dumps(described), "dense": json.dumps(digests)}
        files.write(path, written, {"format": _FORMAT, "version": "1", **metadata})
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
    delta = _Delta(path)
    dense = dense_of(model)
    delta.check_fits(tables, dense)
    for handle in tables.values():
        handle.table.check_writable()
    with held(tables), torch.no_grad():
        if mark is not None and {k: len(v) for k, v in mark._hashes.items()} != {
            key: handle.table.num_rows for key, handle in tables.items()
        }:
            raise InvalidValueError(
                "mark is of a model with other tables; pass what st.apply_delta returned for this one"
            )
        for handle in tables.values():
            handle.rows.catch_up()
        before = hashed(tables, progress) if mark is None else mark._hashes
        after = {key: delta.hashes_after(key, handle, before[key], mark is not None) for key, handle in tables.items()}
        same = all(np.array_equal(before[key], after[key]) for key in tables)
        if same and delta.changes and all(_digest(dense[key]) == _digest(value) for key, value in delta.dense.items()):
            raise InvalidValueError(
                f"{str(path)!r} has been applied: the model holds what comes after it; leave it out"
            )
        for key, handle in tables.items():
            if delta.tables[key].rows > handle.table.num_rows:
                handle.grow(delta.tables[key].rows)
        for key, handle in tables.items():
            ids, _, parts = delta.rows[key]
            width = sum(part[:1].nbytes for part in parts)
            for rows in row_chunks(len(ids), width):
                values = {
                    name: part[rows].to(handle.table.device) for name, part in zip(names_of(handle), parts, strict=True)
                }
                handle.table.write(ids[rows].to(handle.table.device), values)
            handle.table.wait()
        load_dense(model, delta.dense)
    return Mark(after)


class _Table(NamedTuple):
    """What a delta says of a table: its rows before and after, how they are stored, and the fingerprints."""

    begins: int
    rows: int
    encoding: str
    parts: list[str]
    since: str
    now: str

    def check(self, ids: Tensor) -> None:
        """Raise `ValueError` or `TypeError` unless the parts are of their types, and the ids such as may have changed."""
        numbers, texts = (self.begins, self.rows), (self.encoding, self.since, self.now, *self.parts)
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(each, str) for each in texts):
            raise TypeError("a table without its numbers")
        if ids.dtype != torch.int64 or bool((ids[1:] <= ids[:-1]).any()) or bool((ids < 0).any()):
            raise ValueError("ids that are not in order")
        # All new rows are among them.
        if int((ids >= self.begins).sum()) != self.rows - self.begins or (len(ids) and int(ids[-1]) >= self.rows):
            raise ValueError("ids that are not those of the rows")


class _Delta:
    """A file of `save_delta`, read and checked by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = files.open_header(path)
        metadata = header.metadata if isinstance(header.metadata, dict) else {}
        try:
            if (metadata.get("format"), metadata.get("version")) != (_FORMAT, "1"):
                raise ValueError(f"format {metadata.get('format')!r}, version {metadata.get('version')!r}")
            described, digests = (parse_json(metadata[name].encode()) for name in ("tables", "dense"))
            self.tables = {str(key): _Table(**each) for key, each in described.items()}
            # The ids of each table, the hashes that their rows had, and what stores them now.
            self.rows: dict[str, tuple[Tensor, np.ndarray, list[Tensor]]] = {}
            for number, (key, table) in enumerate(self.tables.items()):
                ids = self._mapped(header, f"{number}.ids").view(-1)
                table.check(ids)
                names = ["weight", "weight.scale"][: len(table.parts)]
                was, *parts = (self._mapped(header, f"{number}.{name}") for name in ("before", *names))
                if was.dtype != torch.int64 or any(each.dim() != 2 or len(each) != len(ids) for each in (was, *parts)):
                    raise ValueError(f"other numbers of ids and of rows of {key!r}")
                self.rows[key] = ids, was.view(-1).numpy().view(np.uint64), parts
            self.dense = {str(key): self._mapped(header, f"dense.{key}") for key in digests}
            for key, value in self.dense.items():
                if _digest(value) != digests[key]:
                    raise ValueError(f"another checksum of {key!r}")
        except StorageError:
            raise
        except (SpeedtransferError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{str(path)!r} does not hold what st.save_delta has written ({error}); use another copy of it"
            ) from error

    @property
    def changes(self) -> bool:
        """Whether any row has changed."""
        return any(len(ids) for ids, *_ in self.rows.values())

    def _mapped(self, header: files.Header, name: str) -> Tensor:
        found = files.find_tensor(self.path, header, name, tuple(SAFETENSORS_NAMES))
        return files.map_tensor(self.path, found.offset, found.shape, found.dtype, "c")[0]

    def check_fits(self, tables: Mapping[str, Handle], dense: Mapping[str, Tensor]) -> None:
        """Raise `InvalidValueError` unless these are the tables and tensors of the delta."""
        for ours, theirs, what in (
            (tables.keys(), self.tables.keys(), "tables"),
            (dense.keys(), self.dense.keys(), "tensors"),
        ):
            if ours != theirs:
                raise InvalidValueError(
                    f"{str(self.path)!r} has {what} that the model has not, or the reverse ({sorted(ours ^ theirs)[:3]}); "
                    "make the model as the one that was saved"
                )
        for key, handle in tables.items():
            saved, (encoding, parts) = self.tables[key], _stored_as(handle)
            found = [_about(part.shape[1], part.dtype) for part in self.rows[key][2]]
            if (encoding, parts, parts) != (saved.encoding, saved.parts, found):
                raise InvalidValueError(
                    f"{key!r} is stored as {saved.encoding} {saved.parts} in {str(self.path)!r} but as {encoding} {parts} "
                    "in the model; make it with the same dim, dtype and storage_dtype"
                )
        for key, value in dense.items():
            theirs_is = self.dense[key]
            if (value.dtype, value.shape) != (theirs_is.dtype, theirs_is.shape):
                raise InvalidValueError(
                    f"{key!r} is {tuple(theirs_is.shape)} {theirs_is.dtype} in {str(self.path)!r} but {tuple(value.shape)} "
                    f"{value.dtype} in the model; make the model as the one that was saved"
                )

    def hashes_after(self, key: str, handle: Handle, now: np.ndarray, check_rows: bool) -> np.ndarray:
        """Return the hashes of a table once the delta is applied, of those `now`; raise unless it begins with what is there.

        Rows that an apply that was interrupted has written count as what they were.
        """
        saved, (ids, was, parts) = self.tables[key], self.rows[key]
        found = hashes_of(ids.numpy(), parts)
        after = np.zeros(saved.rows, np.uint64)
        after[: saved.begins] = now[: saved.begins]
        old = int((ids < saved.begins).sum())
        at = ids[:old].numpy()
        if len(now) in (saved.begins, saved.rows):
            for some in row_chunks(old if check_rows else 0, sum(part[:1].nbytes for part in parts)):
                if not np.array_equal(hashes_of(at[some], _read(handle, ids[:old][some])), now[at[some]]):
                    raise InvalidValueError(f"rows of {key!r} were written after the mark was made; leave mark out")
            written = now[at] == found[:old]
            after[at] = np.where(written, was[:old], now[at])
        begins = f"{total(after[: saved.begins]):016x}"
        if (
            len(now) not in (saved.begins, saved.rows)
            or begins != saved.since
            or not np.array_equal(after[at], was[:old])
        ):
            raise InvalidValueError(
                f"{str(self.path)!r} begins with other rows of {key!r} ({saved.begins} of fingerprint {saved.since}) than the "
                f"model has ({len(now)} of {total(now):016x}): a delta before it is missing, or it is of another run; apply "
                "those in between first, or begin with a checkpoint"
            )
        after[ids.numpy()] = found
        if f"{total(after):016x}" != saved.now:
            raise StorageError(f"{str(self.path)!r} has other rows of {key!r} than were saved; use another copy of it")
        return after


def _stored_as(handle: Handle) -> tuple[str, list[str]]:
    """Return the encoding of a table's weights, and the width and dtype of the planes that store them."""
    return handle.rows.encoding("weight"), [
        _about(spec.width, spec.dtype) for spec in handle.rows.part_specs("weight").values()
    ]


def _about(width: int, dtype: torch.dtype) -> str:
    return f"{width} {str(dtype).removeprefix('torch.')}"


def _read(handle: Handle, ids: Tensor) -> list[Tensor]:
    """Return the rows `ids` (n,) of a table as they are stored, by plane."""
    return list(handle.table.read(ids.to(handle.table.device), names_of(handle)).values())


def _rows(name: str, handle: Handle, number: int, ids: Tensor) -> files.Written:
    """Return some rows of the plane `number` of a table as they are written: read in chunks."""
    picked = PickedRows(
        handle.table.stored(names_of(handle)[number]),
        len(ids),
        lambda start, stop: ids[start:stop],
        lambda some: _read(handle, some)[number],
    )
    return name, picked.dtype, tuple(picked.shape), picked.chunks()


def _digest(values: Tensor) -> str:
    data: Any = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()
