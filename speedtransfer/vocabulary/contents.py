"""What a vocabulary holds, read and changed by id: copies for serving, archives and other tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import check_values
from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.interrupts import to_its_end
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.changed_ids import check_alone, check_changes
from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.ids import as_ids
from speedtransfer.vocabulary.room import Room


def by_id(vocabulary: Room) -> tuple[np.ndarray, np.ndarray]:
    """Return the known ids, sorted, and their rows, (n,) int64 each."""
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        rows = live.occupied()
        rows = rows[np.argsort(live.ids[rows], kind="stable")]
        return live.ids[rows], rows


def rows_here(vocabulary: Room, ids: np.ndarray) -> np.ndarray:
    """Return the rows of ids (n,) in the table of this process, (n,) int64, -1 where it does not know them."""
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        return live.index.find(ids)


def export(vocabulary: Room) -> tuple[Tensor, Tensor]:
    """Return the known ids, ``(n,)`` int64, sorted, and their weights, ``(n, dim)`` on the CPU.

    For a plain ``nn.Embedding.from_pretrained(rows)``, whose row `i` is then that of ``ids[i]`` (``torch.searchsorted``).
    """
    with vocabulary._bound()[1].rows.lock:
        ids, rows = by_id(vocabulary)
        return torch.from_numpy(ids), vocabulary.weights_of(rows)


@torch.no_grad()
def update(vocabulary: Room, ids: Any, rows: Any = None) -> None:
    """Set the weights of ids to `rows`; new ids are admitted. The state of the optimizer stays, of new ids it is fresh.

    Parameters
    ----------
    ids : tensor, ndarray, list or Changes
        ``(n,)``, distinct; or what `changed_since` has returned: ids that were forgotten there are forgotten here too.
    rows : Tensor, optional
        ``(n, dim)``.

    Raises
    ------
    HostMemoryError
        There is no row for a new id. Nothing has changed.
    InvalidValueError, InvalidTypeError
        An id occurs twice; shapes that do not match; a gradient of an id to be forgotten is pending; changes before
        those given are missing.
    """
    _, owner = vocabulary._bound()
    vocabulary.settle()
    wanted, values, changes = owner.owners.together(lambda: _checked(vocabulary, ids, rows))
    wanted, values = owner.owners.to_owners(wanted, values)
    owner.owners.together(lambda: _update(vocabulary, wanted, values, changes))


def _checked(vocabulary: Room, ids: Any, rows: Any) -> tuple[np.ndarray, Tensor, Changes | None]:
    """Return ids (n,), their rows ``(n, dim)`` and the changes that these are of, if any; raise where it cannot be."""
    live, owner = vocabulary._bound()
    changes = ids if isinstance(ids, Changes) else None
    if changes is not None:
        check_alone(vocabulary, "update() with changes")
        ids, rows = changes.ids, changes.rows
        check_changes(vocabulary, changes)
    wanted, values = as_ids(ids).cpu().numpy(), rows
    if wanted.ndim != 1:
        raise InvalidValueError(f"{owner}: ids has shape {wanted.shape} but must be (n,); pass for instance [7, 9]")
    if not isinstance(values, Tensor) or tuple(values.shape) != (len(wanted), live.table.dim):
        what = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise InvalidValueError(
            f"{owner}: ids has shape {wanted.shape} and rows is {what} but must be a tensor "
            f"of shape ({len(wanted)}, {live.table.dim}); pass one with a row for each id"
        )
    check_values(values, f"{owner}: rows")
    return wanted, values, changes


def _update(vocabulary: Room, wanted: np.ndarray, values: Tensor, changes: Changes | None) -> None:
    live, owner = vocabulary._bound()
    if len(np.unique(wanted)) < len(wanted):
        raise InvalidValueError(f"{owner}: an id occurs twice among the {len(wanted)} given; pass each once")
    with owner.rows.lock:
        live.table.check_writable()
        gone = np.empty(0, dtype=np.int64)
        if changes is not None:
            known = live.ids[live.occupied()]
            gone = _check_to_forget(
                vocabulary, np.setdiff1d(known, wanted) if changes.complete else changes.evicted.cpu().numpy()
            )
        at = live.index.find(wanted)
        vocabulary._make_room(int(np.count_nonzero(at < 0)) - len(gone), np.concatenate([at, gone]))
        # After an interrupt all is written again, so that none has what it had before.
        to_its_end(lambda: _write(vocabulary, wanted, values, gone, changes))


def _write(vocabulary: Room, ids: np.ndarray, values: Tensor, gone: np.ndarray, changes: Changes | None) -> None:
    """Set the weights of ids (n,) to `values`, ``(n, dim)``; there is room, also in the rows `gone`, whose ids go."""
    live, _ = vocabulary._bound()
    if changes is not None:
        vocabulary.clock = max(vocabulary.clock, changes.clock)
    vocabulary._take_from_ids(gone[live.last_use[gone] != FREE], archive=False)
    at = live.index.find(ids)
    new, old = np.flatnonzero(at < 0), np.flatnonzero(at >= 0)
    with live.changing():
        given = live.take(len(new))
        for part in row_chunks(len(new), live.table.dim * values.element_size()):
            vocabulary._begin(ids[new[part]], given[part], values[torch.from_numpy(new[part])])
    for part in row_chunks(len(old), live.table.dim * values.element_size()):
        put(vocabulary, at[old[part]], values[torch.from_numpy(old[part])])
    live.last_use[at[old]] = vocabulary.clock
    if changes is not None:
        put(vocabulary, np.arange(live.reserved), changes.reserved)
        vocabulary.seed = vocabulary.seed if changes.seed is None else changes.seed
        vocabulary.initial = vocabulary.initial if changes.initial is None else changes.initial
        # Last: if something comes in before, the next changes are refused.
        vocabulary._synced = (changes.origin, changes.clock) if changes.origin else None


def put(vocabulary: Room, rows: np.ndarray, values: Tensor) -> None:
    """Set the weights of `rows` (n,), distinct, and keep their state."""
    owner = vocabulary._bound()[1]
    if len(rows):
        at = torch.from_numpy(rows).to(owner.rows.table.device)
        owner.rows.catch_up(at)
        owner.rows.put("weight", at, values)


def make_room_for(vocabulary: Room, ids: np.ndarray, gone: np.ndarray) -> None:
    """Have rows for ids (n,) of this process, once the ids `gone` (m,) are; others stay.

    HostMemoryError: there are not as many, and may not be. InvalidValueError: an id in `gone` may not be forgotten now.
    """
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        count = int(np.count_nonzero(live.index.find(ids) < 0))
        more = count - len(_check_to_forget(vocabulary, gone))
        if more > live.num_free:
            vocabulary._grow(more - live.num_free)
        if more > live.num_free:
            raise HostMemoryError(
                f"{owner}: {count} new ids need rows, but {more - live.num_free} too many for the {vocabulary.capacity} that "
                "there are; make the module with a larger capacity, or max_capacity"
            )


@torch.no_grad()
def follow_changes(vocabulary: Room, changes: Changes) -> None:
    """Do as `update` with changes, of ids that this process has, after `make_room_for`; of several all must call it."""
    _update(vocabulary, changes.ids.numpy(), changes.rows, changes)


@torch.no_grad()
def forget(vocabulary: Room, ids: Any) -> int:
    """Let ids be unknown, and erase their weights and state; return how many were known.

    Raises
    ------
    InvalidValueError
        A gradient of one of them may still come, or no step has taken it yet.
    """
    _, owner = vocabulary._bound()
    wanted = owner.owners.together(lambda: as_ids(ids).cpu().reshape(-1).numpy())
    wanted = np.unique(owner.owners.to_owners(wanted)[0])
    with owner.rows.lock:
        vocabulary.settle()
        rows = owner.owners.together(lambda: _check_to_forget(vocabulary, wanted))
        _erase(vocabulary, rows)
    return owner.owners.sum(len(rows))


def _check_to_forget(vocabulary: Room, ids: np.ndarray) -> np.ndarray:
    """Return the rows of those of `ids` (n,) that are known; raise if one may not be forgotten now."""
    live, owner = vocabulary._bound()
    rows = live.index.find(ids)
    rows = rows[rows >= live.reserved]
    in_use = owner.rows_in_use()
    if len(rows) and (in_use is None or np.isin(rows, in_use).any()):
        raise InvalidValueError(
            f"{owner}: an id to be forgotten was looked up in training, and no step has followed, or its gradient "
            "is still there; call optimizer.step() and zero_grad() first"
        )
    return rows


def _erase(vocabulary: Room, rows: np.ndarray) -> None:
    """Take `rows` (n,) from their ids, and set their weights and state to zero."""
    live, owner = vocabulary._bound()

    def clear() -> None:
        gone = torch.from_numpy(rows[live.last_use[rows] == FREE])
        zeros = torch.zeros(len(gone), live.table.dim, dtype=owner.rows.dtype, device="cpu")
        owner.rows.reset(gone.to(live.table.device), zeros)

    try:
        vocabulary._take_from_ids(rows, archive=False)
    finally:
        to_its_end(clear)
