"""Planes in a file mapped into memory: tables that may exceed it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, StorageError, format_bytes
from speedtransfer.tables import files, page_advice
from speedtransfer.tables.memories import Memory


class MmapMemory(Memory):
    """A file on disk, which may exceed the memory; only rows that were written take disk.

    The weight plane is the file at `path`, `.npy` or `.safetensors` by its suffix, readable by any program. The planes of
    optimizer state lie beside it in files without a name, which vanish with the table: a crash leaves nothing behind.

    Planes larger than a sixteenth of the memory are read and written page by page, so that a step costs the same whatever
    the number of rows. Passes in chunks (`save`, checkpoints) read ahead by themselves; one over a view of the whole plane,
    such as ``table.torch().norm()``, reads slowly what is not in memory yet.
    """

    name = "mmap"

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if path is None:
            raise InvalidValueError("memory='mmap' needs a file; pass path='table.safetensors' (or .npy)")
        super().__init__(device)
        self.path = Path(path)
        self._folder = self.path.parent
        self._weight_map: np.memmap | None = None

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        path = self.path if plane == "weight" else None
        if path is not None:
            files.check_suffix(path, dtype)
            if path.exists():
                raise StorageError(
                    f"path {str(path)!r} exists and would be overwritten; open it with "
                    "Table.load(path, memory='mmap', writable=True), delete it, or choose another path"
                )
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        try:
            free = shutil.disk_usage(self._folder).free
            if num_bytes > free:
                raise StorageError(
                    f"plane {plane!r} asks for {format_bytes(num_bytes)} but {str(self._folder)!r} has "
                    f"{format_bytes(free)} free; choose a path on a larger disk, or fewer rows"
                )
            if path is not None:
                files.create(path, shape, dtype)
                try:
                    return self.open()
                except BaseException:
                    path.unlink()
                    raise
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(num_bytes)
                values, data = files.map_tensor(file, 0, shape, dtype, "r+")
            page_advice.expect_random_rows(data)
            return values
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
        page_advice.expect_random_rows(self._weight_map)
        return weight

    def flush(self) -> None:  # noqa: D102
        if self._weight_map is not None:
            self._weight_map.flush()

    def anonymous_copy(self) -> Memory:  # noqa: D102
        copy = MmapMemory(self.device, self._folder / "copy")
        copy.path, copy.layout = None, self.layout  # a file without a name
        return copy
