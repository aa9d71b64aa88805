"""Whether a delta begins with what a model holds, and what that is once it is applied; nothing is changed here."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint.delta_file import OF_PLACES, Delta
from speedtransfer.checkpoint.marked_table import MarkedTable
from speedtransfer.checkpoint.marks import Mark
from speedtransfer.checkpoint.plain_data import decode
from speedtransfer.checkpoint.row_hashes import Content, hashes_of, reserved_sum, total_of
from speedtransfer.dtypes import rows_at
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary import Changes
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.initial import check_initial
from speedtransfer.vocabulary.loaded_state import SavedState, read_state


def check_fits(delta: Delta, tables: Mapping[str, MarkedTable]) -> None:
    """Raise `InvalidValueError` unless these are the tables of the delta."""
    if tables.keys() != delta.tables.keys():
        raise InvalidValueError(
            f"{str(delta.path)!r} has tables that the model has not, or the reverse "
            f"({sorted(tables.keys() ^ delta.tables.keys())[:3]}); make the model as the one that was saved"
        )
    for key, table in tables.items():
        saved, of_ids = delta.tables[key], table.of_ids
        if of_ids and saved.vocabulary is None and any(name.startswith(OF_VOCABULARY) for name in saved.planes):
            raise InvalidValueError(
                f"{str(delta.path)!r} has rows of {key!r} with their state by the places that they have in one process, but "
                "several share them out here; apply it in one process, or save deltas without the optimizer"
            )
        if of_ids is (saved.vocabulary is None):
            raise InvalidValueError(
                f"{key!r} has {'a' if of_ids else 'no'} vocabulary in the model and {'none' if of_ids else 'one'} in "
                f"{str(delta.path)!r}; make the model as the one that was saved"
            )
        check_stored(delta, key, table, state=False)
        if of_ids:
            table.handle.id_space.vocabulary.check_changes(changes_of(delta, key, table))


def check_follows(delta: Delta, mark: Mark) -> None:
    """Raise `InvalidValueError` unless a delta is the one after that which a mark knows, or neither knows of another."""
    place, ours = delta.place, mark._place
    if place == ours:
        raise has_been_applied(delta)
    # The first of another run has its rows alone: its trainer was started again, perhaps.
    if ours.number and not delta.follows_place(ours):
        raise InvalidValueError(
            f"{str(delta.path)!r} is number {place.number} of run {place.run[:8]} but the model is at number {ours.number} of "
            f"{ours.run[:8]}: it has been applied, one before it is missing, or it is of another run; apply the next one, or "
            "begin with a checkpoint"
        )


def has_been_applied(delta: Delta) -> InvalidValueError:
    """Return what to raise for a delta that comes again."""
    return InvalidValueError(f"{str(delta.path)!r} has been applied: the model holds what comes after it; leave it out")


def check_stored(delta: Delta, key: str, table: MarkedTable, state: bool = True) -> None:
    """Raise `InvalidValueError` unless a table stores its weights, and `state`, as the one that was saved."""
    rows, encoding = delta.rows[key], table.handle.rows.encoding("weight")
    ours = {name: _about(table.handle.table.stored(name)) for name in table.stored}
    theirs = {name: _about(part) for name, part in rows.parts.items() if name not in table.beside}
    of_no_id = {name: _about(part) for name, part in rows.reserved.items()}
    if not state:
        ours, theirs, of_no_id = (
            {n: v for n, v in each.items() if n.startswith("weight")} for each in (ours, theirs, of_no_id)
        )
    if (encoding, ours) != (delta.tables[key].encoding, theirs) or of_no_id not in ({}, ours):
        raise InvalidValueError(
            f"{key!r} is stored as {delta.tables[key].encoding} {theirs} in {str(delta.path)!r} but as {encoding} {ours} "
            "in the model; make it with the same dim, dtype, storage_dtype and state_dtype"
        )


def content_after(delta: Delta, key: str, now: Content, whose: str = "the model") -> Content:
    """Return the content of a table once the delta is applied, of that `now`; raise unless it begins with what is there.

    Rows that an apply that was interrupted has written count as what they were.
    """
    saved, rows = delta.tables[key], delta.rows[key]
    if now.ids is None and saved.begins < len(now.hashes) <= saved.rows:
        # What an apply that was interrupted has given it: the delta has all of these.
        now = Content(now.hashes[: saved.begins])
    ids, gone = rows.ids.numpy(), rows.gone.numpy()
    found, had, had_gone = hashes_of(ids, rows.parts, saved.fills), now.of(ids), now.of(gone)
    written = had == found
    as_it_was = bool((written | (had == rows.was)).all() and ((had_gone == rows.gone_was) | (had_gone == 0)).all())
    was = np.where(written, rows.was, had)
    # Sums of hashes, of which whole rows are a part.
    begins = now.total - total_of(had) + total_of(was) - total_of(had_gone) + total_of(rows.gone_was)
    reserved = reserved_sum(rows.reserved, saved.fills) if rows.reserved else 0
    begins += saved.reserved - now.reserved
    as_it_was &= now.reserved in (saved.reserved, reserved)
    if not as_it_was or f"{begins % 2**64:016x}" != saved.since:
        raise InvalidValueError(
            f"{str(delta.path)!r} begins with other rows of {key!r} ({saved.begins} of fingerprint {saved.since}) than "
            f"{whose} has ({len(now.keys)} of {now.total:016x}): a delta before it is missing, or it is of another run; "
            "apply those in between first, or begin with a checkpoint of when st.mark was called"
        )
    after = _merged(now, ids, found, gone, reserved, saved.rows)
    if f"{after.total:016x}" != saved.now:
        raise StorageError(f"{str(delta.path)!r} has other rows of {key!r} than were saved; use another copy of it")
    return after


def check_rows(delta: Delta, key: str, table: MarkedTable, now: Content) -> None:
    """Raise unless the rows of a table that a delta changes are those of a mark, whose content is `now`."""
    ids = delta.rows[key].ids.numpy()
    had = now.of(ids)
    # Others are those that an apply is to add.
    known = np.arange(len(ids)) if table.of_ids else np.flatnonzero(ids < table.count)
    mine, at = table.owned(ids[known])
    keys, had = ids[known][mine], had[known][mine]
    for some in row_chunks(len(at), table.row_bytes):
        if not np.array_equal(hashes_of(keys[some], table.read(at[some]), table.fills), had[some]):
            raise InvalidValueError(f"rows of {key!r} were written after the mark was made; leave mark out")


def _merged(now: Content, ids: np.ndarray, found: np.ndarray, gone: np.ndarray, reserved: int, count: int) -> Content:
    if now.ids is None:
        hashes = np.zeros(count, np.uint64)
        hashes[: len(now.hashes)] = now.hashes[:count]
        hashes[ids] = found
        return Content(hashes)
    stays = ~np.isin(now.ids, np.concatenate([ids, gone]))
    keys = np.concatenate([now.ids[stays], ids])
    order = np.argsort(keys)
    return Content(np.concatenate([now.hashes[stays], found])[order], keys[order], reserved)


def changes_of(delta: Delta, key: str, table: MarkedTable) -> Changes:
    """Return what has changed in a vocabulary; of several processes with the rows of this one."""
    rows, facts, stored = delta.rows[key], delta.tables[key].vocabulary, table.handle.rows
    assert facts is not None
    own = torch.from_numpy(table.owns(rows.ids.numpy()))
    found = {"weight" + part: rows.parts["weight" + part] for part in stored.part_specs("weight")}
    found = {name: rows_at(part, own) for name, part in found.items()}
    values = [
        stored.decode("weight", {part: each["weight" + part] for part in stored.part_specs("weight")})
        for each in (found, rows.reserved)
    ]
    initial = None if facts["initial"] is None else check_initial(facts["initial"])
    return Changes(
        *(rows.ids[own], values[0], rows.gone, values[1], facts["clock"], False),
        seed=facts["seed"],
        initial=initial,
        padding_idx=facts["padding_idx"],
        features=facts["features"],
    )


def state_of_ids(delta: Delta, key: str, table: MarkedTable) -> SavedState:
    """Return what a delta with state has of a vocabulary beside its rows."""
    start, read = key.removesuffix("weight") + OF_VOCABULARY, DeltaReader(delta, "model", {key: table}).read
    entries = {n.removeprefix(start): e for n, e in delta.content["model"]["entries"].items() if n.startswith(start)}
    state = {name: decode(entry, read) for name, entry in entries.items() if name not in OF_PLACES}
    none = torch.full((table.handle.id_space.vocabulary.reserved,), FREE, device="cpu")
    state |= {"ids": none, "last_use": none, "released": none[:0]}
    return read_state(state | ({"counts": none.float()} if "counts" in entries else {}), key)


class DeltaReader:
    """The tensors of a delta of one role, as `TensorReader` has those of a checkpoint; what has rows is written by others."""

    rows_come_apart = True

    def __init__(self, delta: Delta, role: str, tables: Mapping[str, MarkedTable]) -> None:
        self._delta, self._start, self._tables = delta, f"{role}/", tables
        self._by_row = {n: (key, plane) for key, t in delta.tables.items() for plane, n in t.planes.items()}

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor: of rows that of all."""
        name = self._start + name
        found = self._delta.tensors[name]
        if name not in self._by_row:
            return found.dtype, tuple(found.shape)
        return found.dtype, (self._delta.tables[self._by_row[name][0]].rows, *found.shape[1:])

    def read(self, name: str) -> Tensor:
        """Return a tensor; one that a vocabulary has by row as it will be."""
        name = self._start + name
        found = self._delta.tensors[name].clone()
        if name not in self._by_row:
            return found
        key, plane = self._by_row[name]
        before = self._tables[key].beside[plane]
        whole = before.new_zeros(self._delta.tables[key].rows)
        whole[: len(before)] = before[: len(whole)]
        whole[self._delta.rows[key].ids] = found
        return whole

    mapped = read


def _about(values: Tensor) -> str:
    return f"{values.shape[1]} {str(values.dtype).removeprefix('torch.')}"
