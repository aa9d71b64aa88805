"""Dtypes under the names that others give them: safetensors, NumPy, and integers of the same size."""

from __future__ import annotations

import torch

from speedtransfer.errors import InvalidTypeError

# Rows move as bits, under these dtypes by size: torch and CuPy lack operations and names for many small floats and
# unsigned integers, but not for these.
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# One byte a number, of which torch computes with few: rows are decoded first.
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Of rows that may have scales.
SCALED_DTYPES = (*FLOAT8_DTYPES, torch.int8)
# Powers of two, for scales alone (torch 2.7).
FLOAT8_SCALE: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
# Of the scales beside float8 rows.
SCALE_DTYPES = (torch.float32, torch.bfloat16, *(() if FLOAT8_SCALE is None else (FLOAT8_SCALE,)))
_NAMED_FLOAT8 = {*FLOAT8_DTYPES, FLOAT8_SCALE}

# By the name in a safetensors file. First those that a table holds, then those that only checkpoints do.
_OF_TABLES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_DTYPES = {
    **_OF_TABLES,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    **({} if FLOAT8_SCALE is None else {"F8_E8M0": FLOAT8_SCALE}),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
TABLE_DTYPES = frozenset(_OF_TABLES.values())
# Of a plane beside the weights: also of scales.
PLANE_DTYPES = TABLE_DTYPES | (set() if FLOAT8_SCALE is None else {FLOAT8_SCALE})

# Of a table's dtypes, those that NumPy lacks and has.
NO_NUMPY_DTYPES = {torch.bfloat16, *FLOAT8_DTYPES}
_OF_NUMPY = [dtype for dtype in _OF_TABLES.values() if dtype not in NO_NUMPY_DTYPES]
# Whatever the default device is when this is imported.
TORCH_OF_NUMPY = {torch.empty(0, dtype=dtype, device="cpu").numpy().dtype: dtype for dtype in _OF_NUMPY}
NUMPY_OF_TORCH = {dtype: name for name, dtype in TORCH_OF_NUMPY.items()}


def check_values(tensor: torch.Tensor, name: str) -> None:
    """Raise `InvalidTypeError` unless a tensor, which errors call `name`, holds its values one beside the other."""
    if tensor.is_meta:
        raise InvalidTypeError(
            f"{name} is on the meta device, which has no values; pass a tensor on the CPU or on a GPU"
        )
    if tensor.layout != torch.strided:
        raise InvalidTypeError(f"{name} has layout {tensor.layout} but a table is dense; pass it .to_dense()")


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or its bits if it is float8, which no torch pickles, and not every torch picks rows of."""
    return tensor.view(torch.uint8) if tensor.dtype in _NAMED_FLOAT8 else tensor


def rows_at(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``tensor[index]`` for a tensor of any dtype."""
    return bits_of(tensor)[index].view(tensor.dtype)
