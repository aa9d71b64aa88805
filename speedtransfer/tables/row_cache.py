"""Give a table a cache of hot rows: check what was asked for, and make the engine that has it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedtransfer.engines import (
    CachedEngine,
    CachePolicy,
    Engine,
    LfuPolicy,
    StaticPolicy,
    auto_capacity,
    hottest_rows,
)
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.tables.memories import Memory
from speedtransfer.tables.page_advice import read_ahead_of_rows


class CacheOptions(NamedTuple):
    """A cache that was asked for: how many rows, or "auto", and how often each row is used, (num_rows,), if that is known."""

    rows: int | Literal["auto"]
    counts: Tensor | None


def check_cache(rows: Any, counts: Any, memory: str, num_rows: int) -> CacheOptions | None:
    """Return the cache that was asked for; None for none.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        They break a rule, or the rows live in the memory of the compute device already.
    """
    if rows is None:
        if counts is not None:
            raise InvalidValueError(
                "cache_counts is given but cache_rows is None; pass cache_rows='auto' or a number of rows"
            )
        return None
    if isinstance(rows, str):
        if rows != "auto":
            raise InvalidValueError(f"cache_rows is {rows!r} but must be 'auto' or a number of rows; pass one of them")
    else:
        rows = check_size(rows, "cache_rows")
    if memory == "device":
        raise InvalidValueError(
            f"cache_rows is {rows!r} but memory='device' has all rows on the compute device; leave cache_rows out, or pass "
            "memory='pinned', 'pageable' or 'mmap'"
        )
    if counts is None:
        return CacheOptions(rows, None)
    try:
        given = counts.detach() if isinstance(counts, Tensor) else torch.as_tensor(counts, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(
            f"cache_counts is a {type(counts).__name__} but must hold a number for each row ({error}); pass a tensor"
        ) from error
    if given.dtype == torch.bool or given.is_complex():
        raise InvalidTypeError(f"cache_counts is of dtype {given.dtype} but holds numbers; pass cache_counts.float()")
    if given.shape != (num_rows,):
        raise InvalidValueError(
            f"cache_counts has shape {tuple(given.shape)} but the table has {num_rows} rows; pass how often each row is used, "
            f"of shape ({num_rows},)"
        )
    return CacheOptions(rows, given)


def cached_engine(engine: Engine, options: CacheOptions, place: Memory, weight: Tensor) -> CachedEngine:
    """Return an engine around `engine` for a table in `place` with the plane `weight`."""
    device = engine.device
    asked = options.rows
    rows = auto_capacity(weight.shape[1] * weight.element_size(), device) if isinstance(asked, str) else asked
    rows = min(rows, len(weight))
    # Tensors of inference mode could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        policy: CachePolicy = LfuPolicy(device)
        if options.counts is not None:
            policy = StaticPolicy(hottest_rows(options.counts, rows, device))
        return CachedEngine(engine, policy, rows, read_ahead_of_rows, at_exit=place.path is not None)
