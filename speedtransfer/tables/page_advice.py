"""Advise the system on maps of large files: rows are touched at random, and what a whole pass reads next.

Left to itself, Linux reads megabytes around a row that is touched, and keeps what it has read or written in order as folios
of up to 2 MB, of which all is dirty, and goes to the disk, once one row of it has changed: 1000 changed rows of a file of 1 GB
made it write 900 MB instead of 4. With the advice the page of the row is read and written, and no more. In return a pass over
the whole file reads page by page, some twenty times slower from a disk, unless it asks for its chunks by `read_ahead`. Rows in
any order are asked for by `read_ahead_of_rows`, so that the disk has many requests at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from speedtransfer.jit import compiled_module
from speedtransfer.system import physical_bytes
from speedtransfer.tables.records import span_bytes
from speedtransfer.tables.spans import Span

# From this part of the memory on. Smaller planes stay in memory, even the six of two tables that Adam trains, and are soonest
# there when megabytes are read at once. Six of this size fill three eighths of it: more dirty pages than Linux lets pile up
# (it starts to write at a tenth, and makes the program wait at a fifth), so from here on each page too many costs time.
LARGE_PART = 1 / 16
_PIECE_BYTES = 1 << 17  # Linux cuts a longer request off at the read-ahead of the disk, which is 128 kB by default
FEW_ROWS = 256  # fewer are soon read one by one
_SAMPLE = 32  # pages of a call, by which it is seen whether pages are in memory: advice for one that is costs 0.2 us
_AHEAD_PART = 1 / 8  # of the memory that one call fills ahead
_CALLS = "speedtransfer.page_calls"
_CAN_ADVISE = all(hasattr(mmap, name) for name in ("MADV_RANDOM", "MADV_WILLNEED"))

_Map = mmap.mmap | Span
_at_random: weakref.WeakKeyDictionary[_Map, int] = weakref.WeakKeyDictionary()  # where each begins


def expect_random_rows(data: np.memmap | None) -> None:
    """Tell the system that the rows of a map are touched at random, where it is large beside the memory."""
    block = None if data is None else data.base
    if isinstance(block, mmap.mmap):
        expect_random_rows_of(block, np.frombuffer(block, dtype=np.uint8, count=1).ctypes.data)


def expect_random_rows_of(block: _Map, address: int) -> None:
    """Do so for a map at `address`."""
    if _CAN_ADVISE and 0 < LARGE_PART * physical_bytes() <= len(block):
        block.madvise(mmap.MADV_RANDOM)
        _at_random[block] = address


def read_ahead(rows: Tensor) -> None:
    """Have the system read the consecutive `rows` of a plane that it otherwise reads page by page; nothing for others."""
    found = map_of(rows)
    if found is not None:
        block, start = found
        begin = rows.data_ptr() - start
        _advise(block, begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + span_bytes(rows))


def read_ahead_of_rows(planes: Sequence[Tensor], index: Tensor) -> None:
    """Have the system read the pages of the rows `index` (n,), on the host, at once, where not all are in memory.

    Otherwise each waits for the disk when its row is touched, one after the other.
    """
    if not _at_random or len(index) < FEW_ROWS or index.device.type != "cpu":
        return
    # Planes in one record share their pages.
    records: dict[int, list[Tensor]] = {}
    for plane in planes:
        records.setdefault(plane.untyped_storage().data_ptr(), []).append(plane)
    for parts in records.values():
        found = map_of(parts[0])
        if found is not None:
            block, start = found
            begin = min(plane.data_ptr() for plane in parts) - start
            end = max(plane.data_ptr() + plane[:1].nbytes for plane in parts) - start
            steps = index.numpy() * (parts[0].stride(0) * parts[0].element_size())
            _read_pages(block, start, (steps + begin) // mmap.PAGESIZE, (steps + (end - 1)) // mmap.PAGESIZE)


def _read_pages(block: _Map, start: int, first: np.ndarray, last: np.ndarray) -> None:
    """Have the system read pages `first` to `last`, both (n,), of a map that begins at address `start`."""
    sample = first[:: -(-len(first) // _SAMPLE)].tolist()
    # An index may be checked later.
    if first.min() < 0 or last.max() * mmap.PAGESIZE >= len(block) or _in_memory(start, sample):
        return
    if (first[1:] < first[:-1]).any():
        order = first.argsort()
        first, last = first[order], last[order]
    reached = np.maximum.accumulate(last)
    heads = np.flatnonzero(np.concatenate(([True], first[1:] > reached[:-1] + 1)))
    begins, ends = first[heads], np.append(reached[heads[1:] - 1], reached[-1]) + 1
    # More could push out what was read first.
    within = np.cumsum(ends - begins) * mmap.PAGESIZE <= _AHEAD_PART * physical_bytes()
    _advise_all(block, start, begins[within] * mmap.PAGESIZE, ends[within] * mmap.PAGESIZE)


def _in_memory(start: int, pages: list[int]) -> bool:
    """Tell whether all `pages` of the map at address `start` are in memory, or that is not known."""
    try:
        mincore = ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):
        return True
    found = ctypes.c_ubyte(1)
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return all(
        mincore(start + page * mmap.PAGESIZE, mmap.PAGESIZE, ctypes.byref(found)) or found.value & 1 for page in pages
    )


def map_of(rows: Tensor) -> tuple[_Map, int] | None:
    """Return the map that `rows` lie in and its address, if it is read page by page."""
    if not _at_random or rows.device.type != "cpu":
        return None
    address = rows.data_ptr()
    for reference in _at_random.keyrefs():
        block = reference()
        start = _at_random.get(block, 0) if block is not None else 0
        if block is not None and start <= address < start + len(block):
            return block, start
    return None


def _advise(block: _Map, begin: int, end: int) -> None:
    for first in range(begin, end, _PIECE_BYTES):
        block.madvise(mmap.MADV_WILLNEED, first, min(_PIECE_BYTES, end - first))


def _advise_all(block: _Map, start: int, begins: np.ndarray, ends: np.ndarray) -> None:
    """Have the system read the bytes `begins` to `ends`, both (n,), of a map at address `start`."""
    compiled_module(_CALLS).ask_for(start, begins, ends, _PIECE_BYTES, mmap.MADV_WILLNEED)
