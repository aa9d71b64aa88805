"""The header of a safetensors file, to bytes and back with every check; the values are for the caller to stream.

The `safetensors` library wants all values in memory to write them. A header is small, so it is made here from shapes alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from speedtransfer.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from speedtransfer.errors import StorageError
from speedtransfer.untrusted import MAX_JSON_BYTES, parse_json

METADATA = "__metadata__"
# Before a number: the name of a tensor of zeros, after which the next one begins at a multiple of something.
GAP = "__gap__"
ALIGN = 64
MAX_VALUES = 2**60
_MAX_DIMS = 64


class Entry(NamedTuple):
    """What a header says of a tensor: `begin` and `end` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the header of a file that holds `tensors`, each a name, dtype and shape, one after the other."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    return header


def header_bytes(header: Mapping[str, Any], room: int = 0, align: int = ALIGN) -> bytes:
    """Return the bytes before the values: a multiple of 64, so that a mapped row is as well aligned as one in memory.

    `room`: at least so many bytes may be added to the header later. `align`: another multiple.
    """
    text = json.dumps(header).encode()
    text += b" " * (room + -(8 + len(text) + room) % align)
    return len(text).to_bytes(8, "little") + text


def is_gap(name: str) -> bool:
    """Tell whether a tensor is there to fill a gap."""
    return name.startswith(GAP) and name.removeprefix(GAP).isdecimal()


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of `file`, which is open at its first byte, and where its values begin.

    Raises
    ------
    StorageError
        The header is longer than the file, or than any header; `path` is the file's name in the message.
    ValueError, TypeError
        It is not the JSON of an object.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
        raise StorageError(f"{str(path)!r} is no .safetensors file or is truncated ({size} bytes); write it again")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    return header, 8 + length


def check_entry(entry: Mapping[str, Any]) -> Entry:
    """Return what a header says of a tensor.

    Raises
    ------
    ValueError
        Its shape does not match its bytes, or is one that no tensor has.
    KeyError, TypeError, ValueError
        Something is missing or of another kind, or the dtype is not among `SAFETENSORS_DTYPES`.
    """
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    if not whole or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} does not match its bytes")
    if math.prod(max(n, 1) for n in shape) >= MAX_VALUES or len(shape) > _MAX_DIMS:
        raise ValueError(f"{shape} is a shape that no tensor has")
    return Entry(dtype, shape, begin, end)
