"""What SpeedTorch's users index with: all that NumPy takes, and its kin on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError
from speedtransfer.speedtorch.values import from_cuda


def names_rows(indexes: Any) -> bool:
    """Say whether whole rows are named, by integers or a slice."""
    if indexes is None or indexes is Ellipsis or isinstance(indexes, (tuple, bool)):
        return False
    dtype = getattr(indexes, "dtype", None)  # of torch, NumPy or CuPy
    if dtype is not None:
        return str(dtype).removeprefix("torch.") != "bool"
    could_be = isinstance(indexes, list) and any(isinstance(one, (bool, np.bool_, list)) for one in indexes)
    return not (could_be and _is_mask(indexes))


def _is_mask(indexes: list[Any]) -> bool:
    try:
        return np.asarray(indexes).dtype.kind == "b"
    except (TypeError, ValueError):
        return False


def unfit(shape: tuple[int, ...], error: IndexError) -> RowIndexError:
    """Return the error for an index that names what is not there."""
    return RowIndexError(f"indexes do not fit data of shape {shape}: {error}; pass others")


def unreadable(error: TypeError) -> InvalidTypeError:
    """Return the error for a sequence that NumPy refuses, such as one of tensors on CUDA."""
    reason = str(error).partition("\n")[0]
    return InvalidTypeError(
        f"indexes are no integers that NumPy can read ({reason}); pass one tensor, as of torch.stack"
    )


def is_basic(index: Any) -> bool:
    """Say whether numbers and slices alone are named, for which torch has a view as NumPy has."""
    parts = index if isinstance(index, tuple) else (index,)
    return sum(part is Ellipsis for part in parts) < 2 and all(
        part is Ellipsis
        or (isinstance(part, (int, np.integer)) and not isinstance(part, bool))
        or (isinstance(part, slice) and (part.step is None or part.step > 0))
        for part in parts
    )


def for_numpy(index: Any) -> Any:
    """Return `index` with an array of CUDA on the host."""
    if hasattr(index, "__cuda_array_interface__") and not isinstance(index, Tensor):
        index = from_cuda(index)
    return index.detach().cpu().numpy() if isinstance(index, Tensor) else index


def row_numbers(index: Any, num_rows: int) -> Any:
    """Return `index` as a table takes it: a slice or mask as numbers, negative ones counted from the end if there is a row."""
    if isinstance(index, slice):
        return np.arange(*index.indices(num_rows))
    if not isinstance(index, Tensor):
        if hasattr(index, "__cuda_array_interface__"):
            index = from_cuda(index)
        else:
            try:
                array = np.asarray(index)
            except TypeError as error:
                raise unreadable(error) from None
            except ValueError:  # a ragged list, of which the table speaks
                return index
            if array.dtype.kind not in "ib" or (array.dtype.kind == "i" and (not array.size or array.min() >= 0)):
                return index
            index = torch.tensor(array if array.dtype.kind == "b" else array.astype(np.int64))
    if index.dtype in (torch.bool, torch.uint8):
        return _of_mask(index, num_rows)
    if not index.dtype.is_signed or index.dtype.is_floating_point or index.dtype.is_complex:
        return index
    if index.device.type == "cpu" and (not index.numel() or int(index.min()) >= 0):
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
