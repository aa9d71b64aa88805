"""The rows of a checkpoint that is merged: those of a base, in chunks, and over them those of each delta."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.delta_file import Delta, TableFacts, TableRows, wide
from speedtransfer.checkpoint.plain_data import find_shards
from speedtransfer.checkpoint.row_hashes import hashes_of, total_of
from speedtransfer.checkpoint.tensors import PickedRows, TensorReader
from speedtransfer.checkpoint.together import ShardReader
from speedtransfer.dtypes import bits_of, rows_at
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.progress import ByteProgress
from speedtransfer.ranks import Partition
from speedtransfer.tables import row_chunks


class Base:
    """The checkpoint that deltas begin with: its rows by their numbers, however many processes have saved it."""

    def __init__(self, place: str, content: Mapping[str, Any], readers: dict[str, TensorReader]) -> None:
        self.place, self.content, self.readers = place, content, readers
        self.shards = ShardReader(content["files"], readers) if manifest.rows_roles(content["files"]) else None
        # Tensors of which each process has saved a part; of those that lie in the order of `Partition` that.
        self._orders = {
            name: Partition(count, 1) if sizes is None else None
            for name, count, sizes in find_shards([content["model"], content["optimizers"]])
        }

    def _reader(self, full_name: str) -> tuple[Any, str]:
        role, _, name = full_name.partition("/")
        if name in self._orders:
            return self.shards, name
        return (self.readers[role] if name in self.readers[role].facts["tensors"] else None), name

    def spec(self, full_name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, by its role and name; None: there is none."""
        reader, name = self._reader(full_name)
        return None if reader is None else reader.spec(name)

    def order(self, full_name: str) -> Partition | None:
        """Return in which order its rows lie; None: by their numbers."""
        return self._orders.get(full_name.partition("/")[2])

    def rows(self, full_name: str, numbers: np.ndarray) -> Tensor | None:
        """Return rows of a tensor by their numbers, ``(n, width)``; None: there is none. Fastest in the order of the file."""
        reader, name = self._reader(full_name)
        if reader is None:
            return None
        order = self._orders.get(name)
        places = numbers if order is None else order.places(torch.from_numpy(numbers)).numpy()
        start = int(places[0]) if len(places) else 0
        if np.array_equal(places, np.arange(start, start + len(places))):
            return wide(reader.read(name, slice(start, start + len(places))))
        return wide(reader.pick(name, torch.from_numpy(places)))


