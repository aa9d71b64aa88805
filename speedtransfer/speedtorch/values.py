"""What counts as values: dtypes by any name, arrays of any kind, and how a table stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import NO_NUMPY_DTYPES
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import check_dtype, tensor_of

# What no table has is stored as the bits that it is.
BITS = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def dtype_of(datatype: Any, what: str = "datatype") -> torch.dtype:
    """Return the dtype that a name, a NumPy dtype or one of torch's means.

    Raises
    ------
    InvalidTypeError
        There is no such dtype, or no table can hold it.
    """
    found = datatype
    if not isinstance(datatype, torch.dtype):
        try:
            found = getattr(torch, np.dtype(datatype).name, None)
        except TypeError:
            found = None
        if datatype == "bfloat16":
            found = torch.bfloat16
    if not isinstance(found, torch.dtype):
        raise InvalidTypeError(f"{what} is {datatype!r}, not a dtype of a table; pass one such as 'float32'")
    stored_dtype(found)
    return found


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table that holds values, or the bits of values, of `dtype`."""
    return check_dtype(BITS.get(dtype, dtype))


def to_copy(dtype: torch.dtype, tensor: Tensor, what: str) -> Tensor:
    """Return over the memory of `tensor` what to copy to a plane of values of `dtype`.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        Rows of `dtype` cannot hold the values: floats round them, integers take no floats and nothing too large.
    """
    if tensor.dtype == dtype:
        return tensor.view(stored_dtype(dtype))
    _check_values(dtype, tensor, what)
    return tensor


def _check_values(dtype: torch.dtype, tensor: Tensor, what: str) -> None:
    given = tensor.dtype
    if dtype.is_floating_point and not given.is_complex:
        return
    if given.is_floating_point or given.is_complex:
        raise InvalidTypeError(f"{what} has dtype {given} but the rows hold {dtype}; pass it .to({dtype})")
    low, high = _limits(dtype)
    if not tensor.numel() or (low <= _limits(given)[0] and _limits(given)[1] <= high):
        return
    wide = tensor.long()  # torch compares few unsigned integers
    least, most = int(wide.min()), int(wide.max())
    if given == torch.uint64:
        low = 0  # a larger one than int64 has
    if least < low or most > high:
        value = least if least < low else most
        raise InvalidValueError(
            f"{what} has the value {value % 2**64 if given == torch.uint64 else value} but the rows hold {dtype}; clamp it, "
            "or choose a wider datatype"
        )


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def stored_as(dtype: torch.dtype, tensor: Tensor, what: str) -> Tensor:
    """Return `tensor` as a table stores values of `dtype`: over its memory where it is of that, else converted."""
    return to_copy(dtype, tensor, what).to(stored_dtype(dtype))


def tensor_from(value: Any, what: str) -> Tensor:
    """Return a tensor, without a gradient, over the memory of a tensor, CuPy or NumPy array, or of a sequence."""
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "__cuda_array_interface__"):
        return from_cuda(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.asarray(None)
    dtype = getattr(torch, array.dtype.name, None)
    if dtype in BITS:
        native = np.require(array, array.dtype.newbyteorder("="), ["C", "W", "A"])
        return torch.from_numpy(native.view(np.dtype(str(BITS[dtype]).removeprefix("torch.")))).view(dtype)
    return tensor_of(array, what)


def from_cuda(array: Any) -> Tensor:
    """Return a tensor over the memory of a CuPy array, or a copy where it runs backwards, once that is filled."""
    if min(array.__cuda_array_interface__.get("strides") or (0,)) < 0:  # no tensor has such
        array = array.copy()
    wait_for(array)
    return torch.as_tensor(array, device="cuda")


def wait_for(array: Any) -> None:
    """Wait for what CuPy's current stream, which its arrays name, was given so far."""
    pointer = array.__cuda_array_interface__.get("stream")
    if pointer is not None:  # 1 is the default stream, which torch has by another number
        (torch.cuda.ExternalStream(pointer) if pointer > 1 else torch.cuda.default_stream()).synchronize()


def host_array(plane: Tensor) -> np.ndarray:
    """Return an array over the memory of a tensor on the host; InvalidTypeError for bfloat16 and float8."""
    if plane.dtype in NO_NUMPY_DTYPES:
        name = str(plane.dtype).removeprefix("torch.")
        raise InvalidTypeError(f"NumPy has no {name}; use getTorchVar(), or another datatype")
    return plane.numpy()
