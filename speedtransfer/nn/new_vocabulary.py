"""Make the table of a module whose ids have a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtransfer.encoding import check_dtypes
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.options import TableOptions
from speedtransfer.optim import Handle, Rows, VocabularyIds
from speedtransfer.tables import Table
from speedtransfer.vocabulary import Vocabulary
from speedtransfer.vocabulary.capacity import most_rows


def make_vocabulary_handle(
    weight: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    requires_grad: bool,
    options: TableOptions,
    padding_idx: int | None,
) -> Handle:
    """Make a table for the vocabulary in `options`, and its handle.

    With `weight`, ``(n, dim)``, the ids from 0 to n - 1 are known, and have its rows.
    """
    vocabulary = check_vocabulary(options)
    about: Any = options
    dtype = check_rows(vocabulary, weight, dtype, options)
    capacity, reserved = check_capacity(vocabulary, weight, shape[0]), vocabulary.reserved_rows(padding_idx)
    limit, num_rows, storage_dtype = vocabulary.max_capacity, reserved + capacity, options["storage_dtype"]
    stored = dtype if storage_dtype is None else storage_dtype
    most = most_rows(limit, num_rows, reserved, shape[1] * stored.itemsize)
    place = {name: about[name] for name in ("memory", "path", "layout", "cache_rows", "cache_counts")}
    table = Table(num_rows, shape[1], stored, device=device, max_rows=most, **place)
    rows = Rows(table, storage_dtype, options["state_dtype"], options["scale_block"])
    handle = Handle(table, requires_grad, options["idle"], rows)
    VocabularyIds(handle, vocabulary, padding_idx)
    if weight is not None:
        vocabulary.adopt(weight)
    return handle


def check_vocabulary(options: TableOptions) -> Vocabulary:
    """Return the vocabulary in `options`; raise unless it is one that no module has."""
    vocabulary = options["vocabulary"]
    if not isinstance(vocabulary, Vocabulary):
        raise InvalidTypeError(
            f"vocabulary is a {type(vocabulary).__name__} but must be a speedtransfer.Vocabulary; pass st.Vocabulary(...)"
        )
    if options["cache_counts"] is not None:
        raise InvalidValueError(
            "cache_counts and vocabulary are given, but ids get rows as they come, so that none has counts; leave "
            "cache_counts out, and the cache has the rows that were used most of late"
        )
    vocabulary.check_unbound()
    return vocabulary


def check_rows(vocabulary: Vocabulary, weight: Tensor | None, dtype: torch.dtype, options: TableOptions) -> torch.dtype:
    """Return the dtype of lookups; raise where options do not fit."""
    if weight is not None and options["storage_dtype"] is not None and weight.is_floating_point():
        dtype = torch.float32
    if not dtype.is_floating_point:
        raise InvalidTypeError(
            f"the rows are {dtype} but those of a vocabulary begin with drawn values and are trained; pass floating-point ones"
        )
    vocabulary.check_dtype(dtype)
    check_dtypes(dtype, options["storage_dtype"], options["state_dtype"], options["scale_block"])
    return dtype


def check_capacity(vocabulary: Vocabulary, weight: Tensor | None, num_embeddings: int) -> int:
    """Return the number of ids to have rows for at first; raise if there are more than that, or than there may be."""
    capacity, limit = vocabulary.capacity_asked or num_embeddings, vocabulary.max_capacity
    if weight is not None and len(weight) > capacity:
        raise InvalidValueError(
            f"capacity is {capacity} but there are {len(weight)} rows, of the ids from 0 on; pass a larger capacity, or None"
        )
    if isinstance(limit, int) and limit < capacity:
        raise InvalidValueError(
            f"max_capacity is {limit} but capacity (by default num_embeddings) is {capacity}; pass as much, or None"
        )
    return capacity
