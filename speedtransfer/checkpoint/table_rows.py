"""Planes of a table on their way into a checkpoint and out of it: raw where both sides store them alike, in chunks always."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.checkpoint.plain_data import Keep
from speedtransfer.checkpoint.reading import TensorReader
from speedtransfer.encoding import codec_named, decode_rows
from speedtransfer.rows import Rows
from speedtransfer.tables.chunks import row_chunks
from speedtransfer.tables.files import SAFE_NAMES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*SAFE_NAMES, torch.bool)}  # bool is stored as uint8


def encode_rows(store: Rows, plane: str, path: str, keep: Keep, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return what the manifest says of a plane of values `shape` and `dtype`, and have its raw parts kept."""
    parts = {part: keep(f"{path}:{part}" if part else path, raw) for part, raw in store.parts(plane).items()}
    name = str(dtype).removeprefix("torch.")
    return {"$": "rows", "encoding": store.encoding(plane), "dtype": name, "shape": list(shape), "parts": parts}


class SavedRows:
    """Rows in a checkpoint: a plane of a table, or the tensor that a dense module or its optimizer had for one.

    Parameters
    ----------
    node : dict
        What the manifest says of them.
    reader : TensorReader
        Of the file that holds them.

    Raises
    ------
    ValueError, TypeError, KeyError
        `node` is malformed, or of an encoding that this version does not know.
    """

    def __init__(self, node: dict[str, Any], reader: TensorReader) -> None:
        self._reader = reader
        if node["$"] == "tensor" and "complex" not in node:
            self.encoding, self._parts = "plain", {"": node["v"]}
            self.dtype, self.shape = reader.spec(node["v"])
        elif node["$"] == "rows":
            self.encoding, self._parts = node["encoding"], dict(node["parts"])
            self.dtype, self.shape = _DTYPES[node["dtype"]], tuple(node["shape"])
            self._check_parts()
        else:
            raise TypeError("a value where rows belong")

    def _check_parts(self) -> None:
        if not self.shape or not all(type(n) is int and 0 <= n < 2**63 for n in self.shape) or not self._parts:
            raise ValueError("rows without a shape or parts")
        if math.prod(max(n, 1) for n in self.shape) >= 2**60:
            raise ValueError("rows of a shape that no tensor has")
        width = math.prod(self.shape[1:])
        if self.encoding == "plain":
            ((dtype, shape),) = (self._reader.spec(name) for name in self._parts.values())
            good = set(self._parts) == {""} and shape[:1] == self.shape[:1] and math.prod(shape[1:]) == width
            good = good and dtype == (torch.uint8 if self.dtype == torch.bool else self.dtype)
        else:
            wanted = codec_named(str(self.encoding), width).parts
            specs = {part: self._reader.spec(name) for part, name in self._parts.items()}
            good = specs == {part: (spec.dtype, (self.shape[0], spec.width)) for part, spec in wanted.items()}
        if not good:
            raise ValueError("parts of rows that do not make up their shape")

    def _decoded(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the values ``(n, *shape[1:])`` of raw rows."""
        width = math.prod(self.shape[1:])
        values = parts[""] if self.encoding == "plain" else decode_rows(codec_named(self.encoding, width), parts)
        return values.view(len(values), *self.shape[1:]).to(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        specs = (self._reader.spec(name) for name in self._parts.values())
        return sum(math.prod(shape[1:]) * dtype.itemsize for dtype, shape in specs)

    def raw(self, rows: slice, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return some rows as they are stored, by part, in the memory that `buffers` keep from call to call."""
        return {part: self._reader.read(name, rows, buffers) for part, name in self._parts.items()}

    def values(self) -> Tensor:
        """Return all rows, for a dense parameter or its state."""
        if self.encoding == "plain":
            return self._decoded({"": self._reader.read(self._parts[""])})
        with torch.inference_mode(False):
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        buffers: dict[str, Tensor] = {}
        for rows in row_chunks(self.shape[0], self.row_bytes):
            whole[rows] = self._decoded(self.raw(rows, buffers))
        return whole

    def mapped(self) -> Tensor:
        """Return all rows to be copied from at once, without memory of their own if they are stored plainly."""
        return self._reader.mapped(self._parts[""]) if self.encoding == "plain" else self.values()

    def stored_as(self, store: Rows, plane: str) -> bool:
        """Tell whether a plane is stored just as these rows, so that the bits can be copied."""
        if self.encoding != store.encoding(plane):
            return False
        specs = {part: self._reader.spec(name) for part, name in self._parts.items()}
        return specs == {part: (raw.dtype, tuple(raw.shape)) for part, raw in store.parts(plane).items()}

    @torch.no_grad()
    def copy_into(self, store: Rows, plane: str, advance: Callable[[int], None]) -> None:
        """Write all rows into a plane of as many."""
        targets, alike = store.parts(plane), self.stored_as(store, plane)
        buffers: dict[str, Tensor] = {}  # the allocator would not always give the memory of a chunk to the next
        for rows in row_chunks(self.shape[0], self.row_bytes):
            chunk = self.raw(rows, buffers)
            if not alike:
                chunk = store.encode(plane, self._decoded(chunk))
            for part, target in targets.items():
                target[rows].copy_(chunk[part].view(target[rows].shape))
            advance((rows.stop - rows.start) * self.row_bytes)
        for target in targets.values():
            if target.is_cuda:  # engines on other streams know nothing of these copies
                torch.cuda.current_stream(target.device).synchronize()
