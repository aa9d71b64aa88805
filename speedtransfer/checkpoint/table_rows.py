"""Planes of a table on their way into a checkpoint and out of it: raw where both sides store them alike, in chunks always."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.checkpoint.plain_data import Keep
from speedtransfer.checkpoint.tensors import PickedRows, TensorReader
from speedtransfer.checkpoint.together import ShardReader
from speedtransfer.cuda import wait_until_filled
from speedtransfer.dtypes import TABLE_DTYPES, bits_of, rows_at
from speedtransfer.encoding import Part, codec_named, decode_rows
from speedtransfer.errors import InvalidValueError
from speedtransfer.optim import Handle, Sharded
from speedtransfer.ranks import Partition
from speedtransfer.ranks.partition import BUCKETS
from speedtransfer.rows import Rows
from speedtransfer.tables import read_ahead, row_chunks

# Of the rows of a table that several processes have saved: in the order of `Partition`.
LAYOUT = {"kind": "interleaved", "buckets": BUCKETS}
# Of rows that belong to ids: those of each process after those of the one before, with how many these are.
_IN_ORDER = "in order"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*TABLE_DTYPES, torch.bool)}  # bool is stored as uint8


class StoredRows:
    """Where a plan has the rows of tables from: as they are when it is written, which must be at once."""

    # Whether each process gives its own rows of a table of several, or all of them those of all.
    is_divided = True

    def plane(self, rows: Rows, name: str) -> Any:
        """Return a plane of a table for a checkpoint to keep: of rows in several tensors of files, what reads chunks.

        Of memory that processes share it is what this one writes of it.
        """
        table, stored, own = rows.table, rows.table.stored(name), rows.own
        if own is not None:
            return PickedRows(stored, own.size, own.numbers)
        # Those of the parent of a forked process are copied where they have missed steps.
        if not stored.is_meta and (table.writable or table.is_read_only):
            return table.plane(name)
        return PickedRows(stored, len(stored), slice, lambda rows: table.chunk(name, rows))

    def counters(self, rows: Rows) -> dict[str, int]:
        """Return the state of stochastic rounding, after idle rows have been written."""
        return rows.state_dict()


class Keeps(NamedTuple):
    """What takes tensors into files: those of the checkpoint, and those of which each process has a part; and the rows."""

    whole: Keep
    shard: Keep
    rows: StoredRows


class Readers(NamedTuple):
    """The same, to read them again; None: no process has saved parts."""

    whole: TensorReader
    shard: ShardReader | None


def encode_rows(handle: Handle, plane: str, path: str, keeps: Keeps, tail: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return what the manifest says of a plane of ``(*tail)`` values of `dtype` a row, and have its raw parts kept."""
    raw: dict[str, Any] = {part: keeps.rows.plane(handle.rows, plane + part) for part in handle.rows.part_specs(plane)}
    keep, layout = keeps.whole, dict[str, Any]()
    owners = handle.owners
    if isinstance(owners, Sharded) and keeps.rows.is_divided:
        sizes = owners.partition.saved_sizes
        keep = keeps.shard
        layout["layout"] = LAYOUT if sizes is None else {"kind": _IN_ORDER, "sizes": sizes}
    parts = {}
    for part, values in raw.items():
        if isinstance(values, Tensor):
            read, whole = functools.partial(_chunk, values), functools.partial(Tensor.detach, values)
            values = PickedRows(values, len(values), slice, read, mapped=whole, lock=handle.table.turn)
        parts[part] = keep(f"{path}:{part}" if part else path, values)
    name, shape = str(dtype).removeprefix("torch."), [handle.num_saved, *tail]
    encoding = handle.rows.encoding(plane)
    return {"$": "rows", "encoding": encoding, "dtype": name, "shape": shape, "parts": parts, **layout}


def _chunk(plane: Tensor, rows: slice) -> Tensor:
    chunk = plane[rows]
    read_ahead(chunk)
    return chunk


