"""Tables in files: `.npy` and `.safetensors`, read and written in chunks or mapped in place.

The rows stream after a header. They begin at a multiple of 64 bytes, so that a mapped row is as well aligned as one in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from speedtransfer import safetensors_io
from speedtransfer.dtypes import NUMPY_OF_TORCH, SAFETENSORS_DTYPES, TABLE_DTYPES, TORCH_OF_NUMPY
from speedtransfer.errors import InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError, suggest
from speedtransfer.system import replace_file

_MAX_SIZE = 2**63 - 1


def check_suffix(path: Path, dtype: torch.dtype) -> None:
    """Raise where the format that `path` names by its suffix does not exist or cannot hold `dtype`."""
    if path.suffix not in (".npy", ".safetensors"):
        raise InvalidValueError(
            f"path {str(path)!r} ends in {path.suffix!r} but a table is .npy or .safetensors; rename it"
        )
    if path.suffix == ".npy" and dtype not in NUMPY_OF_TORCH:
        raise InvalidTypeError(f"{dtype} has no .npy form (path {str(path)!r}); use a path that ends in .safetensors")


def _header(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> bytes:
    check_suffix(path, dtype)
    if path.suffix == ".npy":
        buffer = BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(NUMPY_OF_TORCH[dtype]), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, fields)  # pads to 64 bytes by itself
        return buffer.getvalue()
    return safetensors_io.header_bytes(safetensors_io.make_header([("weight", dtype, shape)]))


def create(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Create the file of a zeroed table at `path`, which must not exist. Instant: unwritten rows take no disk."""
    header = _header(path, shape, dtype)
    with open(path, "xb") as file:
        try:
            file.write(header)
            file.truncate(len(header) + math.prod(shape) * dtype.itemsize)
        except BaseException:
            path.unlink()
            raise


def write(path: Path, rows: Iterator[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Write CPU `rows` (chunks of a ``shape`` table, in order) to `path`: the old file stays whole until the new one is."""
    header = _header(path, shape, dtype)
    with replace_file(path) as file:
        file.write(header)
        for chunk in rows:
            if chunk.numel():
                file.write(chunk.contiguous().view(torch.uint8).numpy().data.cast("B"))


def read_header(path: Path, key: str | None = None) -> tuple[torch.dtype, tuple[int, int], int]:
    """Return dtype, shape and data offset in bytes of the 2-D array in the file at `path` (tensor `key` of safetensors).

    Raises
    ------
    StorageError
        The file is missing, truncated, or no such file.
    InvalidValueError
        It holds no 2-D array, or several tensors and `key` names none of them.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix == ".npy":
                dtype, shape, offset = _read_npy(file)
            elif path.suffix == ".safetensors":
                dtype, shape, offset = _read_safetensors(file, path, key)
            else:
                check_suffix(path, torch.float32)
    except SpeedtransferError:  # first: some are an OSError as well
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); check the path") from error
    except Exception as error:  # whatever the parsers of JSON and of Python literals throw at rubbish
        what = " ".join(str(error).split()) or type(error).__name__
        raise StorageError(f"{str(path)!r} is no valid {path.suffix} file ({what}); write it again") from error
    if len(shape) != 2:
        raise InvalidValueError(f"{str(path)!r} holds an array of shape {shape} but a table is 2-D; reshape it first")
    if min(shape) < 0 or max(shape) > _MAX_SIZE:
        raise StorageError(f"{str(path)!r} has a header of shape {shape}, which no array has; write it again")
    need = offset + math.prod(shape) * dtype.itemsize
    if need > size:
        raise StorageError(f"{str(path)!r} is truncated: {size} bytes, but its header promises {need}; write it again")
    return dtype, (shape[0], shape[1]), offset


def _read_npy(file: BinaryIO) -> tuple[torch.dtype, tuple[int, ...], int]:
    version = np.lib.format.read_magic(file)
    if version not in [(1, 0), (2, 0), (3, 0)]:
        raise ValueError(f"format version {version[0]}.{version[1]}")
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    if fortran:
        raise InvalidValueError(f"{file.name!r} is in Fortran order but rows must be contiguous; save a C-ordered copy")
    if dtype not in TORCH_OF_NUMPY:
        raise InvalidTypeError(f"{file.name!r} holds {dtype} but a table holds floats or integers; convert it first")
    return TORCH_OF_NUMPY[dtype], shape, file.tell()


def _read_safetensors(file: BinaryIO, path: Path, key: str | None) -> tuple[torch.dtype, tuple[int, ...], int]:
    header, offset = safetensors_io.read_header(file, path)
    names = [name for name in header if name != safetensors_io.METADATA]
    if key is None:
        key = names[0] if len(names) == 1 else "weight"
    if key not in names:
        raise InvalidValueError(f"{str(path)!r} has no tensor {key!r}{suggest(key, names or ['none'])} (argument key)")
    kind = header[key]["dtype"]
    if SAFETENSORS_DTYPES.get(kind) not in TABLE_DTYPES:
        raise InvalidTypeError(f"tensor {key!r} of {str(path)!r} is {kind}; a table holds floats or integers")
    dtype, shape, begin, _ = safetensors_io.check_entry(header[key])
    return dtype, shape, offset + begin


def open_mapped(path: Path, writable: bool, key: str | None = None) -> tuple[Tensor, np.memmap | None]:
    """Return the table at `path` as a tensor over the mapped file, and the map; `writable`: changes go to the file."""
    dtype, shape, offset = read_header(path, key)
    try:
        # "c" maps privately: torch wants writable memory, and the file stays as it is.
        return map_tensor(path, offset, shape, dtype, "r+" if writable else "c")
    except OSError as error:
        raise StorageError(f"cannot map {str(path)!r} ({error.strerror}); check that you may write to it") from error


def map_tensor(
    file: Path | BinaryIO, offset: int, shape: tuple[int, ...], dtype: torch.dtype, mode: Literal["r+", "c"]
) -> tuple[Tensor, np.memmap | None]:
    """Return a tensor over a part of a file, and the map, which is None where there is nothing to map."""
    num_bytes = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):  # an inference tensor could never be trained
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu"), None
        data = np.memmap(file, np.uint8, mode, offset, (num_bytes,))
        return torch.from_numpy(data.view(np.ndarray)).view(dtype).view(shape), data
