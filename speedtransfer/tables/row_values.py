"""Check the values of rows, and convert arrays to tensors, before anything is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import TORCH_OF_NUMPY, check_values
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables.records import span_bytes

CONVERTIBLE = {torch.float32, torch.float16, torch.bfloat16}  # into each other, by every engine


def as_rows(value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    """Return `value`, of `shape` ``(*index.shape, width)``, as a contiguous ``(n, width)`` tensor without a gradient.

    A tensor or array must have the dtype already, and a tensor the device; a sequence of numbers is converted. Errors call
    it `what`.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        Another shape, dtype or device; no numbers; numbers that `dtype` cannot hold.
    """
    if not isinstance(value, Tensor):
        tensor = tensor_of(value, what)
        # A list has no dtype of its own.
        value = (tensor if isinstance(value, np.ndarray | np.generic) else _converted(tensor, dtype, what)).to(device)
    check_rows(value, shape, dtype, device, what)
    return value.detach().reshape(math.prod(shape[:-1]), shape[-1]).contiguous()


def check_rows(rows: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raise `InvalidValueError` or `InvalidTypeError` unless `rows` is a tensor of `shape` and `dtype` on `device`."""
    if not isinstance(rows, Tensor):
        raise InvalidTypeError(f"{what} is a {type(rows).__name__} but must be a tensor; pass torch.from_numpy({what})")
    if tuple(rows.shape) != shape:
        raise InvalidValueError(f"{what} has shape {tuple(rows.shape)} but index and table ask for {shape}; reshape it")
    if rows.dtype != dtype:
        raise InvalidTypeError(f"{what} has dtype {rows.dtype} but the plane holds {dtype}; pass it .to({dtype})")
    if rows.device != device:
        raise InvalidValueError(
            f"{what} is on {rows.device} but the table computes on {device}; pass it .to('{device}')"
        )
    check_values(rows, what)


def check_conversion(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of rows outside of a plane of dtype `stored`; InvalidTypeError where it cannot be `wanted`."""
    if wanted is None or wanted == stored:
        return stored
    if not isinstance(wanted, torch.dtype) or not {stored, wanted} <= CONVERTIBLE:
        raise InvalidTypeError(
            f"dtype is {wanted} but the plane holds {stored}; float32, float16 and bfloat16 are converted on the way, for "
            "others convert the rows: .to(dtype)"
        )
    return wanted


def tensor_of(array: Any, what: str = "array") -> Tensor:
    """Return a tensor over the memory of `array` where torch can have one: writable, native byte order, positive strides.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        It holds no floats or integers, or is a ragged sequence.
    """
    try:
        array = np.asarray(array)
    except ValueError:
        raise InvalidValueError(f"{what} is a ragged sequence but needs one shape; make all rows as long") from None
    native = array.dtype.newbyteorder("=")
    if native not in TORCH_OF_NUMPY:
        raise InvalidTypeError(f"{what} has dtype {array.dtype} but a table holds floats or integers; convert it first")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable and array.dtype.isnative):
        array = np.array(array, dtype=native, order="C")
    with torch.inference_mode(False):  # an inference tensor could never be trained
        return torch.from_numpy(array)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors may share memory: one engine raises there, another would read what it just wrote."""
    # Whatever the devices: a CUDA view of page-locked memory has the address of the host.
    (start_a, stop_a), (start_b, stop_b) = ((t.data_ptr(), t.data_ptr() + span_bytes(t)) for t in (a, b))
    return start_a < stop_b and start_b < stop_a


def _converted(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    converted = tensor.to(dtype)
    if dtype.is_floating_point:
        return converted
    wrong = (converted != tensor).nonzero()
    if len(wrong):
        value = tensor[tuple(wrong[0])].item()
        raise InvalidValueError(
            f"{what} has the value {value} but the plane holds {dtype}; round and clamp it, or use a wider dtype"
        )
    return converted
