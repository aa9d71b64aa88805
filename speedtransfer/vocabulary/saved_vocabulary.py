"""The state of a vocabulary as tensors, for state dicts, checkpoints, copies and pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.tables import Placement, row_chunks
from speedtransfer.vocabulary.changes import ChangeLog
from speedtransfer.vocabulary.contents import put
from speedtransfer.vocabulary.id_rows import FREE, PADDING_ROW, occupied
from speedtransfer.vocabulary.loaded_state import FORMAT, LoadPlan, SavedState, free_rows, packed, read_state
from speedtransfer.vocabulary.policies import DEPTH, Admission
from speedtransfer.vocabulary.room import Room


def state_dict(vocabulary: Room) -> dict[str, Tensor]:
    """Return its state: `ids` and `last_use`, ``(num_rows,)``, by row (-1: no id), which are views, and the rest."""
    live, admission = vocabulary._bound()[0], vocabulary._admission
    state = live.planes()
    if admission.counters is not None:
        state["sightings"] = torch.from_numpy(admission.counters)
    state["released"] = torch.from_numpy(live.released)
    state["origin"] = torch.tensor(
        vocabulary._synced or (vocabulary._log.origin, vocabulary.clock), dtype=torch.int64, device="cpu"
    )
    numbers = {
        "format": FORMAT,
        "clock": vocabulary.clock,
        "seed": vocabulary.seed,
        "reserved": live.reserved,
        "padding": vocabulary.padding_idx or 0,
        "sightings_added": admission.added,
        "hand": live.hand,
        "fresh": live.fresh,
        "admitted_now": vocabulary._admitted_now,
        "admitted_lately": vocabulary._admitted_lately,
    }
    state |= packed(numbers, vocabulary.initial)
    if vocabulary.features:
        names = "\0".join(vocabulary.features).encode()
        state["features"] = torch.from_numpy(np.frombuffer(names, dtype=np.uint8).copy())
    return state


def plan_load(vocabulary: Room, state: Mapping[str, Any], num_saved: int) -> LoadPlan:
    """Find a place for the rows of a saved table of `num_saved` rows and of a state that `state_dict` returned.

    An empty one is that of a table without a vocabulary, whose ids are the numbers of its rows. Ids keep their rows where the
    table has as many, or may; otherwise they get rows one after the other.

    InvalidValueError: the state is malformed, or that of a vocabulary with another padding. HostMemoryError: there are more
    ids than this vocabulary may have rows for.
    """
    live, owner = vocabulary._bound()
    saved = read_state(state, str(owner)) if state else None
    theirs = () if saved is None else saved.features
    if theirs != vocabulary.features:
        raise InvalidValueError(
            f"{owner}: the ids to load are those of the features {list(theirs)} but the ids here those of "
            f"{list(vocabulary.features)}, and would become others; load what a module with the same features has saved, or "
            "set rows by vocabulary.update"
        )
    if saved is None:
        sources = np.arange(num_saved)
        sources = sources[sources != live.padding_idx]
        ids, length = sources, live.reserved + len(sources)
    else:
        _check_saved(vocabulary, saved, num_saved)
        sources = np.flatnonzero(saved.last_use[live.reserved :] != FREE) + live.reserved
        ids, length = saved.ids[sources], num_saved
    first, same_places = 0, owner.owners.processes == 1
    if owner.owners.processes > 1:
        own = owner.owners.owns(ids)
        sources, ids = sources[own], ids[own]
        length = live.reserved + len(ids)
        share = None if saved is None else saved.share(owner.owners.rank, owner.owners.processes)
        if share is not None and np.array_equal(occupied(share[0].last_use, live.reserved) + share[1], sources):
            # As many processes have saved it: each has its rows again.
            (saved, first), same_places = share, True
            sources, length = sources - first, len(saved.ids)
    most, num_rows = vocabulary._most(), live.table.num_rows
    limits = [live.table.max_rows or num_rows, *([] if most is None else [live.reserved + most])]
    num_rows = max(num_rows, min(length, *limits))
    if live.reserved + len(ids) > num_rows:
        raise HostMemoryError(
            f"{owner}: the state has {len(ids)} ids but there are rows for {num_rows - live.reserved}, and no more; "
            "make the module with a larger capacity, or max_capacity"
        )
    rows, stays = live.reserved + np.arange(len(ids)), False
    if saved is not None and same_places and sources.max(initial=0) < num_rows:
        rows, stays = sources, len(saved.ids) <= num_rows
    try:
        index = live.index_of(ids, rows)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{owner}: the state of the vocabulary has an id twice ({error}); load what state_dict() returned"
        ) from None
    if stays and owner.owners.processes == 1:
        placement = Placement(num_saved)
    else:
        placement = _placement(vocabulary, saved is None, num_saved, sources + first, rows)
    return LoadPlan(saved, placement, num_rows, sources, ids, rows, index, stays, state)


def _placement(vocabulary: Room, is_plain: bool, num_saved: int, sources: np.ndarray, rows: np.ndarray) -> Placement:
    if is_plain:
        # What unseen ids read is of this vocabulary alone.
        padding = vocabulary.padding_idx
        if padding is not None and 0 <= padding < num_saved:
            sources, rows = np.append(sources, padding), np.append(rows, PADDING_ROW)
        order = np.argsort(sources)
        return Placement(num_saved, torch.from_numpy(sources[order]), torch.from_numpy(rows[order]))
    kept = np.arange(vocabulary.reserved)
    joined = (torch.from_numpy(np.concatenate([kept, numbers])) for numbers in (sources, rows))
    return Placement(num_saved, *joined)


def _check_saved(vocabulary: Room, saved: SavedState, num_saved: int) -> None:
    """Raise unless the state is that of `num_saved` rows, with the padding of this vocabulary."""
    owner, padding, numbers = vocabulary._bound()[1], vocabulary.padding_idx, saved.numbers
    if len(saved.ids) != num_saved:
        raise InvalidValueError(
            f"{owner}: the state has ids of {len(saved.ids)} rows but {num_saved} rows; load what state_dict() returned"
        )
    if numbers["reserved"] != vocabulary.reserved or (padding is not None and numbers["padding"] != padding):
        theirs = f"padding_idx={numbers['padding']}" if numbers["reserved"] == 2 else "no padding_idx"
        raise InvalidValueError(
            f"{owner}: the state of the vocabulary has {theirs} but the module padding_idx={padding}; make the "
            "module as it was saved"
        )


def would_move(vocabulary: Room, plan: LoadPlan) -> bool:
    """Tell whether a plan gives rows to other ids than have them, or none."""
    live = vocabulary._bound()[0]
    same_rows = plan.stays and np.array_equal(np.sort(live.occupied()), np.sort(plan.rows))
    return not (same_rows and np.array_equal(live.ids[plan.rows], plan.ids))


@torch.no_grad()
def load(vocabulary: Room, plan: LoadPlan) -> None:
    """Carry out a plan: the table grows, ids get their rows. The weights are to be written, by ``rows.placement``."""
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        live.table.check_writable()
        if plan.num_rows > live.table.num_rows:
            owner.grow(plan.num_rows)
        owner.rows.catch_up()
        before = live.index.find(plan.ids)
        # A state that is not a copy shows the planes that are written now.
        uses = _take_numbers(vocabulary, plan.saved, plan.sources).copy()
        of_reserved = None if plan.saved is None else plan.saved.last_use[: live.reserved].copy()
        ids, used = live.ids.copy(), live.last_use != FREE
        # Reserved and free rows too are then as they were saved, for what tells rows apart by their bits.
        whole = plan.saved if plan.stays else None
        if whole is not None:
            live.ids[: len(whole.ids)] = whole.ids
        # First: the last step of a row is one of its feature.
        live.ids[plan.rows] = plan.ids
        owner.rows.move_state(torch.from_numpy(before), torch.from_numpy(plan.rows))
        live.last_use[:] = FREE
        if whole is not None:
            live.last_use[: live.reserved] = of_reserved
        live.last_use[plan.rows] = uses
        if live.counts is not None:
            counts = None if plan.saved is None else plan.saved.counts
            counted = 0 if counts is None else counts[plan.sources]
            if whole is not None and counts is not None:
                live.counts[: len(counts)] = counts
            live.counts[plan.rows] = counted
        live.rebuild(plan.known, None if whole is None else free_rows(whole))
        if whole is not None:
            live.hand = whole.numbers["hand"] % max(len(live.ids) - live.reserved, 1)
        changed = np.flatnonzero((live.ids != ids) | ((live.last_use != FREE) != used))
        vocabulary._note_change(changed)
        vocabulary.generation_of_step = vocabulary.generation
        owner.rows.placement = plan.placement
        owner.rows_changed(changed)
        vocabulary._log = ChangeLog(vocabulary.clock)
        vocabulary._waiting = []


def _take_numbers(vocabulary: Room, saved: SavedState | None, sources: np.ndarray) -> np.ndarray:
    """Take what is not by row from a state, and return when the ids of its rows `sources` (n,) were used last."""
    if saved is None:
        vocabulary._synced = None
        return np.full(len(sources), vocabulary.clock)
    numbers = saved.numbers
    vocabulary.seed, vocabulary.initial = numbers["seed"], saved.initial
    before = vocabulary._admission.counters
    width = 1 if before is None else before.shape[1]
    sightings = saved.sightings
    if sightings is not None:
        # Other processes counted other ids: the most is never too low, and does not grow with each save as a sum would.
        sightings = sightings.reshape(-1, DEPTH, sightings.shape[1]).max(0)
    vocabulary._admission = Admission(vocabulary.admit, vocabulary.seed, width, sightings)
    vocabulary._admission.added = numbers["sightings_added"]
    vocabulary._admitted_now, vocabulary._admitted_lately = numbers["admitted_now"], numbers["admitted_lately"]
    vocabulary._synced = saved.origin
    if numbers["by_time"]:
        return np.full(len(sources), vocabulary.clock)
    vocabulary.clock = numbers["clock"]
    return saved.last_use[sources]


def go_on_with(vocabulary: Room, saved: SavedState) -> None:
    """Take what is not by row from a state, whose rows are there."""
    with vocabulary._bound()[1].rows.lock:
        _take_numbers(vocabulary, saved, np.empty(0, np.int64))
        vocabulary._log = ChangeLog(vocabulary.clock)


@torch.no_grad()
def reset_rows(vocabulary: Room, fill_padding: bool = False) -> None:
    """Set the weights of all known ids to their initial values, and keep the state of the optimizer.

    The row of padding becomes zeros, or with `fill_padding` what its id would begin with.
    """
    live, owner = vocabulary._bound()
    with owner.rows.lock:
        live.table.check_writable()
        rows = live.occupied()
        for part in row_chunks(len(rows), 8 * live.table.dim):
            values = vocabulary.initial_values(live.ids[rows[part]], live.table.dim, owner.rows.dtype)
            put(vocabulary, rows[part], values)
        live.last_use[rows] = vocabulary.clock
        if live.padding_idx is not None:
            values = vocabulary.initial_values(np.array([live.padding_idx]), live.table.dim, owner.rows.dtype)
            put(vocabulary, np.array([PADDING_ROW]), values if fill_padding else torch.zeros_like(values))
