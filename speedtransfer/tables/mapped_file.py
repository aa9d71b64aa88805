"""Planes in a file mapped into memory: tables that may exceed it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, StorageError, check_no_url, format_bytes
from speedtransfer.tables import files, page_advice
from speedtransfer.tables.longer_files import LongerFile, plan_growth
from speedtransfer.tables.memories import Memory
from speedtransfer.tables.records import Block
from speedtransfer.tables.reserved import NamelessMap, OpenFile
from speedtransfer.tables.write_lock import WriteLock, lock_for_writing
from speedtransfer.untrusted import storage_error


class MmapMemory(Memory):
    """A file on disk, which may exceed the memory; only rows that were written take disk.

    The weight plane is the file at `path`, `.npy` or `.safetensors` by its suffix, readable by any program. The planes of
    optimizer state lie beside it in files without a name, which vanish with the table: a crash leaves nothing behind. So does
    the weight plane where `path` is a folder; with layout "rows" all planes are then in one record a row.

    Planes larger than a sixteenth of the memory are read and written page by page, so that a step costs the same whatever
    the number of rows. Passes in chunks (`save`, checkpoints) read ahead by themselves; one over a view of the whole plane,
    such as ``table.torch().norm()``, reads slowly what is not in memory yet.
    """

    name = "mmap"
    is_shared_by_forks = maps_again = True
    folder: Path

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if path is None:
            raise InvalidValueError(
                "memory='mmap' needs a file; pass path='table.safetensors' (or .npy), or a folder for a file without a name"
            )
        check_no_url(path)
        super().__init__(device)
        # Whatever the current folder is later.
        path = Path(path).absolute()
        # Of files without a name the folder alone is given.
        self.path = None if path.is_dir() else path
        self.folder = path if self.path is None else path.parent
        self._weight_map: np.memmap | None = None
        self._key: str | None = None
        self._lock: WriteLock | None = None
        # Device and number of the file at `path`: there may be another one by the time it becomes longer.
        self._identity: tuple[int, int] | None = None
        # Of nameless files that can become longer, by the address where they are.
        self._maps = weakref.WeakValueDictionary[int, NamelessMap]()

    @property
    def whole_records(self) -> bool:  # noqa: D102
        return self.path is None and self.layout == "rows"

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        path = self.path if plane == "weight" else None
        if path is not None:
            if not path.suffix:
                raise InvalidValueError(
                    f"path {str(path)!r} is not a folder that exists, and does not end in .npy or .safetensors; make the "
                    "folder, or name the file"
                )
            files.check_suffix(path, dtype)
            if path.exists():
                raise StorageError(
                    f"path {str(path)!r} exists and would be overwritten; open it with "
                    "Table.load(path, memory='mmap', writable=True), delete it, or choose another path"
                )
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        remedy = "choose a folder that exists, that you may write to and that has room, or raise the limits (ulimit)"
        with storage_error(f"cannot create a table file in {str(self.folder)!r}", remedy):
            free = shutil.disk_usage(self.folder).free
            if num_bytes > free:
                raise StorageError(
                    f"plane {plane!r} asks for {format_bytes(num_bytes)} but {str(self.folder)!r} has "
                    f"{format_bytes(free)} free; choose a path on a larger disk, or fewer rows"
                )
            if path is not None:
                files.create(path, shape, dtype, grows=self.max_rows is not None)
                try:
                    return self.open()
                except BaseException:
                    path.unlink()
                    raise
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.truncate(num_bytes)
                if self.max_rows is not None and num_bytes:
                    return self._mapped(OpenFile(file.fileno()), num_bytes).view(dtype).view(shape)
                values, data = files.map_tensor(file, 0, shape, dtype, "r+")
            page_advice.expect_random_rows(data)
            return values

    def open(self, key: str | None = None) -> Tensor:
        """Return the weight plane that the file at `path` holds already; no other process may write to it."""
        assert self.path is not None
        self._key, self._lock = key, lock_for_writing(self.path)
        weight, self._weight_map = files.open_mapped(self.path, writable=True, key=key)
        self._identity = _identity(self.path)
        self.written_tensor = self._identity, key
        page_advice.expect_random_rows(self._weight_map)
        return weight

    def _mapped(self, file: OpenFile, num_bytes: int) -> Tensor:
        """Return all of a nameless file, (num_bytes,) uint8."""
        block = NamelessMap.of(file, num_bytes)
        data = block.tensor()
        self._maps[data.data_ptr()] = block
        page_advice.expect_random_rows_of(block, data.data_ptr())
        return data

    def _check_growth(self, blocks: Sequence[Block], num_rows: int) -> None:
        need = sum(
            block.row_bytes * (num_rows - (block.num_rows if self._can_extend(block, num_rows) else 0))
            for block in blocks
        )
        with storage_error(f"cannot tell what room {str(self.folder)!r} has", "check that the folder still exists"):
            free = shutil.disk_usage(self.folder).free
        if need > free:
            raise StorageError(
                f"{num_rows} rows, {blocks[0].num_rows} so far, ask for {format_bytes(need)} more but {str(self.folder)!r} "
                f"has {format_bytes(free)} free; free some space, or grow to fewer rows"
            )

    def _can_extend(self, block: Block, num_rows: int) -> bool:
        return block.address in self._maps or self._is_named(block)

    def _is_named(self, block: Block) -> bool:
        return "weight" in block.planes and self.path is not None

    def _grow(self, blocks: Sequence[Block], num_rows: int) -> dict[str, Tensor]:
        longer: LongerFile | None = None
        grown = dict[str, Tensor]()
        # The file of the weights last of all: whoever opens it sees the rows once it has them.
        blocks = sorted(blocks, key=self._is_named)
        what = f"cannot make the files of the table longer, in {str(self.folder)!r}"
        with storage_error(what, "free some space, or raise the limits of this process (ulimit)"):
            if self._is_named(blocks[-1]):
                assert self.path is not None
                if self._identity != _identity(self.path):
                    raise StorageError(
                        f"{str(self.path)!r} is another file by now than the one that has the rows of this table, which was "
                        "moved or replaced, and to make it longer would change that one; move the file of this table back"
                    )
                longer = plan_growth(self.path, self._key, num_rows)
            with contextlib.ExitStack() as undo:
                for block in blocks:
                    found = self._maps.get(block.address)
                    if longer is not None and self._is_named(block):
                        grown.update(self._longer_weight(block, longer, num_rows, undo))
                    elif found is not None:
                        num_bytes, before = num_rows * block.row_bytes, block.num_rows * block.row_bytes
                        undo.callback(found.file.resize, before, before)
                        found.file.resize(before, num_bytes)
                        records = self._mapped(found.file, num_bytes).view(num_rows, block.row_bytes)
                        grown.update(block.planes_longer(records))
                    else:
                        grown.update(self._grown(block, num_rows))
                if longer is not None:
                    longer.show()
                undo.pop_all()
        return grown

    def _longer_weight(
        self, block: Block, longer: LongerFile, num_rows: int, undo: contextlib.ExitStack
    ) -> dict[str, Tensor]:
        """Return the weights in the file at `path`, which becomes longer, and shorter again by `undo`."""
        undo.callback(longer.shorten)
        longer.lengthen()
        weight = block.planes["weight"]
        shape = num_rows, weight.shape[1]
        values, data = files.map_tensor(longer.path, longer.offset, shape, weight.dtype, "r+")
        page_advice.expect_random_rows(data)
        undo.callback(setattr, self, "_weight_map", self._weight_map)
        self._weight_map = data
        if not weight.numel():
            return {"weight": values}
        return block.planes_longer(values.view(torch.uint8))

    def flush(self) -> None:  # noqa: D102
        if self._weight_map is not None:
            self._weight_map.flush()

    def anonymous_copy(self) -> Memory:  # noqa: D102
        copy = MmapMemory(self.device, self.folder / "copy")
        copy.path, copy.folder = None, self.folder  # a file without a name
        copy.layout, copy.max_rows = self.layout, self.max_rows
        return copy


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
