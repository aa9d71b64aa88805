"""The rows of a table that is to be made: what options may be given together, how many there are here, and their memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import resolve_device
from speedtransfer.encoding import check_dtypes, dtype_of, value_bytes
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.options import TableOptions, table_arguments
from speedtransfer.optim import Rows
from speedtransfer.ranks import Exchange, Partition, SharedMemory
from speedtransfer.system import physical_bytes
from speedtransfer.tables import Table, check_layout
from speedtransfer.vocabulary import Vocabulary, owners_of
from speedtransfer.vocabulary.id_rows import reserved_rows
from speedtransfer.vocabulary.initial import check_range
from speedtransfer.vocabulary.policies import most_rows, share_of

# What gradients may be sent as.
COMM_DTYPES = (None, torch.bfloat16, torch.int8)


class NewRows:
    """The rows that this process is to have of a table; the arguments are those of `make_handle`.

    Parameters
    ----------
    exchange : Exchange, optional
        To the other processes that are to own rows.
    """

    def __init__(
        self,
        weight: Tensor | None,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        options: TableOptions,
        padding_idx: int | None,
        exchange: Exchange | None,
    ) -> None:
        self.weight, self.shape, self.device, self.dtype = weight, shape, device, dtype
        self.options, self.padding_idx, self.exchange = options, padding_idx, exchange

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the plane of the rows."""
        return dtype_of(self.options["storage_dtype"] or self.dtype)

    # --- checks -----------------------------------------------------------------------------------------------------------

    def check(self) -> str:
        """Raise where options do not fit; return what must be the same in all processes."""
        options, vocabulary = self.options, self.options["vocabulary"]
        if vocabulary is not None:
            self._check_vocabulary(vocabulary)
        check_dtypes(self.dtype, options["storage_dtype"], options["state_dtype"], options["scale_block"])
        if self.exchange is None:
            return ""
        self._check_shared_out()
        names = ("memory", "idle", "storage_dtype", "state_dtype", "scale_block", "comm_dtype")
        given = {name: dict(options)[name] for name in names}
        if vocabulary is not None:
            given["padding_idx"] = self.padding_idx
            settings = ("max_capacity", "admit", "evict", "unseen", "initial", "half_life")
            given |= {name: getattr(vocabulary, name) for name in settings}
            given["capacity"] = vocabulary.capacity_asked or self.shape[0]
            if callable(vocabulary.evict):
                # Its address differs.
                given["evict"] = "a function"
        given["rows"] = "given" if self.weight is not None else "drawn"
        about = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"{self.shape[0]} x {self.shape[1]} {self.dtype}, {about}"

    def _check_vocabulary(self, vocabulary: Vocabulary) -> None:
        if self.options["cache_counts"] is not None:
            raise InvalidValueError(
                "cache_counts and vocabulary are given, but ids get rows as they come, so that none has counts; leave "
                "cache_counts out, and the cache has the rows that were used most of late"
            )
        vocabulary.check_unbound()
        if self.exchange is not None:
            if self.options["memory"] == "shared":
                raise InvalidValueError(
                    "vocabulary and memory='shared' are given, but each process gives rows to ids of its own; leave memory out"
                )
            if vocabulary.deferred:
                raise InvalidValueError(
                    "vocabulary has deferred=True with process_group, but owners admit ids as they are asked for them; leave "
                    "it out"
                )
        if not self.dtype.is_floating_point:
            raise InvalidTypeError(
                f"the rows are {self.dtype} but those of a vocabulary begin with drawn values and are trained; pass "
                "floating-point ones"
            )
        check_range(vocabulary.initial, self.dtype)
        self._capacity(vocabulary)

    def _check_shared_out(self) -> None:
        """Raise where options do not fit a table that processes share out."""
        comm_dtype, counts = self.options["comm_dtype"], self.options["cache_counts"]
        if comm_dtype not in COMM_DTYPES or (comm_dtype is not None and self.dtype != torch.float32):
            raise InvalidValueError(
                f"comm_dtype is {comm_dtype} for rows of {self.dtype} but must be torch.bfloat16 or torch.int8, for rows of "
                "torch.float32; leave it out to send gradients as they are"
            )
        if counts is not None and tuple(np.shape(counts)) != self.shape[:1]:
            raise InvalidValueError(
                f"cache_counts is {tuple(np.shape(counts))} but the table has {self.shape[0]} rows; pass a number for each "
                f"row of all processes, ({self.shape[0]},)"
            )
        if self.options["memory"] == "shared":
            if self.options["path"] is not None or self.options["cache_rows"] is not None:
                raise InvalidValueError(
                    "memory='shared' takes no path and no cache_rows; leave them out, or use another memory"
                )
            check_layout(self.options["layout"])

    # --- memory -----------------------------------------------------------------------------------------------------------

    def make(self) -> Rows:
        """Make a table for the rows of this process, of zeros."""
        options, exchange = self.options, self.exchange
        if options["memory"] == "shared":
            assert exchange is not None
            memory = SharedMemory(resolve_device(self.device), exchange)
            memory.layout = options["layout"]
            return self._rows(Table.over(memory, *self.shape, self.stored))
        num_rows, most = self._sizes()
        place = table_arguments(options)
        if exchange is not None:
            if place["path"] is not None:
                place["path"] = path_of(place["path"], exchange)
            if place["cache_counts"] is not None:
                ids = Partition(self.shape[0], exchange.ranks).ids_of(exchange.rank)
                place["cache_counts"] = torch.as_tensor(place["cache_counts"], device="cpu")[ids]
        return self._rows(Table(num_rows, self.shape[1], self.stored, device=self.device, max_rows=most, **place))

    def over(self, weight: Tensor) -> Rows:
        """Return rows in the memory of `weight`, ``(num_rows, dim)``, where that is possible, else in a copy."""
        return self._rows(Table.from_array(weight, device=self.device, copy=False, **table_arguments(self.options)))

    def _rows(self, table: Table) -> Rows:
        options = self.options
        return Rows(table, options["storage_dtype"], options["state_dtype"], options["scale_block"])

    def _sizes(self) -> tuple[int, int | None]:
        """Return how many rows there are here at first, and may be at most; None: as many."""
        exchange, vocabulary, weight = self.exchange, self.options["vocabulary"], self.weight
        if vocabulary is None:
            if exchange is None:
                return self.shape[0], None
            return Partition(self.shape[0], exchange.ranks).size(exchange.rank), None
        capacity, limit = self._capacity(vocabulary), vocabulary.max_capacity
        ranks = 1 if exchange is None else exchange.ranks
        capacity = share_of(capacity, ranks)
        if exchange is not None and weight is not None:
            counts = np.bincount(owners_of(np.arange(len(weight)), ranks), minlength=ranks)
            capacity = max(capacity, int(counts.max()))
        reserved = reserved_rows(self.padding_idx)
        num_rows = reserved + capacity
        if limit is None:
            return num_rows, None
        # Of processes without a limit each may have all memory.
        limit = f"{ranks * (physical_bytes() or 1 << 40)} B" if limit == math.inf else limit
        row_bytes = self.shape[1] * value_bytes(self.options["storage_dtype"] or self.dtype)
        return num_rows, most_rows(limit, ranks, num_rows, reserved, row_bytes)

    def _capacity(self, vocabulary: Vocabulary) -> int:
        """Return the number of ids to have rows for at first; raise if there are more than that, or than there may be."""
        capacity, limit, weight = vocabulary.capacity_asked or self.shape[0], vocabulary.max_capacity, self.weight
        if weight is not None and len(weight) > capacity:
            raise InvalidValueError(
                f"capacity is {capacity} but there are {len(weight)} rows, of the ids from 0 on; pass a larger capacity, or "
                "None"
            )
        if isinstance(limit, int) and limit < capacity:
            raise InvalidValueError(
                f"max_capacity is {limit} but capacity (by default num_embeddings) is {capacity}; pass as much, or None"
            )
        return capacity


def path_of(path: str | os.PathLike[str], exchange: Exchange) -> Path:
    """Return the file of this process, where all were given `path`; a folder, or one that is missing, as it is."""
    path = Path(path)
    if path.is_dir() or not path.suffix:
        return path
    return path.with_name(f"{path.stem}-{exchange.rank}-of-{exchange.ranks}{path.suffix}")
