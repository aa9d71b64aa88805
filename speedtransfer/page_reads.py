"""Single reads of a file, compiled by numba to run without the GIL."""

from __future__ import annotations

from typing import Any

from numba import types

from speedtransfer.jit import compile_function

_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))


@compile_function
def read(descriptor: int, pages: Any, room: int, page_bytes: int) -> int:
    """Read each of `pages` into the memory at address `room`; return the bytes read."""
    total = 0
    for i in range(len(pages)):
        total += _pread(descriptor, room, page_bytes, pages[i] * page_bytes)
    return total
