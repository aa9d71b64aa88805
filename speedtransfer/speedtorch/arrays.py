"""Arrays and indexes of any kind that NumPy takes, and their counterparts on any device, as a table takes them."""

from __future__ import annotations

import contextlib
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
    """Return the dtype that a name, a NumPy dtype or one of torch's means; raise where no table can hold it."""
    found = torch.bfloat16 if isinstance(datatype, str) and datatype == "bfloat16" else datatype
    if not isinstance(found, torch.dtype):
        with contextlib.suppress(TypeError):
            found = getattr(torch, np.dtype(datatype).name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidTypeError(f"{what} is {datatype!r}, not a dtype of a table; pass one such as 'float32'")
    stored_dtype(found)
    return found


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table that holds values, or the bits of values, of `dtype`."""
    return check_dtype(BITS.get(dtype, dtype))


def to_copy(dtype: torch.dtype, tensor: Tensor, what: str) -> Tensor:
    """Return over the memory of `tensor` what to copy to a plane of values of `dtype`.

    Raises where rows of `dtype` cannot hold the values: floats round them, integers take no floats and nothing too large.
    """
    given = tensor.dtype
    if given == dtype:
        return tensor.view(stored_dtype(dtype))
    if given.is_complex or (given.is_floating_point and not dtype.is_floating_point):
        raise InvalidTypeError(f"{what} has dtype {given} but the rows hold {dtype}; pass it .to({dtype})")
    if dtype.is_floating_point or not tensor.numel():
        return tensor
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    wide = tensor.long()  # torch compares few unsigned integers; those beyond int64 become negative
    for value in (int(wide.min()), int(wide.max())):
        value = value % 2**64 if given == torch.uint64 else value
        if not low <= value <= high:
            raise InvalidValueError(
                f"{what} has the value {value} but the rows hold {dtype}; clamp it, or choose a wider datatype"
            )
    return tensor


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
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W", "A"]))
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


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype; InvalidTypeError for bfloat16 and float8."""
    name = str(dtype).removeprefix("torch.")
    if dtype in NO_NUMPY_DTYPES:
        raise InvalidTypeError(f"NumPy has no {name}; use getTorchVar() and saveTorch(), or another datatype")
    return np.dtype(name)


def plain_index(index: Any) -> Any:
    """Return `index`, and each part of a tuple, as a tensor or array of integers or booleans, if it is one; else as it is."""
    if isinstance(index, tuple):
        return tuple(map(plain_index, index))
    if index is None or index is Ellipsis or isinstance(index, (slice, Tensor)):
        return index
    if hasattr(index, "__cuda_array_interface__"):
        return from_cuda(index)
    try:
        array = np.asarray(index)
    except TypeError as error:
        raise unreadable(error) from None
    except ValueError:  # a ragged list, of which the table speaks
        return index
    return array if array.dtype.kind in "biu" else index


def names_rows(index: Any) -> bool:
    """Say whether an index as `plain_index` returns it names whole rows, by integers or a slice."""
    if index is None or index is Ellipsis or isinstance(index, tuple):
        return False
    return getattr(index, "dtype", None) not in (torch.bool, np.bool_)


def unreadable(error: TypeError) -> InvalidTypeError:
    """Return the error for a sequence that NumPy refuses, such as one of tensors on CUDA."""
    reason = str(error).partition("\n")[0]
    return InvalidTypeError(f"indexes are not integers that NumPy can read ({reason}); pass one tensor (torch.stack)")


def for_numpy(index: Any) -> Any:
    """Return an index as NumPy takes it."""
    return index.detach().cpu().numpy() if isinstance(index, Tensor) else index


def row_numbers(index: Any, num_rows: int) -> Any:
    """Return `index` as a table takes it: a slice or mask as numbers, negative ones counted from the end if there is a row."""
    index = plain_index(index)
    if isinstance(index, slice):
        return np.arange(*index.indices(num_rows))
    if isinstance(index, np.ndarray) and index.dtype.kind != "u":
        index = torch.tensor(index if index.dtype.kind == "b" else index.astype(np.int64), device="cpu")
    if not isinstance(index, Tensor):
        return index
    if index.dtype in (torch.bool, torch.uint8):
        return _of_mask(index, num_rows)
    if not index.dtype.is_signed or index.dtype.is_floating_point or index.dtype.is_complex:
        return index
    index = index.detach().long()
    return torch.where((index < 0) & (index >= -num_rows), index + num_rows, index)


def _of_mask(index: Tensor, num_rows: int) -> Tensor:
    alike = tuple(index.shape) == (num_rows,)
    if index.dtype == torch.uint8:
        if alike and num_rows and int(index.max()) <= 1:
            raise InvalidTypeError(
                f"index is a uint8 tensor of a 0 or 1 for each of {num_rows} rows, which may be a mask or rows 0 and 1; "
                "pass index.bool() or index.long()"
            )
        return index
    if not alike:
        raise InvalidValueError(
            f"index is a boolean mask of shape {tuple(index.shape)} but there are {num_rows} rows; pass one of shape "
            f"({num_rows},), or integers"
        )
    return index.nonzero().flatten()