class Written(NamedTuple):
    """The rows of a table that a delta has: their numbers, (n,), sorted, and which of its rows these are."""

    numbers: np.ndarray
    order: np.ndarray
    parts: Mapping[str, Tensor]

    def among(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where among numbers (n,) those are that it has, and which of the rows of the delta."""
        if not len(self.numbers):
            return self.numbers, self.numbers
        at = np.minimum(np.searchsorted(self.numbers, wanted), len(self.numbers) - 1)
        there = np.flatnonzero(self.numbers[at] == wanted)
        return there, self.order[at[there]]


def written_at(numbers: np.ndarray, parts: Mapping[str, Tensor]) -> Written:
    """Return the rows of `parts`, which have the numbers (n,), distinct."""
    order = np.argsort(numbers)
    return Written(numbers[order], order, parts)


class MergedTable:
    """The rows of a table, told apart by their numbers.

    Parameters
    ----------
    key : str
        Of its weight in the state dict.
    chain : sequence of Delta
    base : Base
    """

    def __init__(self, key: str, chain: Sequence[Delta], base: Base) -> None:
        self.key, self.chain, self.base = key, chain, base
        # Those of the last one are of the result, the others for the hashes.
        self.facts = chain[-1].tables[key]
        self.names, self.fills = dict[str, str](), dict[str, float | None]()
        self._like = dict[str, Tensor]()
        for _, facts, rows in self._deltas():
            self.names |= facts.planes
            self.fills |= facts.fills
            self._like |= rows.parts
        self.row_bytes = sum(part[:1].nbytes for part in self._like.values()) or 1
        self.begins, self.count = self._begins(), self.facts.rows
        self.written = list[Written]()
        # Of the result: whether each process has a part of the rows, and in which order they lie; None: by their numbers.
        self.order = Partition(self.count, chain[-1].processes) if self.facts.is_divided else None
        for plane, name in self.names.items():
            found, like = base.spec(name), self._like[plane]
            if found is None:
                continue
            dtype, shape = found
            if (dtype, *shape[:1], math.prod(shape[1:])) != (like.dtype, self.begins, like.shape[1]):
                raise InvalidValueError(
                    f"{name.partition('/')[2]!r} is {tuple(shape)} {dtype} in {base.place!r} but the deltas begin with "
                    f"{self.begins} rows of {like.shape[1]} {like.dtype}; pass the checkpoint that they follow"
                )

    def _begins(self) -> int:
        """Return how many rows the base must have."""
        return self.chain[0].tables[self.key].begins

    def _deltas(self) -> list[tuple[Delta, TableFacts, TableRows]]:
        return [(delta, delta.tables[self.key], delta.rows[self.key]) for delta in self.chain]

    @property
    def nbytes(self) -> int:
        """About how many bytes its rows have."""
        return self.row_bytes * max(self.begins, self.count)

    def check(self, bar: ByteProgress) -> None:
        """Raise unless these are the rows of the base that the first delta begins with, and those that each one brings."""
        before = self.base.order(self.names["weight"])
        is_moved = (before is None) is not (self.order is None) or (before is not None and self.begins != self.count)
        if is_moved and "://" in self.base.place:
            raise InvalidValueError(
                f"{self.base.place!r} has the rows of {self.key!r} in another order than the processes that saved the deltas "
                "(another number, or one), which reads them one by one; copy it to a disk first"
            )
        self.written = [written_at(rows.ids.numpy(), rows.parts) for _, _, rows in self._deltas()]
        totals, fits = [0] * (len(self.chain) + 1), True
        for rows in row_chunks(self.count, self.row_bytes):
            numbers = np.arange(rows.start, rows.stop)
            hashes, old = np.zeros(len(numbers), np.uint64), numbers < self.begins
            if before is not None:
                # As they lie in the files.
                numbers[old] = before.ids(torch.from_numpy(numbers[old])).numpy()
            if old.any():
                hashes[old] = hashes_of(numbers[old], self.base_rows(numbers[old]), self.fills)
            totals[0] += total_of(hashes)
            for number, (_, facts, found) in enumerate(self._deltas()):
                at, of = self.written[number].among(numbers)
                fits &= bool((hashes[at] == found.was[of]).all())
                parts = {plane: rows_at(part, torch.from_numpy(of)) for plane, part in found.parts.items()}
                hashes[at] = hashes_of(numbers[at], parts, facts.fills)
                totals[number + 1] += total_of(hashes)
            bar.advance(len(hashes) * self.row_bytes)
        texts = [f"{total % 2**64:016x}" for total in totals]
        first = self.chain[0]
        if not fits or texts[0] != first.tables[self.key].since:
            raise InvalidValueError(
                f"{str(first.path)!r} begins with other rows of {self.key!r} (fingerprint "
                f"{first.tables[self.key].since}) than {self.base.place!r} has ({texts[0]}): a delta before it is missing, or "
                "it is of another run; pass the checkpoint of when st.mark was called, and all deltas since"
            )
        for (delta, facts, _), text in zip(self._deltas(), texts[1:], strict=True):
            if text != facts.now:
                raise StorageError(
                    f"{str(delta.path)!r} has other rows of {self.key!r} than were saved; use another copy of it"
                )

    def base_rows(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """Return rows of the base, of all planes that it has."""
        found = {plane: self.base.rows(name, numbers) for plane, name in self.names.items()}
        return {plane: rows for plane, rows in found.items() if rows is not None}

    def picked(self, plane: str, tail: Sequence[int], rank: int | None = None) -> PickedRows:
        """Return all rows of a plane of ``(*tail)`` values a row, to be written; or those of a process."""
        dtype, first, count = self._like[plane].dtype, 0, self.count
        if rank is not None and self.order is not None:
            first, count = self.order.start(rank), self.order.size(rank)
        like = torch.empty((0, *tail), dtype=dtype, device="meta")
        return PickedRows(like, count, slice, functools.partial(self._rows, plane, first))

    def _rows(self, plane: str, first: int, rows: slice) -> Tensor:
        """Return rows of a plane with those of all deltas over them, in the order of the result, of those from `first` on."""
        numbers = np.arange(first + rows.start, first + rows.stop)
        if self.order is not None:
            numbers = self.order.ids(torch.from_numpy(numbers)).numpy()
        like, fill = self._like[plane], self.fills[plane]
        new = torch.full((1, 1), fill or 0.0, dtype=like.dtype, device="cpu")
        whole = torch.full((len(numbers), like.shape[1]), fill or 0.0, dtype=like.dtype, device="cpu")
        old = numbers < self.begins
        base = self.base.rows(self.names[plane], numbers[old]) if old.any() else None
        if base is not None:
            bits_of(whole)[torch.from_numpy(old)] = bits_of(base)
        for written in self.written:
            at, of = written.among(numbers)
            part = written.parts.get(plane)
            # Without: it had no such state then.
            bits_of(whole)[at] = bits_of(new) if part is None else bits_of(part)[of]
        return whole
