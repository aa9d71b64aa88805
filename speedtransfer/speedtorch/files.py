"""The files of SpeedTorch's users: ``.npy`` as cupy.save and numpy.save write them, and tensors of torch.save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, StorageError
from speedtransfer.speedtorch.arrays import numpy_dtype
from speedtransfer.system import replace_file
from speedtransfer.tables import PathLike, plane_chunks
from speedtransfer.untrusted import check_file, only_storage_errors, open_file


def write_npy(path: Path, tensors: list[Tensor], stacked: bool) -> None:
    """Write a tensor, or several as one array with a dimension more, chunk by chunk; an old file stays whole until the end.

    Raises `InvalidTypeError` where NumPy has no such dtype, or the tensors differ in shape or dtype.
    """
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        raise InvalidTypeError(f"a .npy file has one shape and dtype but there are {len(kinds)} kinds; use saveTorch")
    (shape, dtype) = kinds.pop()
    kind = numpy_dtype(dtype)
    fields = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
    with replace_file(path) as file:
        np.lib.format.write_array_header_1_0(file, {**fields, "shape": (len(tensors), *shape) if stacked else shape})
        for tensor in tensors:
            for rows in plane_chunks(tensor):
                if tensor[rows].numel():
                    file.write(tensor[rows].cpu().contiguous().view(torch.uint8).numpy().data.cast("B"))


def read_npy(path: PathLike, writable: bool = False) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped, no Python objects; `writable`: what is written to it goes to the file."""
    with only_storage_errors(path, "a .npy file of numbers"):
        check_file(path)
        array = np.load(path, mmap_mode="r+" if writable else "c", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise StorageError(f"{os.fspath(path)!r} is an archive of arrays, not a .npy file; save one array by itself")
    return array


def read_torch(path: PathLike) -> Any:
    """Return what torch.save wrote, on the CPU. No pickled object is run: tensors, and lists and dicts of them, are read."""
    with only_storage_errors(path, "a file of tensors by torch.save"), open_file(path) as file:
        return torch.load(file, map_location="cpu", weights_only=True)
