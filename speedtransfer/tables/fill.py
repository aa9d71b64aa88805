"""First values of a table, chunk by chunk: no temporary as large as the table, the same numbers in every memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables.files import CHUNK_BYTES

# torch draws normal numbers in blocks of 16 and draws the last 16 anew where the count is no multiple of 16. With chunks
# of a multiple of 16 rows, and no short one at the end, the numbers are those of one call on the whole array.
_BLOCK_ROWS = 16


def row_chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices over ``range(num_rows)``, about 16 MB of rows each."""
    step = max(CHUNK_BYTES // max(row_bytes, 1) // _BLOCK_ROWS, 1) * _BLOCK_ROWS
    start = 0
    while start < num_rows:
        stop = start + step
        if num_rows - stop < _BLOCK_ROWS:
            stop = num_rows
        yield slice(start, stop)
        start = stop


def fill_plane(plane: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    """Call `function` with each chunk of `plane` as a CPU tensor; it fills the chunk in place or returns a new one."""
    width = plane.shape[1]
    for rows in row_chunks(plane.shape[0], width * plane.element_size()):
        target = plane[rows]
        chunk = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        result = function(chunk)
        if result is None:
            result = chunk
        elif tuple(result.shape) != tuple(chunk.shape):
            raise InvalidValueError(
                f"the initialiser returned shape {tuple(result.shape)} for a chunk of {tuple(chunk.shape)}; "
                "return one row per row of the chunk, or fill the chunk in place"
            )
        if result.data_ptr() != target.data_ptr():
            target.copy_(result)


def copy_plane(target: Tensor, source: Tensor) -> None:
    """Copy a plane in chunks, so that a conversion or a transfer needs no second whole plane."""
    for rows in row_chunks(target.shape[0], target.shape[1] * target.element_size()):
        target[rows].copy_(source[rows])


def check_floating(dtype: torch.dtype, what: str) -> None:
    """Raise `InvalidTypeError` where random numbers are asked of an integer table."""
    if not dtype.is_floating_point:
        raise InvalidTypeError(f"{what} needs a floating dtype but the table holds {dtype}; use init_(fn) for integers")
