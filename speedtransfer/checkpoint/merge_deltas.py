"""Make a checkpoint of an earlier one and the deltas since, from their files alone, without a model or a whole table."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.arguments import place_of
from speedtransfer.checkpoint.delta_file import Delta, wide
from speedtransfer.checkpoint.load import open_checkpoint
from speedtransfer.checkpoint.row_hashes import hashes_of, total_of
from speedtransfer.checkpoint.save import SavePlan, bytes_of
from speedtransfer.checkpoint.tensors import PickedRows, TensorPlan, TensorReader
from speedtransfer.checkpoint.together import Processes
from speedtransfer.dtypes import bits_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import PathLike, row_chunks
from speedtransfer.tables.saving import check_safetensors_path


def merge(
    base: str | os.PathLike[str],
    deltas: PathLike | Iterable[PathLike],
    out: str | os.PathLike[str],
    *,
    progress: bool | None = None,
) -> None:
    """Make the checkpoint that `save_checkpoint` would have made with the last of some deltas, to the bit.

    Everything is read and checked before anything is written: each byte of the base by its checksum, that the rows of each
    delta begin with what is there before it, and that they are those that were saved. Rows are streamed in chunks of 16 MB.
    The new checkpoint is put in place in one go at the end; the base and the deltas stay as they are.

    Parameters
    ----------
    base : path-like
        A checkpoint, or its URL, of one process, with what the deltas have: the model alone, or the optimizer and objects too.
    deltas : path-like or sequence of path-like
        Files of `save_delta` in their order, or a folder: all its ``.safetensors`` in the order of their names. Of tables with
        a vocabulary they must have been saved with an optimizer: others do not say which rows ids have.
    out : path-like
        A folder as for `save_checkpoint`, or its URL; not the base.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        A delta is missing or there twice, or they are of another base; one has the state of other optimizers.
    StorageError
        A file is missing or damaged, or there is no room.
    """
    place, target, paths = place_of(base), place_of(out), _paths(deltas)
    if _resolved(out) == _resolved(base):
        raise InvalidValueError(f"out is the base, {str(base)!r}, which stays as it is; pass another folder")
    target.check_target()
    chain = [Delta(path) for path in paths]
    _check_chain(chain)
    with ExitStack() as stack:
        content, readers = open_checkpoint(place, stack)
        _check_base(str(place), content, chain[0])
        for reader in readers.values():
            reader.check_size()
        tables = [_Table(key, chain, str(place), readers) for key in chain[-1].tables]
        size = sum(reader.facts["bytes"] for reader in readers.values()) + sum(table.nbytes for table in tables)
        with ByteProgress(f"checking {place.name}", size, progress) as bar:
            for reader in readers.values():
                reader.check(bar.advance)
            for table in tables:
                table.check(bar)
        by_row = {name: (table, plane) for table in tables for plane, name in table.planes.items()}
        plans = {role: TensorPlan() for role in manifest.ROLES}
        for name, tensor in chain[-1].tensors.items():
            role, _, inner = name.partition("/")
            found: Any = tensor
            if name in by_row:
                table, plane = by_row[name]
                found = table.picked(plane, tensor)
            plans[role].tensors[inner] = found
        content, need = chain[-1].content, bytes_of(plans, chain[-1].content)
        SavePlan(target, Processes("merges", None), plans, content, {}, need, not target.exists()).write(progress)


def _paths(deltas: Any) -> list[Path]:
    if isinstance(deltas, str | os.PathLike):
        folder = Path(deltas)
        deltas = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    if not isinstance(deltas, Iterable):
        raise InvalidTypeError(
            f"deltas is a {type(deltas).__name__} but must be the paths of files of st.save_delta, or their folder; pass these"
        )
    paths = [check_safetensors_path(path) for path in deltas]
    if not paths:
        raise InvalidValueError(
            "deltas is empty, and the base is what it holds; pass the files that st.save_delta wrote"
        )
    return paths


def _resolved(path: Any) -> str:
    place = place_of(path)
    return os.path.realpath(str(place)) if "://" not in str(place) else str(place)


def _check_chain(chain: list[Delta]) -> None:
    """Raise unless each delta begins where the one before ends, and all are of one kind."""
    first = chain[0]
    for key, table in first.tables.items():
        if table.vocabulary is not None:
            raise InvalidValueError(
                f"{str(first.path)!r} was saved without the optimizer, and does not say which rows ids of {key!r} have; save "
                "deltas with it: st.save_delta(path, model, since, optimizer)"
            )
    for before, after in itertools.pairwise(chain):
        if _names(after.content) != _names(before.content) or after.tables.keys() != before.tables.keys():
            raise InvalidValueError(
                f"{str(after.path)!r} has {_names(after.content)} and tables {sorted(after.tables)[:3]} but "
                f"{str(before.path)!r} {_names(before.content)} and {sorted(before.tables)[:3]}; merge deltas of one kind"
            )
        if not after.comes_after(before):
            raise InvalidValueError(
                f"{str(after.path)!r} (number {after.place.number}) does not begin where {str(before.path)!r} (number "
                f"{before.place.number}) ends: one in between is missing, one is there twice, or the order is another; pass "
                "all in their order"
            )


def _names(content: Mapping[str, Any]) -> list[str]:
    """Return what was saved beside the model."""
    return sorted([*content["optimizers"], *content["objects"]]) or ["the model alone"]


def _check_base(place: str, content: Mapping[str, Any], first: Delta) -> None:
    """Raise unless the base has what the deltas have."""
    if manifest.rows_roles(content["files"]):
        raise InvalidValueError(
            f"{place!r} was saved by several processes, whose rows lie in another order than those of deltas; load it in one "
            "and save it again"
        )
    if _names(content) != _names(first.content):
        raise InvalidValueError(
            f"{place!r} has {_names(content)} but {str(first.path)!r} {_names(first.content)}; pass to st.save_delta what was "
            "passed to st.save_checkpoint"
        )


class _Table:
    """The rows of a table: those of a base, and over them those of each delta."""

    def __init__(self, key: str, chain: list[Delta], place: str, readers: Mapping[str, TensorReader]) -> None:
        self._key, self._chain, self._place, self._readers = key, chain, place, readers
        # Those of the last one are of the result, the others for the hashes.
        self.planes = chain[-1].tables[key].planes
        self._all, self._fills = dict[str, str](), dict[str, float | None]()
        self._like = dict[str, Tensor]()
        for delta in chain:
            self._all |= delta.tables[key].planes
            self._fills |= delta.tables[key].fills
            self._like |= delta.rows[key].parts
        self.row_bytes = sum(part[:1].nbytes for part in self._like.values()) or 1
        self._begins, self.count = chain[0].tables[key].begins, chain[-1].tables[key].rows
        self.nbytes = self.row_bytes * self.count
        for plane, full_name in self._all.items():
            role, _, name = full_name.partition("/")
            if name in self._readers[role].facts["tensors"]:
                dtype, shape = self._readers[role].spec(name)
                like = self._like[plane]
                found = (dtype, *shape[:1], math.prod(shape[1:]))
                if found != (like.dtype, self._begins, like.shape[1]):
                    raise InvalidValueError(
                        f"{name!r} is {tuple(shape)} {dtype} in {place!r} but the deltas begin with {self._begins} rows of "
                        f"{like.shape[1]} {like.dtype}; pass the checkpoint that they follow"
                    )

    def _base(self, plane: str, rows: slice) -> Tensor | None:
        """Return rows of a plane of the base, all of which it has; None: it has no such plane."""
        role, _, name = self._all[plane].partition("/")
        if name not in self._readers[role].facts["tensors"]:
            return None
        return wide(self._readers[role].read(name, rows))

    def check(self, bar: ByteProgress) -> None:
        """Raise unless these are the rows of the base that the first delta begins with, and those that each one brings."""
        totals, fits = [0] * (len(self._chain) + 1), True
        for rows in row_chunks(self.count, self.row_bytes):
            hashes = np.zeros(min(rows.stop, self.count) - rows.start, np.uint64)
            stop = min(rows.stop, self._begins)
            if rows.start < stop:
                some = slice(rows.start, stop)
                parts = {plane: part for plane in self._all if (part := self._base(plane, some)) is not None}
                hashes[: stop - rows.start] = hashes_of(np.arange(rows.start, stop), parts, self._fills)
            totals[0] += total_of(hashes)
            for number, delta in enumerate(self._chain):
                found = delta.rows[self._key]
                among = found.among(rows)
                ids = found.ids[among].numpy()
                fits &= bool((hashes[ids - rows.start] == found.was[among]).all())
                parts = {plane: part[among] for plane, part in found.parts.items()}
                hashes[ids - rows.start] = hashes_of(ids, parts, delta.tables[self._key].fills)
                totals[number + 1] += total_of(hashes)
            bar.advance(len(hashes) * self.row_bytes)
        texts = [f"{total % 2**64:016x}" for total in totals]
        first = self._chain[0]
        if not fits or texts[0] != first.tables[self._key].since:
            raise InvalidValueError(
                f"{str(first.path)!r} begins with other rows of {self._key!r} (fingerprint "
                f"{first.tables[self._key].since}) than {self._place!r} has ({texts[0]}): a delta before it is missing, or it "
                "is of another run; pass the checkpoint of when st.mark was called, and all deltas since"
            )
        for delta, text in zip(self._chain, texts[1:], strict=True):
            if text != delta.tables[self._key].now:
                raise StorageError(
                    f"{str(delta.path)!r} has other rows of {self._key!r} than were saved; use another copy of it"
                )

    def picked(self, plane: str, tensor: Tensor) -> PickedRows:
        """Return all rows of a plane, to be written; `tensor` has some of them."""
        like = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return PickedRows(like, self.count, slice, functools.partial(self._rows, plane))

    def _rows(self, plane: str, rows: slice) -> Tensor:
        """Return rows of a plane with those of all deltas over them."""
        like, fill = self._like[plane], self._fills[plane]
        count, stop = min(rows.stop, self.count) - rows.start, min(rows.stop, self._begins)
        whole = torch.full((count, like.shape[1]), fill or 0.0, dtype=like.dtype, device="cpu")
        base = self._base(plane, slice(rows.start, stop)) if rows.start < stop else None
        if base is not None:
            bits_of(whole)[: len(base)] = bits_of(base)
        for delta in self._chain:
            found = delta.rows[self._key]
            among = found.among(rows)
            at = found.ids[among] - rows.start
            part = found.parts.get(plane)
            if part is None:
                # It had no such state then.
                bits_of(whole)[at] = bits_of(torch.full((1, 1), fill or 0.0, dtype=like.dtype, device="cpu"))
            else:
                bits_of(whole)[at] = bits_of(part[among])
        return whole
