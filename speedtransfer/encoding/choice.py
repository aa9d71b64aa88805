"""Choose the codec of a plane: by dtype, or by its name in a checkpoint."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

import torch

from speedtransfer.dtypes import FLOAT8_DTYPES, SCALE_DTYPES
from speedtransfer.encoding.codecs import BLOCK, Blocks8, Cast, Codec, Plain, RowInt8, blocks_of
from speedtransfer.encoding.float8 import BlocksFloat8
from speedtransfer.encoding.split24 import SPLIT24, Split24
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size

# What rows can be stored in: a dtype of torch, or "split24".
StorageDtype: TypeAlias = torch.dtype | Literal["split24"]
STORAGE_DTYPES: tuple[StorageDtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    *FLOAT8_DTYPES,
    SPLIT24,
)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def dtype_of(stored: StorageDtype) -> torch.dtype:
    """Return the dtype of the plane of rows that are stored so; other planes may lie beside it."""
    return torch.bfloat16 if isinstance(stored, str) else stored


def value_bytes(stored: StorageDtype) -> int:
    """Return the bytes that a value of a row takes, without its share of a scale."""
    return 3 if isinstance(stored, str) else stored.itemsize


def codec_for(width: int, computed: torch.dtype, stored: StorageDtype, scale_block: int | None = None) -> Codec:
    """Return the codec of rows that are computed in one dtype and stored in another: uint8 is `Blocks8`.

    What is in 24 bits and computed in bfloat16 is read alone: `Plain`, without the other 8.

    `scale_block`: the columns, at most, that share a scale of float8 rows; None: `BLOCK`.
    """
    if computed == dtype_of(stored):
        return Plain(width, computed)
    if isinstance(stored, str):
        return Split24(width)
    if stored == torch.int8:
        return RowInt8(width)
    if stored in FLOAT8_DTYPES:
        return BlocksFloat8(width, stored, blocks_of(width, scale_block or BLOCK))
    return Blocks8(width) if stored == torch.uint8 else Cast(width, stored)


def codec_named(name: str, width: int) -> Codec:
    """Return the codec of that `Codec.name` for rows of `width` values that are not stored plainly.

    Raises
    ------
    ValueError
        There is none.
    """
    made = [codec_for(width, torch.float32, stored) for stored in (*STORAGE_DTYPES[1:4], SPLIT24, torch.uint8)]
    size = re.search(r"-block(\d{1,18})", name)
    if size is not None:
        blocks = blocks_of(width, max(int(size[1]), 1))
        made += [BlocksFloat8(width, stored, blocks, scale) for stored in FLOAT8_DTYPES for scale in SCALE_DTYPES]
    for codec in made:
        if codec.name == name:
            return codec
    raise ValueError(f"rows are encoded as {name[:40]!r}; a later speedtransfer may read them")


def check_dtypes(dtype: torch.dtype, storage_dtype: Any, state_dtype: Any, scale_block: Any = None) -> None:
    """Raise unless rows computed in `dtype` can be stored in `storage_dtype`, and their state in `state_dtype`.

    Raises
    ------
    InvalidTypeError
    InvalidValueError
        `scale_block` is no number of columns, or rows in `storage_dtype` have no blocks.
    """
    for name, value, choices, hint in (
        ("storage_dtype", storage_dtype, STORAGE_DTYPES, ""),
        ("state_dtype", state_dtype, STATE_DTYPES, " (uint8: blocks of 8-bit floats)"),
    ):
        if value is None:
            continue
        if value not in choices:
            known = ", ".join(repr(choice) for choice in choices)
            raise InvalidTypeError(f"{name} is {value!r} but must be None or one of {known}{hint}; pass one of them")
        if dtype != torch.float32:
            raise InvalidTypeError(
                f"{name} is {value} but the rows are {dtype}, and only float32 ones are stored in another form; "
                f"leave dtype out, or {name}"
            )
    if scale_block is None:
        return
    if storage_dtype not in FLOAT8_DTYPES:
        raise InvalidValueError(
            f"scale_block is {scale_block!r} but storage_dtype is {storage_dtype}, and only float8 rows have blocks; leave it "
            "out, or pass storage_dtype=torch.float8_e4m3fn"
        )
    check_size(scale_block, "scale_block", 1)