class SavedRows:
    """Rows in a checkpoint: a plane of a table, or the tensor that a dense module or its optimizer had for one.

    ValueError, TypeError or KeyError: `node`, what the manifest says of them, is malformed, or of an encoding that this
    version does not know.
    """

    def __init__(self, node: dict[str, Any], readers: Readers) -> None:
        reader: Any = readers.whole
        self.encoding, self._places = "plain", None
        if node["$"] == "tensor" and "complex" not in node:
            self._names = {"": node["v"]}
            self.dtype, self.shape = reader.spec(node["v"])
        elif node["$"] == "rows":
            self.encoding, self._names = node["encoding"], dict(node["parts"])
            self.dtype, self.shape = _DTYPES[node["dtype"]], tuple(node["shape"])
            if "layout" in node:
                in_order = node["layout"].get("kind") == _IN_ORDER
                if not in_order and node["layout"] != LAYOUT:
                    raise ValueError(f"rows in the layout {str(node['layout'])[:80]}")
                reader, self._places = readers.shard, None if in_order else Partition(self.shape[0], 1)
        else:
            raise TypeError("a value where rows belong")
        self._reader = reader
        self._width = math.prod(self.shape[1:])
        self._specs = {part: reader.spec(name) for part, name in self._names.items()}
        self.row_bytes = sum(math.prod(shape[1:]) * dtype.itemsize for dtype, shape in self._specs.values())
        if node["$"] == "rows":
            self._check()

    def _check(self) -> None:
        if not self.shape or not all(type(n) is int and 0 <= n < 2**63 for n in self.shape):
            raise ValueError("rows without a shape")
        if math.prod(max(n, 1) for n in self.shape) >= 2**60:
            raise ValueError("rows of a shape that no tensor has")
        if self.encoding == "plain":
            wanted = {"": Part(self._width, torch.uint8 if self.dtype == torch.bool else self.dtype)}
        else:
            wanted = codec_named(str(self.encoding), self._width).parts
        found = {part: (dtype, shape[:1], math.prod(shape[1:])) for part, (dtype, shape) in self._specs.items()}
        if found != {part: (spec.dtype, self.shape[:1], spec.width) for part, spec in wanted.items()}:
            raise ValueError("parts of rows that do not make up their shape")

    def _read(self, rows: slice, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return some rows as they are stored, by part, in the memory that `buffers` keep from call to call."""
        return {part: self._reader.read(name, rows, buffers) for part, name in self._names.items()}

    def _decoded(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the values ``(n, *shape[1:])`` of raw rows."""
        values = parts[""]
        if self.encoding != "plain":
            values = decode_rows(codec_named(self.encoding, self._width), parts)
        return values.view(len(values), *self.shape[1:]).to(self.dtype)

    def _ids(self, rows: slice) -> Any:
        """Return the ids of some rows, an index."""
        return rows if self._places is None else self._places.ids(torch.arange(rows.start, rows.stop, device="cpu"))

    def values(self) -> Tensor:
        """Return all rows, for a dense parameter or its state."""
        with torch.inference_mode(False):
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        buffers: dict[str, Tensor] = {}
        for rows in row_chunks(self.shape[0], self.row_bytes):
            whole[self._ids(rows)] = self._decoded(self._read(rows, buffers))
        return whole

    def mapped(self) -> Tensor:
        """Return all rows to be copied from at once, without memory of their own if they are stored plainly."""
        as_they_are = self.encoding == "plain" and not isinstance(self._reader, ShardReader)
        return self._reader.mapped(self._names[""]) if as_they_are else self.values()

    def stored_as(self, rows: Rows, plane: str) -> bool:
        """Tell whether a plane is stored just as these rows, so that the bits can be copied."""
        specs = {part: (spec.dtype, spec.width) for part, spec in rows.part_specs(plane).items()}
        ours = {part: (dtype, math.prod(shape[1:])) for part, (dtype, shape) in self._specs.items()}
        return self.encoding == rows.encoding(plane) and ours == specs

    def check_equal(self, handle: Handle) -> None:
        """Raise `InvalidValueError` unless the rows are those of a table that is only read."""
        buffers: dict[str, Tensor] = {}
        whole = None if self._places is None else self.values()
        differs = handle.rows.first_difference(
            "weight", lambda rows: self._decoded(self._read(rows, buffers)) if whole is None else whole[rows]
        )
        if differs is not None:
            raise InvalidValueError(
                f"{handle} is read in place and cannot be loaded, and row {differs} in the checkpoint is another one; open "
                "the files that the checkpoint was saved with, or copy the table (from_pretrained(table, memory='pageable'))"
            )

    @torch.no_grad()
    def copy_into(self, handle: Handle, plane: str, advance: Callable[[int], None]) -> None:
        """Write the rows into a plane of a table of as many; of a table of several processes those of this one.

        Of a table whose rows belong to ids they go where these have theirs (`Rows.placement`). Those of a delta are written
        by `apply_delta`, of all planes at a time.
        """
        if self._reader.rows_come_apart:
            return
        handle.table.end_snapshot()
        rows, placement, owners = handle.rows, handle.rows.placement, handle.owners
        targets, alike = rows.parts(plane), self.stored_as(rows, plane)
        first, count = 0, self.shape[0]
        if isinstance(owners, Sharded):
            # Rows that have been read ahead are old.
            owners.changes += 1
            if self._places is not None and placement is None:
                rank = owners.exchange.rank
                first, count = owners.partition.start(rank), owners.partition.size(rank)
        buffers: dict[str, Tensor] = {}  # the allocator would not always give the memory of a chunk to the next
        for chunk in row_chunks(count, self.row_bytes):
            picked = None
            if placement is not None and not placement.is_whole:
                picked = placement.of_rows(self._ids(chunk))
            if picked is not None and not len(picked[0]):
                # Of other processes, perhaps.
                advance((chunk.stop - chunk.start) * self.row_bytes)
                continue
            parts = self._read(slice(first + chunk.start, first + chunk.stop), buffers)
            if picked is not None:
                at, place = picked
                parts = {part: rows_at(values, at) for part, values in parts.items()}
            elif not isinstance(owners, Sharded):
                place = self._ids(chunk)
            elif self._places is not None:
                place = owners.own_rows(chunk.start, chunk.stop)
            else:
                at, place = owners.owned(torch.arange(chunk.start, chunk.stop, device="cpu"))
                parts = {part: rows_at(values, at) for part, values in parts.items()}
            if not alike:
                parts = rows.encode(plane, self._decoded(parts))
            for part, target in targets.items():
                values = parts[part].view(len(parts[part]), *target.shape[1:])
                bits_of(target)[place] = bits_of(values.to(target.device))
            advance((chunk.stop - chunk.start) * self.row_bytes)
        for target in targets.values():
            wait_until_filled(target)
