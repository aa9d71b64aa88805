"""Memories of the host: ordinary pages, a file mapped into memory, page-locked pages."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.cuda import pinned_empty, require_cuda, resolve_device
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError, format_bytes
from speedtransfer.tables import files, page_advice
from speedtransfer.tables.memory import Memory, check_fits


class PageableMemory(Memory):
    """Ordinary memory. A page, of 2 MB where the system has large ones, takes room once it is written."""

    name = "pageable"

    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        num_bytes = num_rows * width * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(num_rows, width, dtype=dtype, device="cpu")
        what = f"plane {plane!r} of {num_rows} x {width} {dtype}"
        check_fits(num_bytes, what)
        try:
            block = buffers.anonymous(num_bytes)
        except OSError as error:
            raise HostMemoryError(
                f"{what} asks for {format_bytes(num_bytes)}, which the system refused ({error.strerror}); "
                "pass memory='mmap' with a path on a disk with room, or fewer rows"
            ) from error
        return torch.from_numpy(np.frombuffer(block, dtype=np.uint8)).view(dtype).view(num_rows, width)


class MmapMemory(PageableMemory):
    """A file on disk, which may exceed the memory; only rows that were written take disk.

    The weight plane is the file at `path`, `.npy` or `.safetensors` by its suffix, readable by any program. The planes of
    optimizer state lie beside it in files without a name, which vanish with the table: a crash leaves nothing behind.

    Planes larger than a sixteenth of the memory are read and written page by page, so that a step costs the same whatever
    the number of rows. Passes in chunks (`save`, checkpoints) read ahead by themselves; one over a view of the whole plane,
    such as ``table.torch().norm()``, reads slowly what is not in memory yet.
    """

    name = "mmap"

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(device)
        if path is None:
            raise InvalidValueError("memory='mmap' needs a file; pass path='table.safetensors' (or .npy)")
        self.path = Path(path)
        self._folder = self.path.parent
        self._weight_map: np.memmap | None = None

    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        if plane == "weight" and self.path is not None:
            files.check_suffix(self.path, dtype)
            if self.path.exists():
                raise StorageError(
                    f"path {str(self.path)!r} exists and would be overwritten; open it with "
                    "Table.load(path, memory='mmap'), delete it, or choose another path"
                )
        num_bytes = num_rows * width * dtype.itemsize
        try:
            free = shutil.disk_usage(self._folder).free
            if num_bytes > free:
                raise StorageError(
                    f"plane {plane!r} asks for {format_bytes(num_bytes)} but {str(self._folder)!r} has "
                    f"{format_bytes(free)} free; choose a path on a larger disk, or fewer rows"
                )
            if plane == "weight" and self.path is not None:
                files.create(self.path, (num_rows, width), dtype)
                try:
                    return self.open()
                except BaseException:
                    self.path.unlink()
                    raise
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(max(num_bytes, 1))
                data = np.memmap(file, dtype=np.uint8, mode="r+")
            page_advice.expect_random_rows(data)
            return torch.from_numpy(data[:num_bytes].view(np.ndarray)).view(dtype).view(num_rows, width)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot create a table file in {str(self._folder)!r} ({error.strerror}); "
                "choose a folder that exists and that you may write to"
            ) from error

    def open(self, key: str | None = None) -> Tensor:
        """Return the weight plane that the file at `path` holds already."""
        assert self.path is not None
        weight, self._weight_map = files.open_mapped(self.path, writable=True, key=key)
        if self._weight_map is not None:
            page_advice.expect_random_rows(self._weight_map)
        return weight

    def flush(self) -> None:  # noqa: D102
        if self._weight_map is not None:
            self._weight_map.flush()

    def anonymous_copy(self) -> Memory:  # noqa: D102
        copy = MmapMemory(self.device, self._folder / "copy")
        copy.path = None  # a file without a name
        return copy


class PinnedMemory(Memory):
    """Page-locked memory at its exact size, which the GPU reads and writes across the bus."""

    name = "pinned"

    def __init__(self, device_: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        require_cuda("memory='pinned'")
        super().__init__(device_, path)

    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        num_bytes = num_rows * width * dtype.itemsize
        check_fits(num_bytes, f"plane {plane!r} of {num_rows} x {width} {dtype}")
        target = self.device if self.device.type == "cuda" else resolve_device("cuda")
        return pinned_empty(num_bytes, target).zero_().view(dtype).view(num_rows, width)
