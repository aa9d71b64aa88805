"""A file of the rows that have changed: what it says, read and checked by itself and against a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint.marks import Content, hashes_of, read, reserved_sum, row_bytes
from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.optim import Handle
from speedtransfer.tables import files, row_chunks
from speedtransfer.untrusted import parse_json
from speedtransfer.vocabulary import Changes
from speedtransfer.vocabulary.initial import check_initial

FORMAT, VERSION = "speedtransfer.delta", "1"
# Attributes of a vocabulary that its copies have too.
_FACTS = ("clock", "seed", "initial", "padding_idx", "features")


def vocabulary_facts(handle: Handle) -> dict[str, Any] | None:
    """Return what a delta says of a vocabulary; None: rows do not belong to ids."""
    if not handle.id_space.come_and_go:
        return None
    vocabulary = handle.id_space.vocabulary
    return {name: getattr(vocabulary, name) for name in _FACTS}


class TableFacts(NamedTuple):
    """What a delta says of a table: its rows before and after, how they are stored, and the fingerprints."""

    begins: int
    rows: int
    encoding: str
    parts: list[str]
    since: str
    now: str
    # `vocabulary_facts`, and the sum of the hashes that rows of no id had.
    vocabulary: dict[str, Any] | None = None
    reserved: int = 0

    def check(self, found: TableRows) -> None:
        """Raise `ValueError` or `TypeError` unless the parts are of their types, and the ids such as may have changed."""
        numbers, texts = (self.begins, self.rows), (self.encoding, self.since, self.now, *self.parts)
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(each, str) for each in texts):
            raise TypeError("a table without its numbers")
        columns: list[tuple[Tensor, list[Any]]] = [
            (found.ids, [found.was, *found.parts]),
            (found.gone, [found.gone_was]),
        ]
        for ids, beside in columns:
            if ids.dtype != torch.int64 or bool((ids[1:] <= ids[:-1]).any()):
                raise ValueError("ids that are not in order")
            if any(len(each) != len(ids) for each in beside) or any(
                part.dim() != 2 for part in [*found.parts, *found.reserved]
            ):
                raise ValueError("other numbers of ids and of rows")
        if self.vocabulary is not None:
            if set(self.vocabulary) != set(_FACTS) or type(self.reserved) is not int:
                raise TypeError("a vocabulary without its facts")
        # All new rows are among them.
        elif int((found.ids >= self.begins).sum()) != self.rows - self.begins or bool(
            ((found.ids < 0) | (found.ids >= self.rows)).any()
        ):
            raise ValueError("ids that are not those of the rows")


class TableRows(NamedTuple):
    """What a delta has of a table."""

    # Numbers of rows, or ids, (n,) int64, sorted; the hashes that they had, and what stores them now, by plane.
    ids: Tensor
    was: np.ndarray
    parts: list[Tensor]
    # Of a vocabulary, the ids that are gone, (m,), with the hashes that they had; and the rows of no id.
    gone: Tensor
    gone_was: np.ndarray
    reserved: list[Tensor]


class Delta:
    """A file of `save_delta`, read and checked by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = files.open_header(path)
        metadata = header.metadata if isinstance(header.metadata, dict) else {}
        try:
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"format {metadata.get('format')!r}, version {metadata.get('version')!r}")
            if metadata.get("sha256") != checksum(metadata):
                raise ValueError("another checksum of what it says of tables")
            described, digests = (parse_json(metadata[name].encode()) for name in ("tables", "dense"))
            self.tables = {str(key): TableFacts(**each) for key, each in described.items()}
            self.rows: dict[str, TableRows] = {}
            for number, (key, table) in enumerate(self.tables.items()):
                names, empty = ["weight", "weight.scale"][: len(table.parts)], torch.empty(0, dtype=torch.int64)
                gone, gone_was, reserved = empty, empty.numpy().view(np.uint64), list[Tensor]()
                if table.vocabulary is not None:
                    gone, gone_was = (
                        self._column(header, f"{number}.gone"),
                        self._hashes(header, f"{number}.gone_before"),
                    )
                    reserved = [self._mapped(header, f"{number}.reserved.{name}") for name in names]
                parts = [self._mapped(header, f"{number}.{name}") for name in names]
                ids, was = self._column(header, f"{number}.ids"), self._hashes(header, f"{number}.before")
                self.rows[key] = TableRows(ids, was, parts, gone, gone_was, reserved)
                table.check(self.rows[key])
            self.dense = {str(key): self._mapped(header, f"dense.{key}") for key in digests}
            for key, value in self.dense.items():
                if digest(value) != digests[key]:
                    raise ValueError(f"another checksum of {key!r}")
        except StorageError:
            raise
        except (SpeedtransferError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{str(path)!r} does not hold what st.save_delta has written ({error}); use another copy of it"
            ) from error

    def _column(self, header: files.Header, name: str) -> Tensor:
        found = self._mapped(header, name)
        if found.dtype != torch.int64:
            raise ValueError(f"{name} is {found.dtype}")
        return found.reshape(-1)

    def _hashes(self, header: files.Header, name: str) -> np.ndarray:
        return self._column(header, name).numpy().view(np.uint64)

    @property
    def changes(self) -> bool:
        """Whether any row has changed."""
        return any(len(found.ids) + len(found.gone) for found in self.rows.values())

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
            saved, (encoding, parts) = self.tables[key], stored_as(handle)
            found, reserved = (
                [_about(part.shape[1], part.dtype) for part in some]
                for some in (self.rows[key].parts, self.rows[key].reserved)
            )
            facts = vocabulary_facts(handle)
            if (facts is None) is not (saved.vocabulary is None):
                raise InvalidValueError(
                    f"{key!r} has {'a' if facts else 'no'} vocabulary in the model and {'none' if facts else 'one'} in "
                    f"{str(self.path)!r}; make the model as the one that was saved"
                )
            if (encoding, parts, parts) != (saved.encoding, saved.parts, found) or reserved not in ([], parts):
                raise InvalidValueError(
                    f"{key!r} is stored as {saved.encoding} {saved.parts} in {str(self.path)!r} but as {encoding} {parts} "
                    "in the model; make it with the same dim, dtype and storage_dtype"
                )
            if facts is not None:
                handle.id_space.vocabulary.check_changes(self.changes_of(key, handle))
        for key, value in dense.items():
            theirs_is = self.dense[key]
            if (value.dtype, value.shape) != (theirs_is.dtype, theirs_is.shape):
                raise InvalidValueError(
                    f"{key!r} is {tuple(theirs_is.shape)} {theirs_is.dtype} in {str(self.path)!r} but {tuple(value.shape)} "
                    f"{value.dtype} in the model; make the model as the one that was saved"
                )

    def content_after(self, key: str, handle: Handle, now: Content, check_rows: bool) -> Content:
        """Return the content of a table once the delta is applied, of that `now`; raise unless it begins with what is there.

        Rows that an apply that was interrupted has written count as what they were.
        """
        saved, rows = self.tables[key], self.rows[key]
        ids, gone = rows.ids.numpy(), rows.gone.numpy()
        found, had, had_gone = hashes_of(ids, rows.parts), now.of(ids), now.of(gone)
        if check_rows:
            self._check_rows(key, handle, ids, had)
        written = had == found
        as_it_was = bool((written | (had == rows.was)).all() and ((had_gone == rows.gone_was) | (had_gone == 0)).all())
        was = np.where(written, rows.was, had)
        # Sums of hashes, of which whole rows are a part.
        begins = now.total - _sum(had) + _sum(was) - _sum(had_gone) + _sum(rows.gone_was)
        reserved = reserved_sum(rows.reserved) if rows.reserved else 0
        begins += saved.reserved - now.reserved
        as_it_was &= now.reserved in (saved.reserved, reserved)
        if not as_it_was or f"{begins % 2**64:016x}" != saved.since:
            raise InvalidValueError(
                f"{str(self.path)!r} begins with other rows of {key!r} ({saved.begins} of fingerprint {saved.since}) than the "
                f"model has ({len(now.keys)} of {now.total:016x}): a delta before it is missing, or it is of another run; "
                "apply those in between first, or begin with a checkpoint"
            )
        after = self._merged(now, ids, found, gone, reserved, saved.rows)
        if f"{after.total:016x}" != saved.now:
            raise StorageError(f"{str(self.path)!r} has other rows of {key!r} than were saved; use another copy of it")
        return after

    def _check_rows(self, key: str, handle: Handle, ids: np.ndarray, had: np.ndarray) -> None:
        """Raise unless the rows of a table are those of a mark, which `had` says."""
        keys, at = ids, ids
        if handle.id_space.come_and_go:
            at = handle.id_space.vocabulary.rows(torch.from_numpy(ids)).numpy()
        there = (at >= 0) & (at < handle.table.num_rows)
        keys, at, had = keys[there], at[there], had[there]
        for some in row_chunks(len(at), row_bytes(handle)):
            if not np.array_equal(hashes_of(keys[some], read(handle, at[some])), had[some]):
                raise InvalidValueError(f"rows of {key!r} were written after the mark was made; leave mark out")

    def _merged(
        self, now: Content, ids: np.ndarray, found: np.ndarray, gone: np.ndarray, reserved: int, count: int
    ) -> Content:
        if now.ids is None:
            hashes = np.zeros(count, np.uint64)
            hashes[: len(now.hashes)] = now.hashes[:count]
            hashes[ids] = found
            return Content(hashes)
        stays = ~np.isin(now.ids, np.concatenate([ids, gone]))
        keys = np.concatenate([now.ids[stays], ids])
        order = np.argsort(keys)
        return Content(np.concatenate([now.hashes[stays], found])[order], keys[order], reserved)

    def changes_of(self, key: str, handle: Handle) -> Changes:
        """Return what has changed in a vocabulary."""
        rows, facts = self.rows[key], self.tables[key].vocabulary
        assert facts is not None
        values = [
            handle.rows.decode("weight", dict(zip(handle.rows.part_specs("weight"), parts, strict=True)))
            for parts in (rows.parts, rows.reserved)
        ]
        initial = None if facts["initial"] is None else check_initial(facts["initial"])
        return Changes(
            *(rows.ids, values[0], rows.gone, values[1], facts["clock"], False),
            seed=facts["seed"],
            initial=initial,
            padding_idx=facts["padding_idx"],
            features=facts["features"],
        )


def stored_as(handle: Handle) -> tuple[str, list[str]]:
    """Return the encoding of a table's weights, and the width and dtype of the planes that store them."""
    return handle.rows.encoding("weight"), [
        _about(spec.width, spec.dtype) for spec in handle.rows.part_specs("weight").values()
    ]


def _about(width: int, dtype: torch.dtype) -> str:
    return f"{width} {str(dtype).removeprefix('torch.')}"


def checksum(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 of the texts in the metadata of a delta."""
    return hashlib.sha256(f"{texts['tables']}{texts['dense']}".encode()).hexdigest()


def _sum(hashes: np.ndarray) -> int:
    return int(hashes.sum(dtype=np.uint64))


def digest(values: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor."""
    data: Any = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()
