"""Ids and rows that have changed since a time, on their way to a copy of the table, in memory or in a file."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables import PathLike, files
from speedtransfer.tables.saving import check_safetensors_path
from speedtransfer.untrusted import only_storage_errors, parse_json
from speedtransfer.vocabulary.initial import Initial, check_initial

if TYPE_CHECKING:
    from speedtransfer.vocabulary.room import Room

_FORMAT = "speedtransfer.changes"
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        metadata = {"format": _FORMAT, "version": "1", **{name: json.dumps(value) for name, value in numbers.items()}}
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
            kinds = {name: _FLOATS if name in ("rows", "reserved") else (torch.int64,) for name in _TENSORS}
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


def changed_since(vocabulary: Room, clock: int) -> Changes:
    """Return the ids and rows that have changed since the `clock` of this vocabulary was that, for `update` of a copy.

    A copy that has applied what came before reads then, for every id, what this table reads now. Where idle rows move too
    (``idle="exact"``, with momentum or decay), or more ids were taken off than are remembered, or a state was loaded since
    or a row rescaled in evaluation (`max_norm`), it is complete: all ids and rows. Rows that were written to
    ``embedding.table`` by hand are not seen.

    Parameters
    ----------
    clock : int
        ``vocabulary.clock`` as it was, or `Changes.clock` of the last time; 0: everything.

    Raises
    ------
    InvalidValueError
        The clock has not been there yet.
    """
    since = check_size(clock, "clock")
    check_alone(vocabulary, "changed_since()")
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        if since > vocabulary.clock:
            raise InvalidValueError(
                f"{owner}: clock is {since} but that of this vocabulary is {vocabulary.clock}; pass an earlier one, or 0 for "
                "everything"
            )
        now = vocabulary.clock
        complete = since == 0 or since < vocabulary._log.begins or LAST_STEP in live.table.planes
        rows = live.occupied()
        if not complete:
            rows = rows[live.last_use[rows] >= since]
        evicted = np.unique(
            np.concatenate([np.empty(0, dtype=np.int64), *(i for at, i in vocabulary._log.gone if at >= since)])
        )
        evicted = evicted[live.index.find(evicted) < 0]
        ids, reserved = torch.from_numpy(live.ids[rows]), vocabulary.weights_of(np.arange(live.reserved))
        about = vocabulary.seed, vocabulary.initial, vocabulary.padding_idx, vocabulary.features
        changed, gone, origin = vocabulary.weights_of(rows), torch.from_numpy(evicted), vocabulary._log.origin
        return Changes(ids, changed, gone, reserved, now, complete, since, origin, *about)


def check_alone(vocabulary: Room, what: str) -> None:
    """Raise if several processes share the ids out, where `what` is for one."""
    owner = vocabulary._bound()[1]
    if owner.owners.processes > 1:
        raise InvalidValueError(
            f"{owner}: {what} is for a vocabulary of one process, but {owner.owners.processes} processes share this one "
            "out; use ids and rows (export, update, forget)"
        )


def check_changes(vocabulary: Room, changes: Changes) -> None:
    """Raise unless this vocabulary has what was before the changes, and the padding of theirs."""
    live, owner = vocabulary._bound()
    changes.check()
    if len(changes.reserved) != live.reserved or changes.padding_idx not in (None, vocabulary.padding_idx):
        raise InvalidValueError(
            f"{owner}: the changes are of a table with padding_idx={changes.padding_idx} and {len(changes.reserved)} "
            f"reserved rows but this one has padding_idx={vocabulary.padding_idx} and {live.reserved}; make both with "
            "the same padding_idx"
        )
    if list(changes.features) != list(vocabulary.features):
        raise InvalidValueError(
            f"{owner}: the changes are of ids of the features {list(changes.features)} but this table has "
            f"{list(vocabulary.features)}; make both with the same features"
        )
    if changes.complete or not changes.origin:
        return
    origin, clock = vocabulary._synced or (0, 0)
    if origin != changes.origin:
        raise InvalidValueError(
            f"{owner}: a dump is missing: the changes are those since clock {changes.since} of a vocabulary that this one "
            "does not copy, or no longer (it was trained, or the other has loaded a state); begin with changed_since(0)"
        )
    if changes.since > clock:
        raise InvalidValueError(
            f"{owner}: a dump is missing: the changes are those since clock {changes.since} but this copy has those up to "
            f"{clock}; apply the ones between first, or begin anew with changed_since(0)"
        )
    if changes.clock < clock:
        raise InvalidValueError(
            f"{owner}: the changes are those up to clock {changes.clock} but this copy has those up to {clock} already; "
            "leave older ones out"
        )
