"""Row copies on the host compiled by numba; `host` imports this once rows are worth it.

Two things that torch's copies do not do: rows are asked for some rows ahead, so that several cache misses are under way at
once; and long results are written past the cache ("streaming"), which saves reading every line before it is overwritten.

The copies move rows ``start`` to ``stop``, without the GIL. They are called as
``copy(plane, stride_bytes, rows, row_bytes, num_rows, index, fault, start, stop)``: the address of the plane's first row, the
distance of its rows, the address of the dense rows, the width of both, the rows of the plane, and the ids as an int64 array.
An id that is no row moves nothing and sets `fault`, two int64, to its place and itself: whatever has been checked before,
somebody may change the index meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from speedtransfer.jit import compile_function

LINE_BYTES = 64  # of the cache; also the widest vector
_LINES_AHEAD = 64  # cache lines asked for ahead, over all rows
_LINES_OF_A_ROW = 16  # the processor prefetches the rest of a longer row by itself

_BYTE_POINTER, _INT32 = ir.IntType(8).as_pointer(), ir.IntType(32)


def _mover(num_bytes: int, align: int, streaming: bool) -> Any:
    """Return a function (to, from: addresses) that copies `num_bytes` by one load and one store."""

    @intrinsic
    def move(typing_context: Any, to: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
            word = ir.VectorType(ir.IntType(8), num_bytes) if num_bytes > 8 else ir.IntType(8 * num_bytes)
            value = builder.load(builder.inttoptr(args[1], word.as_pointer()), align=1)
            store = builder.store(value, builder.inttoptr(args[0], word.as_pointer()), align=align)
            if streaming:
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))

        return types.void(types.int64, types.int64), generate

    return move


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at `address` (int64), without waiting for it; any address may be given."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], _BYTE_POINTER), read, keep, data])

    return types.void(types.int64), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
        builder.fence("seq_cst")

    return types.void(), generate


_move_1, _move_2, _move_4, _move_8 = (_mover(size, 1, False) for size in (1, 2, 4, 8))
_move_16, _move_64 = (_mover(size, 1, False) for size in (16, 64))
_stream_64 = _mover(LINE_BYTES, LINE_BYTES, True)


@njit(inline="always")
def _copy_any(to: int, source: int, num_bytes: int) -> None:
    """Copy a row of any width and alignment."""
    done = 0
    while done + 64 <= num_bytes:
        _move_64(to + done, source + done)
        done += 64
    while done + 16 <= num_bytes:
        _move_16(to + done, source + done)
        done += 16
    if num_bytes & 8:
        _move_8(to + done, source + done)
        done += 8
    if num_bytes & 4:
        _move_4(to + done, source + done)
        done += 4
    if num_bytes & 2:
        _move_2(to + done, source + done)
        done += 2
    if num_bytes & 1:
        _move_1(to + done, source + done)


@njit(inline="always")
def _ask_for(plane: int, stride_bytes: int, row_bytes: int, index: Any, j: int, stop: int) -> None:
    """Prefetch the row that is due a while after row `j`."""
    # As many as a row covers where it begins furthest from the start of a line: the lowest bit set is how it is aligned.
    bits = plane | stride_bytes | LINE_BYTES
    lines = min((2 * LINE_BYTES - 1 - (bits & -bits) + row_bytes) // LINE_BYTES, _LINES_OF_A_ROW)
    ahead = max(2, min(64, _LINES_AHEAD // max(1, lines)))
    if j + ahead < stop:
        coming = plane + index[j + ahead] * stride_bytes
        for line in range(lines):
            prefetch(coming + line * LINE_BYTES)


@njit(inline="always")
def _row_at(index: Any, j: int, num_rows: int, fault: Any) -> int:
    """Return the row that is number `j` of the index; -1, noted as the fault, if it has been changed to one that is none."""
    row = index[j]
    if np.uint64(row) < np.uint64(num_rows):
        return row
    fault[0], fault[1] = j, row
    return -1


@compile_function
def gather(
    plane: int,
    stride_bytes: int,
    rows: int,
    row_bytes: int,
    num_rows: int,
    index: Any,
    fault: Any,
    start: int,
    stop: int,
) -> None:
    """Fill dense rows of any width and alignment."""
    for j in range(start, stop):
        _ask_for(plane, stride_bytes, row_bytes, index, j, stop)
        row = _row_at(index, j, num_rows, fault)
        if row < 0:
            continue
        _copy_any(rows + j * row_bytes, plane + row * stride_bytes, row_bytes)


@compile_function
def gather_streaming_lines(
    plane: int,
    stride_bytes: int,
    rows: int,
    row_bytes: int,
    num_rows: int,
    index: Any,
    fault: Any,
    start: int,
    stop: int,
) -> None:
    """Fill dense rows, `rows` and `row_bytes` being multiples of a cache line, past the cache."""
    for j in range(start, stop):
        _ask_for(plane, stride_bytes, row_bytes, index, j, stop)
        row = _row_at(index, j, num_rows, fault)
        if row < 0:
            continue
        to, source = rows + j * row_bytes, plane + row * stride_bytes
        for done in range(0, row_bytes, LINE_BYTES):
            _stream_64(to + done, source + done)
    _fence()  # streaming stores are not ordered with others: finish them before returning


@compile_function
def scatter(
    plane: int,
    stride_bytes: int,
    rows: int,
    row_bytes: int,
    num_rows: int,
    index: Any,
    fault: Any,
    start: int,
    stop: int,
) -> None:
    """Write dense rows of any width and alignment to the plane."""
    for j in range(start, stop):
        _ask_for(plane, stride_bytes, row_bytes, index, j, stop)
        row = _row_at(index, j, num_rows, fault)
        if row < 0:
            continue
        _copy_any(plane + row * stride_bytes, rows + j * row_bytes, row_bytes)


@compile_function
def scatter_streaming_lines(
    plane: int,
    stride_bytes: int,
    rows: int,
    row_bytes: int,
    num_rows: int,
    index: Any,
    fault: Any,
    start: int,
    stop: int,
) -> None:
    """Write dense rows, `plane`, `stride_bytes` and `row_bytes` being multiples of a cache line, past the cache."""
    for j in range(start, stop):
        row = _row_at(index, j, num_rows, fault)
        if row < 0:
            continue
        to, source = plane + row * stride_bytes, rows + j * row_bytes
        for done in range(0, row_bytes, LINE_BYTES):
            _stream_64(to + done, source + done)
    _fence()
