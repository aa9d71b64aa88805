"""What counts as values: dtypes by any name, arrays of any kind, and how a table stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError
from speedtransfer.tables.planes import check_dtype
from speedtransfer.tables.rows import tensor_of

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
        raise InvalidTypeError(f"{what} is {datatype!r}, which is no dtype of a table; pass one such as 'float32'")
    stored_dtype(found)
    return found


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table that holds values, or the bits of values, of `dtype`."""
    return check_dtype(BITS.get(dtype, dtype))


def stored_as(dtype: torch.dtype, tensor: Tensor, what: str) -> Tensor:
    """Return `tensor` as a table stores values of `dtype`; floats are rounded, all else must be of it already."""
    if tensor.dtype != dtype:
        if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise InvalidTypeError(f"{what} has dtype {tensor.dtype} but the rows hold {dtype}; pass it .to({dtype})")
        tensor = tensor.to(dtype)
    return tensor.view(BITS[dtype]) if dtype in BITS else tensor


def tensor_from(value: Any, what: str) -> Tensor:
    """Return a tensor, without a gradient, over the memory of a tensor, CuPy or NumPy array, or of a sequence."""
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "__cuda_array_interface__"):
        return torch.as_tensor(value, device="cuda")
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    dtype = getattr(torch, array.dtype.name, None)
    if dtype in BITS:
        native = np.require(array, array.dtype.newbyteorder("="), ["C", "W", "A"])
        return torch.from_numpy(native.view(np.dtype(str(BITS[dtype]).removeprefix("torch.")))).view(dtype)
    return tensor_of(array, what)


def host_array(plane: Tensor) -> np.ndarray:
    """Return an array over the memory of a tensor on the host; InvalidTypeError for bfloat16."""
    if plane.dtype == torch.bfloat16:
        raise InvalidTypeError("NumPy has no bfloat16; use getTorchVar(), or another datatype")
    return plane.numpy()


def filled(plane: Tensor) -> None:
    """Wait until `plane` holds what was written by torch: engines on other streams know nothing of who wrote it."""
    if plane.is_cuda:
        torch.cuda.current_stream(plane.device).synchronize()
