"""Advise the system on maps of large files: rows are touched at random, and what a whole pass reads next.

Left to itself, Linux reads megabytes around a row that is touched, and keeps what it has read or written in order as folios
of up to 2 MB, of which all is dirty, and goes to the disk, once one row of it has changed: 1000 changed rows of a file of 1 GB
made it write 900 MB instead of 4. With the advice the page of the row is read and written, and no more. In return a pass over
the whole file reads page by page, some twenty times slower from a disk, unless it asks for its chunks by `read_ahead`.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from speedtransfer.system import physical_bytes

# From this part of the memory on. Smaller planes stay in memory, even the six of two tables that Adam trains, and are soonest
# there when megabytes are read at once. Six of this size fill three eighths of it: more dirty pages than Linux lets pile up
# (it starts to write at a tenth, and makes the program wait at a fifth), so from here on each page too many costs time.
LARGE_PART = 1 / 16
_PIECE_BYTES = 1 << 17  # Linux cuts a longer request off at the read-ahead of the disk, which is 128 kB by default
RUN_ROWS = 256  # fewer consecutive rows are no pass
_CAN_ADVISE = all(hasattr(mmap, name) for name in ("MADV_RANDOM", "MADV_WILLNEED"))

_at_random: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # where each begins


def expect_random_rows(data: np.memmap | None) -> None:
    """Tell the system that the rows of a map are touched at random, where it is large beside the memory."""
    block = None if data is None else data.base
    if _CAN_ADVISE and isinstance(block, mmap.mmap) and 0 < LARGE_PART * physical_bytes() <= len(block):
        block.madvise(mmap.MADV_RANDOM)
        _at_random[block] = np.frombuffer(block, dtype=np.uint8, count=1).ctypes.data


def read_ahead(rows: Tensor) -> None:
    """Have the system read contiguous `rows` of a plane that it otherwise reads page by page; nothing for other planes."""
    if not _at_random or rows.device.type != "cpu":
        return
    address, num_bytes = rows.data_ptr(), rows.numel() * rows.element_size()
    for reference in _at_random.keyrefs():
        block = reference()
        start = _at_random.get(block, 0) if block is not None else 0
        if block is not None and start <= address < start + len(block):
            begin = (address - start) // mmap.PAGESIZE * mmap.PAGESIZE
            end = address - start + num_bytes
            for first in range(begin, end, _PIECE_BYTES):
                block.madvise(mmap.MADV_WILLNEED, first, min(_PIECE_BYTES, end - first))


def read_ahead_of_run(planes: Iterable[Tensor], index: Tensor) -> None:
    """Read ahead where `index` (n,) is a run of consecutive rows, as in a pass through `gather`."""
    count = len(index)
    if not _at_random or count < RUN_ROWS or index.device.type != "cpu":
        return
    first, last = int(index[0]), int(index[-1])
    if last - first == count - 1:  # others that end like this lose a little time
        for plane in planes:
            read_ahead(plane[first : last + 1])
