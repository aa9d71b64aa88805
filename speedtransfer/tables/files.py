"""Tables in files: `.npy` and `.safetensors`, read and written in chunks or mapped in place.

The rows stream after a header. They begin at a multiple of 64 bytes, so that a mapped row is as well aligned as one in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer import safetensors_io
from speedtransfer.dtypes import FLOAT8_SCALE, NUMPY_OF_TORCH, SAFETENSORS_DTYPES, TABLE_DTYPES, TORCH_OF_NUMPY
from speedtransfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    SpeedtransferError,
    StorageError,
    describe_ending,
    suggest,
)
from speedtransfer.system import replace_file
from speedtransfer.tables.chunks import row_chunks
from speedtransfer.untrusted import open_file, storage_error

_MAX_SIZE = 2**63 - 1
# The number of rows and the end of the values may become that much longer in a header of safetensors.
GROWTH_BYTES = 2 * len(str(_MAX_SIZE))


def check_suffix(path: Path, dtype: torch.dtype) -> None:
    """Raise where the format that `path` names by its suffix does not exist or cannot hold `dtype`."""
    if path.suffix not in (".npy", ".safetensors"):
        raise InvalidValueError(
            f"path {str(path)!r} {describe_ending(path)} but a table is .npy or .safetensors; rename it"
        )
    if path.suffix == ".npy" and dtype not in NUMPY_OF_TORCH:
        raise InvalidTypeError(f"{dtype} has no .npy form (path {str(path)!r}); use a path that ends in .safetensors")


def _header(path: Path, shape: tuple[int, int], dtype: torch.dtype, grows: bool = False) -> bytes:
    check_suffix(path, dtype)
    if path.suffix == ".npy":
        buffer = BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(NUMPY_OF_TORCH[dtype]), "fortran_order": False, "shape": shape}
        # Pads to 64 bytes by itself, and leaves room for any number of rows.
        np.lib.format.write_array_header_1_0(buffer, fields)
        return buffer.getvalue()
    return safetensors_io.header_bytes(
        safetensors_io.make_header([("weight", dtype, shape)]), GROWTH_BYTES if grows else 0
    )


def create(path: Path, shape: tuple[int, int], dtype: torch.dtype, grows: bool = False) -> None:
    """Create the file of a zeroed table at `path`, which must not exist. Instant: unwritten rows take no disk.

    `grows`: its header has room for more rows.
    """
    header = _header(path, shape, dtype, grows)
    with open(path, "xb") as file:
        try:
            file.write(header)
            file.truncate(len(header) + math.prod(shape) * dtype.itemsize)
        except BaseException:
            path.unlink()
            raise


# Name, dtype and shape of a tensor, and its rows in chunks on the CPU.
Written = tuple[str, torch.dtype, tuple[int, ...], Iterator[Tensor]]


def write(path: Path, tensors: list[Written], metadata: Mapping[str, str] | None = None, grows: bool = False) -> None:
    """Write tensors to `path`, only the first to a .npy file: the old file stays whole until the new one is.

    One tensor without `metadata` is called "weight" in any case; `grows` is as for `create`, with such a one.
    """
    (_, dtype, shape, _), *others = tensors
    header = _header(path, (shape[0], shape[1]), dtype, grows)
    if others or metadata:
        header = safetensors_io.header_bytes(safetensors_io.make_header([written[:3] for written in tensors], metadata))
    with replace_file(path) as file:
        file.write(header)
        for *_, chunks in tensors:
            for chunk in chunks:
                if chunk.numel():
                    file.write(chunk.contiguous().view(torch.uint8).numpy().data.cast("B"))


def in_chunks(name: str, tensor: Tensor) -> Written:
    """Return a tensor as `write` takes it, a few rows at a time."""
    rows = row_chunks(len(tensor), tensor[:1].nbytes)
    return name, tensor.dtype, tuple(tensor.shape), (tensor[part] for part in rows)


class Header(NamedTuple):
    """What a file says of its tensors.

    Attributes
    ----------
    size : int
        Bytes of the file.
    offset : int
        Where the values begin.
    tensors : dict
        The entries of a safetensors header by name.
    array : tuple, optional
        Dtype and shape of the array of a .npy file.
    metadata : dict
        What else a safetensors header says.
    """

    size: int
    offset: int
    tensors: dict[str, Any]
    array: tuple[torch.dtype, tuple[int, ...]] | None = None
    metadata: Any = None


class Stored(NamedTuple):
    """A tensor in a file: its values begin at byte `offset`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path, key: str | None = None) -> tuple[torch.dtype, tuple[int, int], int]:
    """Return dtype, shape and data offset in bytes of the 2-D array in the file at `path` (tensor `key` of safetensors).

    Raises
    ------
    StorageError
        The file is missing, truncated, or no such file.
    InvalidValueError
        It holds no 2-D array, or several tensors and `key` names none of them.
    """
    dtype, shape, offset = find_tensor(path, open_header(path), key)
    if len(shape) != 2:
        raise InvalidValueError(f"{str(path)!r} holds an array of shape {shape} but a table is 2-D; reshape it first")
    return dtype, (shape[0], shape[1]), offset


