"""Make the part that one process owns of a table whose ids have a vocabulary, in agreement with the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.new_shard import check_shard, make_in_all, path_of
from speedtransfer.nn.new_vocabulary import check_capacity, check_rows, check_vocabulary
from speedtransfer.nn.options import TableOptions
from speedtransfer.optim import Handle, Rows, Sharded, VocabularyIds
from speedtransfer.ranks import Exchange, Interleaved, as_int64, exchange_of
from speedtransfer.tables import Table
from speedtransfer.vocabulary import Vocabulary, owners_of
from speedtransfer.vocabulary.capacity import limit_of_each, most_rows, share_of


def make_vocabulary_shard(
    weight: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    requires_grad: bool,
    options: TableOptions,
    padding_idx: int | None,
) -> Handle:
    """Make the rows of this process for the vocabulary in `options`, and their handle.

    With `weight`, ``(n, dim)``, the same in all processes, the ids from 0 to n - 1 are known, and have its rows.

    Raises
    ------
    ProcessGroupError
        The processes do not make the same table, or one of them could not.
    """
    exchange = exchange_of(options["process_group"])

    def check() -> str:
        nonlocal dtype
        given = check_vocabulary(options)
        dtype = _check(given, weight, dtype, options)
        return _described(given, shape, dtype, options, padding_idx)

    rows = make_in_all(
        exchange, check, lambda: _make_rows(weight, shape, device, dtype, options, padding_idx, exchange)
    )
    vocabulary = options["vocabulary"]
    assert vocabulary is not None
    # The seeds of processes may differ: those of rank 0 are used.
    seeds = exchange.agree("makes a table", [as_int64(rows.seed), as_int64(vocabulary.seed)])[0].tolist()
    rows.load_state_dict({"seed": seeds[0]})
    vocabulary.seed = seeds[1]
    partition = Interleaved([rows.table.num_rows] * exchange.ranks)
    handle = Handle(rows.table, requires_grad, options["idle"], rows)
    handle.owners = Sharded(handle, exchange, partition, options["comm_dtype"])
    VocabularyIds(handle, vocabulary, padding_idx)
    if weight is not None:
        vocabulary.adopt(weight, exchange.rank, exchange.ranks)
    return handle


def _check(vocabulary: Vocabulary, weight: Tensor | None, dtype: torch.dtype, options: TableOptions) -> torch.dtype:
    """Return the dtype of lookups; raise where options do not fit."""
    if options["memory"] == "shared":
        raise InvalidValueError(
            "vocabulary and memory='shared' are given, but each process gives rows to ids of its own; leave memory out"
        )
    if vocabulary.deferred:
        raise InvalidValueError(
            "vocabulary has deferred=True with process_group, but owners admit ids as they are asked for them; leave it out"
        )
    dtype = check_rows(vocabulary, weight, dtype, options)
    check_shard(dtype, options)
    return dtype


def _described(
    vocabulary: Vocabulary, shape: tuple[int, int], dtype: torch.dtype, options: TableOptions, padding_idx: int | None
) -> str:
    """Return what must be the same in all processes."""
    names = ("memory", "idle", "storage_dtype", "state_dtype", "scale_block", "comm_dtype")
    given = {name: dict(options)[name] for name in names} | {"padding_idx": padding_idx}
    given |= {
        name: getattr(vocabulary, name) for name in ("max_capacity", "admit", "evict", "unseen", "initial", "half_life")
    }
    given["capacity"] = vocabulary.capacity_asked or shape[0]
    if callable(vocabulary.evict):
        # Its address differs.
        given["evict"] = "a function"
    return f"{shape[0]} x {shape[1]} {dtype}, " + ", ".join(f"{name}={value}" for name, value in given.items())


def _make_rows(
    weight: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    options: TableOptions,
    padding_idx: int | None,
    exchange: Exchange,
) -> Rows:
    vocabulary, storage_dtype = options["vocabulary"], options["storage_dtype"]
    assert vocabulary is not None
    share = share_of(check_capacity(vocabulary, weight, shape[0]), exchange.ranks)
    if weight is not None:
        counts = np.bincount(owners_of(np.arange(len(weight)), exchange.ranks), minlength=exchange.ranks)
        share = max(share, int(counts.max()))
    stored = dtype if storage_dtype is None else storage_dtype
    place: Any = {name: dict(options)[name] for name in ("memory", "layout", "cache_rows")}
    path = None if options["path"] is None else path_of(options["path"], exchange)
    reserved, limit = vocabulary.reserved_rows(padding_idx), limit_of_each(vocabulary.max_capacity, exchange.ranks)
    most = most_rows(limit, reserved + share, reserved, shape[1] * stored.itemsize)
    table = Table(reserved + share, shape[1], stored, device=device, path=path, max_rows=most, **place)
    return Rows(table, storage_dtype, options["state_dtype"], options["scale_block"])
