"""Make the array of a table's file longer in place: the file first, then its header, so that it is whole at any moment."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from speedtransfer import safetensors_io
from speedtransfer.dtypes import NUMPY_OF_TORCH
from speedtransfer.errors import StorageError
from speedtransfer.tables import files
from speedtransfer.untrusted import open_file, storage_error


class LongerFile(NamedTuple):
    """What it takes to make a file longer.

    Attributes
    ----------
    path : Path
    offset : int
        Where the values begin.
    end : int
        Where they end so far.
    size : int
        Of the file with all rows.
    header : bytes
        What is written at byte `at`, on one page, for the new number of rows to hold.
    at : int
    """

    path: Path
    offset: int
    end: int
    size: int
    header: bytes
    at: int

    def lengthen(self) -> None:
        """Add zeroed rows to the file, which its header does not show yet."""
        with open_file(self.path, "r+b") as file:
            # Bytes that belong to no row are not to become one.
            if os.fstat(file.fileno()).st_size > self.end:
                file.truncate(self.end)
            file.truncate(self.size)

    def shorten(self) -> None:
        """Take away again what the header does not show."""
        with contextlib.suppress(OSError, StorageError), open_file(self.path, "r+b") as file:
            if file.seek(self.at) == self.at and file.read(len(self.header)) != self.header:
                file.truncate(self.end)

    def show(self) -> None:
        """Write the header: a process that is killed has written all of it, or nothing."""
        with open_file(self.path, "r+b") as file:
            file.seek(self.at)
            file.write(self.header)


def plan_growth(path: Path, key: str | None, num_rows: int) -> LongerFile:
    """Return how the table in the file at `path` (tensor `key` of several) gets `num_rows` rows.

    Raises
    ------
    StorageError
        The file is not one any more, another tensor follows the rows, or the header has no room for a longer number.
    """
    header = files.open_header(path)
    stored = files.find_tensor(path, header, key)
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    end, size = stored.offset + stored.shape[0] * row_bytes, stored.offset + num_rows * row_bytes
    with storage_error(f"cannot read {str(path)!r}", "check the path"), open_file(path) as file:
        before = file.read(header.offset)
    if header.array is not None:
        after = _npy_header(before, (num_rows, *stored.shape[1:]), stored)
    else:
        ends = [safetensors_io.check_entry(entry).end for entry in header.tensors.values()]
        if header.offset + max(ends) > end:
            _refuse(path, "other tensors follow its rows")
        after = _safetensors_header(before, header, key, num_rows, size - header.offset)
    if len(after) > len(before):
        _refuse(path, "its header has no room for a longer number")
    after += b" " * (len(before) - len(after))
    if header.array is not None:
        after = after[:-1] + b"\n"
    changed = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] or [0]
    first, last = changed[0], changed[-1]
    if first // mmap.PAGESIZE != last // mmap.PAGESIZE:
        _refuse(path, "its header is longer than a page, and could not be changed at once")
    return LongerFile(path, stored.offset, end, size, after[first : last + 1], first)


def _npy_header(before: bytes, shape: tuple[int, ...], stored: files.Stored) -> bytes:
    # The magic string, the version, and the length of the rest in 2 bytes or 4.
    prefix = 10 if before[6] == 1 else 12
    fields = {
        "descr": np.lib.format.dtype_to_descr(NUMPY_OF_TORCH[stored.dtype]),
        "fortran_order": False,
        "shape": shape,
    }
    return before[:prefix] + f"{fields!r}".encode("latin1") + b"\n"


def _safetensors_header(before: bytes, header: files.Header, key: str | None, num_rows: int, end: int) -> bytes:
    names = list(header.tensors)
    name = key if key is not None else names[0] if len(names) == 1 else "weight"
    text = json.loads(before[8:])
    entry = text[name]
    entry["shape"][0], entry["data_offsets"][1] = num_rows, end
    spaced, dense = (json.dumps(text, ensure_ascii=False, separators=s).encode() for s in (None, (",", ":")))
    return before[:8] + (spaced if len(spaced) + 8 <= len(before) else dense)


def _refuse(path: Path, why: str) -> NoReturn:
    raise StorageError(
        f"{str(path)!r} cannot get more rows, as {why}; save the table with max_rows to another file, which can "
        "(Table.load(path, memory='pageable', max_rows=...).save(other)), or make it with max_rows"
    )