def open_header(path: Path) -> Header:
    """Return the header of the file at `path`; raise `StorageError` where there is none."""
    with _as_storage_error(path), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".npy":
            dtype, shape, offset = _read_npy(file)
            return Header(size, offset, {}, (dtype, shape))
        if path.suffix != ".safetensors":
            check_suffix(path, torch.float32)
        entries, offset = safetensors_io.read_header(file, path)
        metadata = entries.pop(safetensors_io.METADATA, None)
        return Header(size, offset, entries, metadata=metadata)


def find_tensor(
    path: Path, header: Header, key: str | None = None, dtypes: Collection[torch.dtype] = TABLE_DTYPES
) -> Stored:
    """Return where the file at `path` has the tensor `key` (by default the only one, or "weight"), of one of `dtypes`."""
    with _as_storage_error(path):
        found = _find(path, header, key, dtypes)
    if any(n < 0 for n in found.shape):
        raise StorageError(f"{str(path)!r} has a header of shape {found.shape}, which no array has; write it again")
    need = found.offset + math.prod(found.shape) * found.dtype.itemsize
    if need > header.size:
        raise StorageError(
            f"{str(path)!r} is truncated: {header.size} bytes, but its header promises {need}; write it again"
        )
    # Of none that has bytes: they are in the file.
    if math.prod(max(n, 1) for n in found.shape) >= safetensors_io.MAX_VALUES:
        raise StorageError(f"{str(path)!r} has a header of shape {found.shape}, which no array has; write it again")
    return found


@contextlib.contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    """Raise `StorageError` for whatever goes wrong with the file at `path`."""
    try:
        yield
    except SpeedtransferError:  # first: some are an OSError as well
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); check the path") from error
    except Exception as error:  # whatever the parsers of JSON and of Python literals throw at rubbish
        what = " ".join(str(error).split()) or type(error).__name__
        raise StorageError(f"{str(path)!r} is no valid {path.suffix} file ({what}); write it again") from error


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


def _find(path: Path, header: Header, key: str | None, dtypes: Collection[torch.dtype]) -> Stored:
    if header.array is not None:
        if key is not None:
            raise InvalidValueError(f"{str(path)!r} holds one array and no tensor {key!r}; leave key out")
        dtype, shape = header.array
        if dtype not in dtypes:
            raise InvalidTypeError(
                f"{str(path)!r} holds {dtype} but must hold one of {_listed(dtypes)}; convert it first"
            )
        return Stored(dtype, shape, header.offset)
    names = list(header.tensors)
    if key is None:
        key = names[0] if len(names) == 1 else "weight"
    if key not in header.tensors:
        raise InvalidValueError(f"{str(path)!r} has no tensor {key!r}{suggest(key, names or ['none'])} (argument key)")
    kind = header.tensors[key]["dtype"]
    if SAFETENSORS_DTYPES.get(kind) not in dtypes:
        wanted = "a table holds floats or integers" if dtypes is TABLE_DTYPES else f"must be one of {_listed(dtypes)}"
        if kind == "U8" and FLOAT8_SCALE in dtypes:
            raise InvalidTypeError(
                f"tensor {key!r} of {str(path)!r} is {kind} but {wanted}; convert it first, or pass scale_dtype="
                f"{FLOAT8_SCALE} if its bytes are exponents, as in the MX formats"
            )
        raise InvalidTypeError(f"tensor {key!r} of {str(path)!r} is {kind} but {wanted}; convert it first")
    dtype, shape, begin, _ = safetensors_io.check_entry(header.tensors[key])
    return Stored(dtype, shape, header.offset + begin)


def _listed(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def open_mapped(path: Path, writable: bool, key: str | None = None) -> tuple[Tensor, np.memmap | None]:
    """Return the table at `path` as a tensor over the mapped file, and the map; `writable`: changes go to the file."""
    dtype, shape, offset = read_header(path, key)
    told = storage_error(f"cannot map {str(path)!r}", "check that you may write to it")
    # "c" maps privately: torch wants writable memory, and the file stays as it is.
    with told, open_file(path, "r+b" if writable else "rb") as file:
        return map_tensor(file, offset, shape, dtype, "r+" if writable else "c")


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
