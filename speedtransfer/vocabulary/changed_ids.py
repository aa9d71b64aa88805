"""What has changed in a vocabulary since a time, for copies, and what a copy checks before it takes that."""

from __future__ import annotations

import numpy as np
import torch

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.rows import LAST_STEP
from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.room import Room


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
        # Of what is looked up and not settled the time of use is to be noted, which is that of the lookup.
        now = max(since, min([vocabulary.clock, *(noted.clock for noted in vocabulary._waiting)]))
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
