"""Ask the system for many pages, or read them, compiled by numba; whoever needs that imports this first then.

Without the GIL: the system makes whoever asks wait while the queue of the disk is full, and Python's own `mmap.madvise` would
have all other threads wait too.
"""

from __future__ import annotations

from typing import Any

from numba import types

from speedtransfer.jit import compile_function

_madvise = types.ExternalFunction("madvise", types.int32(types.int64, types.int64, types.int32))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))


@compile_function
def ask_for(address: int, begins: Any, ends: Any, piece: int, advice: int) -> None:
    """Call ``madvise`` for the bytes ``begins[i]`` to ``ends[i]`` behind `address`, a `piece` at a time."""
    for i in range(len(begins)):
        for first in range(begins[i], ends[i], piece):
            _madvise(address + first, min(piece, ends[i] - first), advice)


@compile_function
def read(descriptor: int, pages: Any, room: int, page_bytes: int) -> int:
    """Read each of `pages` of a file into the memory at address `room`; return the bytes read."""
    total = 0
    for i in range(len(pages)):
        total += _pread(descriptor, room, page_bytes, pages[i] * page_bytes)
    return total
