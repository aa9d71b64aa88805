"""Fill and copy planes chunk by chunk: no temporary as large as a plane, the same random numbers in every memory."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from speedtransfer.dtypes import FLOAT8_DTYPES, FLOAT8_SCALE
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables.page_advice import read_ahead

# torch draws normal numbers in blocks of 16 and draws the last 16 anew where the count is no multiple of 16. With chunks
# of a multiple of 16 rows, and no short one at the end, the numbers are those of one call on the whole array.
_BLOCK_ROWS = 16
CHUNK_BYTES = 1 << 24


def row_chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices over ``range(num_rows)``, CHUNK_BYTES (16 MB) of rows each."""
    step = max(CHUNK_BYTES // max(row_bytes, 1) // _BLOCK_ROWS, 1) * _BLOCK_ROWS
    start = 0
    while start < num_rows:
        stop = start + step
        if num_rows - stop < _BLOCK_ROWS:
            stop = num_rows
        yield slice(start, stop)
        start = stop


def plane_chunks(*planes: Tensor) -> Iterator[slice]:
    """Yield slices over the rows of `planes`, about 16 MB of the first, and have the system read them ahead in all."""
    for rows in row_chunks(planes[0].shape[0], planes[0][:1].nbytes):
        for plane in planes:
            read_ahead(plane[rows])
        yield rows


@torch.no_grad()  # the plane must never get a gradient of its own
def fill_plane(plane: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    """Call `function` with each chunk of `plane` as a CPU tensor; it fills the chunk in place or returns a new one."""
    for rows in plane_chunks(plane):
        target = plane[rows]
        # What is drawn depends on the strides.
        chunk = target.contiguous() if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        result = function(chunk)
        if result is None:
            result = chunk
        elif not isinstance(result, Tensor):
            result = torch.as_tensor(result, device="cpu")  # whatever the default device is
        if tuple(result.shape) != tuple(chunk.shape):
            raise InvalidValueError(
                f"the initialiser returned shape {tuple(result.shape)} for a chunk of {tuple(chunk.shape)}; "
                "return one row per row of the chunk, or fill the chunk in place"
            )
        if result is not target:
            target.copy_(result)


@torch.no_grad()
def set_plane(plane: Tensor, value: float | Tensor) -> None:
    """Set all rows of a plane to a number, or to a ``(width,)`` row."""
    # By a copy from the host: devices do not fill all dtypes.
    row = value if isinstance(value, Tensor) else torch.full((1,), value, dtype=plane.dtype, device="cpu")
    for rows in plane_chunks(plane):
        plane[rows].copy_(row)


@torch.no_grad()
def copy_plane(target: Tensor, source: Tensor) -> None:
    """Copy a plane in chunks, so that a conversion or a transfer needs no second whole plane."""
    for rows in plane_chunks(target, source):
        target[rows].copy_(source[rows])


def check_fill(fill: object, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raise unless `fill` is a tensor of `shape`, or a number that `dtype` holds."""
    if isinstance(fill, Tensor):
        if tuple(fill.shape) != shape:
            raise InvalidValueError(
                f"fill has shape {tuple(fill.shape)} but the plane is {shape}; reshape or expand it"
            )
    elif not isinstance(fill, numbers.Real):
        raise InvalidTypeError(f"fill is a {type(fill).__name__} but must be a number or a tensor; pass one of them")
    elif not dtype.is_floating_point and not float(fill).is_integer():
        raise InvalidValueError(f"fill is {fill} but the plane holds {dtype}; pass a whole number or a floating dtype")
    elif dtype == FLOAT8_SCALE and math.frexp(float(fill))[0] != 0.5:
        raise InvalidValueError(f"fill is {fill} but the plane holds {dtype}, powers of two alone; pass 1.0, say")


def check_floating(dtype: torch.dtype, what: str) -> None:
    """Raise `InvalidTypeError` where random numbers are asked of a table of integers or float8, which torch draws none of."""
    if not dtype.is_floating_point:
        raise InvalidTypeError(f"{what} needs a floating dtype but the table holds {dtype}; use init_(fn) for integers")
    if dtype in FLOAT8_DTYPES:
        raise InvalidTypeError(
            f"{what} draws no {dtype}; use init_(fn) with a function that returns float32, or make a module with "
            f"storage_dtype={dtype} in place of dtype"
        )
