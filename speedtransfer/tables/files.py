"""Tables in files: `.npy` and `.safetensors`, read and written in chunks or mapped in place.

`safetensors` and NumPy both want the whole array in memory to write it; a header is small, so ours is written here and the
rows stream after it. Data begins at a multiple of 64 bytes, so that a mapped row is as well aligned as one in memory.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError, suggest

_SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
SAFE_NAMES = {dtype: name for name, dtype in _SAFE_DTYPES.items()}
NUMPY_DTYPES = {torch.empty(0, dtype=d).numpy().dtype: d for d in SAFE_NAMES if d != torch.bfloat16}
_NUMPY_NAMES = {d: n for n, d in NUMPY_DTYPES.items()}
_ALIGN = 64
_MAX_SIZE = 2**63 - 1
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library itself
CHUNK_BYTES = 1 << 24


def check_suffix(path: Path, dtype: torch.dtype) -> None:
    """Raise where the format that `path` names by its suffix does not exist or cannot hold `dtype`."""
    if path.suffix not in (".npy", ".safetensors"):
        raise InvalidValueError(
            f"path {str(path)!r} ends in {path.suffix!r} but a table is .npy or .safetensors; rename it"
        )
    if path.suffix == ".npy" and dtype not in _NUMPY_NAMES:
        raise InvalidTypeError(f"{dtype} has no .npy form (path {str(path)!r}); use a path that ends in .safetensors")


def _header(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> bytes:
    check_suffix(path, dtype)
    if path.suffix == ".npy":
        buffer = BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(_NUMPY_NAMES[dtype]), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, fields)  # pads to 64 bytes by itself
        return buffer.getvalue()
    num_bytes = math.prod(shape) * dtype.itemsize
    text = json.dumps({"weight": {"dtype": SAFE_NAMES[dtype], "shape": list(shape), "data_offsets": [0, num_bytes]}})
    text += " " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text.encode()


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
    with atomic(path) as file:
        file.write(header)
        for chunk in rows:
            if chunk.numel():
                file.write(chunk.contiguous().view(torch.uint8).numpy().data.cast("B"))


@contextmanager
def atomic(path: Path) -> Iterator[BufferedWriter]:
    """Open a temporary file beside `path` for writing; rename it into place once all of it is on the disk."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise StorageError(
            f"cannot write {str(path)!r} ({error.strerror}); choose a folder you may write to"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner reads
        os.replace(name, path)
    except OSError as error:
        raise StorageError(
            f"cannot write {str(path)!r} ({error.strerror}); free some space or choose another path"
        ) from error
    finally:
        if os.path.exists(name):
            os.unlink(name)


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
                dtype, shape, offset = _read_safetensors(file, size, path, key)
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
    if dtype not in NUMPY_DTYPES:
        raise InvalidTypeError(f"{file.name!r} holds {dtype} but a table holds floats or integers; convert it first")
    return NUMPY_DTYPES[dtype], shape, file.tell()


def _read_safetensors(
    file: BinaryIO, size: int, path: Path, key: str | None
) -> tuple[torch.dtype, tuple[int, ...], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise StorageError(f"{str(path)!r} is no .safetensors file or is truncated ({size} bytes); write it again")
    entries: dict[str, Any] = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise TypeError("its header is no JSON object")
    names = [name for name in entries if name != "__metadata__"]
    if key is None:
        key = names[0] if len(names) == 1 else "weight"
    if key not in names:
        raise InvalidValueError(f"{str(path)!r} has no tensor {key!r}{suggest(key, names or ['none'])} (argument key)")
    entry = entries[key]
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _SAFE_DTYPES:
        raise InvalidTypeError(f"tensor {key!r} of {str(path)!r} is {entry['dtype']}; a table holds floats or integers")
    dtype, shape = _SAFE_DTYPES[entry["dtype"]], tuple(entry["shape"])
    whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    if not whole or end - begin != math.prod(shape) * dtype.itemsize:
        raise StorageError(f"{str(path)!r}: shape {shape} of tensor {key!r} does not match its bytes; write it again")
    return dtype, shape, 8 + length + begin


def open_mapped(path: Path, writable: bool, key: str | None = None) -> tuple[Tensor, np.memmap | None]:
    """Return the table at `path` as a tensor over the mapped file, and the map; `writable`: changes go to the file."""
    dtype, shape, offset = read_header(path, key)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu"), None
    try:
        # "c" maps privately: torch wants writable memory, and the file stays as it is.
        data = np.memmap(path, dtype=np.uint8, mode="r+" if writable else "c", offset=offset, shape=(num_bytes,))
    except OSError as error:
        raise StorageError(f"cannot map {str(path)!r} ({error.strerror}); check that you may write to it") from error
    with torch.inference_mode(False):  # an inference tensor could never be trained
        return torch.from_numpy(data.view(np.ndarray)).view(dtype).view(shape), data
