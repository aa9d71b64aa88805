"""Ids and rows that have changed, on their way to a copy of the table, in memory or in a file; and which ids are gone."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.tables import PathLike, files
from speedtransfer.tables.saving import check_safetensors_path
from speedtransfer.untrusted import only_storage_errors, parse_json
from speedtransfer.vocabulary.initial import FLOATS, Initial, check_initial

_FORMAT = "speedtransfer.changes"


class Changes(NamedTuple):
    """What :meth:`speedtransfer.Vocabulary.changed_since` returns and :meth:`~speedtransfer.Vocabulary.update` takes.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64.
    rows : Tensor
        ``(n, dim)``, their weights.
    evicted : Tensor
        ``(m,)`` int64, ids that are no longer known.
    reserved : Tensor
        The rows that unseen ids and padding read.
    clock : int
        That of the vocabulary, for the next ``changed_since``.
    complete : bool
        Whether these are all ids: others are no longer known.
    since : int
        The clock that they begin with: a copy must have what was before.
    origin : int
        A number of the vocabulary, and of the state that it has loaded last. 0: unknown; then nothing is checked.
    seed, initial : optional
        What ids without a row read; None: a copy keeps its own.
    padding_idx : int, optional
    features : sequence of str
        Whose ids they are, of a `MultiEmbedding`.
    """

    ids: Tensor
    rows: Tensor
    evicted: Tensor
    reserved: Tensor
    clock: int
    complete: bool
    since: int = 0
    origin: int = 0
    seed: int | None = None
    initial: Initial | None = None
    padding_idx: int | None = None
    features: Sequence[str] = ()

    def save(self, path: PathLike) -> None:
        """Write a ``.safetensors`` file; a file that is there stays whole until the new one is.

        Its tensors are `ids`, `rows`, `evicted` and `reserved`; the rest is in its metadata, as text.

        Raises
        ------
        InvalidValueError
            The path has another suffix.
        StorageError
            It cannot be written.
        """
        path = check_safetensors_path(path)
        numbers = {name: json.dumps(getattr(self, name)) for name in _NUMBERS}
        metadata = {"format": _FORMAT, "version": "1", **numbers}
        # Rows first: 2-D tensors may be opened as tables.
        tensors = {name: getattr(self, name).detach().cpu() for name in ("rows", "ids", "evicted", "reserved")}
        files.write(path, [files.in_chunks(name, tensor) for name, tensor in tensors.items()], metadata)

    @classmethod
    def load(cls, path: PathLike) -> Changes:
        """Open what `save` has written; rows are read from the file when they are used.

        Raises
        ------
        StorageError
            It is missing, truncated, or not such a file.
        """
        path = check_safetensors_path(path)
        header = files.open_header(path)
        metadata = header.metadata if isinstance(header.metadata, dict) else {}
        with only_storage_errors(path, "a file of changes of a vocabulary"):
            if (metadata.get("format"), metadata.get("version")) != (_FORMAT, "1"):
                raise ValueError(f"format {metadata.get('format')!r}, version {metadata.get('version')!r}")
            # Those of earlier versions are of no features.
            metadata = {"features": "[]", **metadata}
            numbers: dict[str, Any] = {name: parse_json(metadata[name].encode()) for name in _NUMBERS}
            numbers["features"] = tuple(map(str, numbers["features"]))
            if numbers["initial"] is not None:
                numbers["initial"] = check_initial(numbers["initial"])
            kinds = {name: FLOATS if name in ("rows", "reserved") else (torch.int64,) for name in _TENSORS}
            tensors: dict[str, Any] = {}
            for name in _TENSORS:
                found = files.find_tensor(path, header, name, kinds[name])
                tensors[name], _ = files.map_tensor(path, found.offset, found.shape, found.dtype, "c")
            changes = cls(**tensors, **numbers)
            changes.check()
        return changes

    def check(self) -> None:
        """Raise `InvalidValueError` unless the parts fit together."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        fits = all(isinstance(tensor, Tensor) for tensor in tensors.values())
        fits = fits and self.rows.dim() == self.reserved.dim() == 2 and self.evicted.dim() == 1
        fits = fits and self.ids.shape == self.rows.shape[:1] and self.rows.shape[1:] == self.reserved.shape[1:]
        fits = fits and self.ids.dtype == self.evicted.dtype == torch.int64
        whole = all(type(getattr(self, name)) is int for name in ("clock", "since", "origin"))
        if not fits or not whole or type(self.complete) is not bool or not 0 <= self.since <= self.clock:
            shapes = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in tensors.items()}
            raise InvalidValueError(
                f"changes of the shapes {shapes}, from clock {self.since} to {self.clock}, do not fit together; pass what "
                "changed_since returned"
            )


_TENSORS = ("ids", "rows", "evicted", "reserved")
_NUMBERS = tuple(name for name in Changes._fields if name not in _TENSORS)


class ChangeLog:
    """The ids that were taken off, from a time of the clock on, `begins`, from which all is known: `gone`, with times.

    `origin` tells this vocabulary from others whose changes a copy may follow.
    """

    def __init__(self, clock: int) -> None:
        self.origin = int.from_bytes(os.urandom(7), "little")
        self.begins = clock + 1 if clock else 0
        self.gone: deque[tuple[int, np.ndarray]] = deque()
        self._num_gone = 0

    def add(self, ids: np.ndarray, clock: int, num_rows: int) -> None:
        """Note that `ids` (n,) were taken off now, and forget the first ones where they are more than `num_rows`."""
        self.gone.append((clock, ids))
        self._num_gone += len(ids)
        while self._num_gone > max(num_rows, len(ids)):
            at, dropped = self.gone.popleft()
            self._num_gone -= len(dropped)
            self.begins = at + 1
