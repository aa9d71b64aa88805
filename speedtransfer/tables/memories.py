"""Where planes live: ordinary pages, page-locked pages, the memory of the device. A file is in `mapped_file`."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.cuda import pinned_empty, require_cuda, resolve_device
from speedtransfer.engines import Engine
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidValueError, format_bytes
from speedtransfer.system import physical_bytes
from speedtransfer.tables import forks
from speedtransfer.tables.chunks import copy_plane
from speedtransfer.tables.parts import Parts
from speedtransfer.tables.records import Block, Layout, Specs, blocks_of, record_bytes, views_of
from speedtransfer.tables.reserved import Reserved

_SMALLER = "pass memory='mmap' with a path on a disk with room, fewer rows or a smaller dtype"


class Memory(ABC):
    """Allocates the planes of a table.

    Parameters
    ----------
    device : torch.device
        The compute device: rows are gathered to it and scattered from it.
    path : path-like, optional
        The file of the weight plane, for memories that live in files.
    """

    name: ClassVar[str]
    path: Path | None = None
    # Where its files without a name are.
    folder: Path | None = None
    # Of planes that are added together: see `Table`.
    layout: Layout = "planes"
    # How many rows the table may get; None: it does not grow.
    max_rows: int | None = None
    # Whether a child of fork has this memory itself, and no copy of it.
    is_shared_by_forks: bool = False
    # Whether a write raises: in a child of fork it would change the rows of the parent; and files may be opened to be read.
    refuses_writes: bool = False
    # In such a child: when the process that writes these rows does.
    turns: forks.Turns | None = None
    # The file with the rows and the name of the tensor, where these are written.
    written_tensor: object = None
    # Whether what becomes longer is the same memory at another address.
    maps_again: ClassVar[bool] = False
    # Whether the rows are those of files that are never changed.
    read_only: ClassVar[bool] = False
    # All files with rows, for memories of several.
    files: Sequence[Path] = ()

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            raise InvalidValueError(
                f"path is {str(path)!r} but memory={self.name!r} has no file; drop path or pass memory='mmap'"
            )
        self.device = device
        # Planes whose rows lie in several places, by name; the table has placeholders of them, without memory.
        self.in_parts: dict[str, Parts] = {}
        if self.is_shared_by_forks:
            forks.share(self)

    @property
    def whole_records(self) -> bool:
        """Whether planes that are added share records with the weights, which move there."""
        return False

    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed contiguous ``(num_rows, width)`` tensor.

        Raises
        ------
        HostMemoryError, StorageError
            There is no room for it.
        """
        with torch.inference_mode(False):  # an inference tensor could never be trained
            return self._allocate(plane, (num_rows, width), dtype)

    @property
    def _is_on_host(self) -> bool:
        return self.name != "mmap" and (self.name != "device" or self.device.type == "cpu")

    def check_room_beside(self, planes: Mapping[str, Tensor], num_rows: int, specs: Specs) -> None:
        """Raise `HostMemoryError` where more planes of a table and those that it has exceed the machine's memory."""
        held = sum(plane.nbytes for plane in planes.values())
        need = num_rows * sum(width * dtype.itemsize for width, dtype in specs.values())
        if need and self._is_on_host:
            beside = f"{format_bytes(need)} beside the {format_bytes(held)} of their others,"
            _check_memory(held + need, f"{', '.join(map(repr, specs))} of {num_rows} rows ask for {beside}", _SMALLER)

    def allocate_together(self, num_rows: int, specs: Specs) -> dict[str, Tensor]:
        """Return zeroed ``(num_rows, width)`` tensors for planes that are added together, with contiguous rows.

        With layout "rows" they are views of one tensor that has a record of all of them for each row.
        """
        if self.layout == "planes" or len(specs) < 2 or not all(width for width, _ in specs.values()):
            return {name: self.allocate(name, num_rows, *spec) for name, spec in specs.items()}
        offsets, stride = record_bytes(specs)
        with torch.inference_mode(False):
            return views_of(self.allocate(", ".join(specs), num_rows, stride, torch.uint8), specs, offsets)

    def grow(self, planes: Mapping[str, Tensor], num_rows: int) -> dict[str, Tensor]:
        """Return the planes of a table with `num_rows` rows, more than so far, the new ones zero: all planes, or none.

        Where the memory can become longer the rows so far are the same memory; else they are copied.

        Raises
        ------
        HostMemoryError, StorageError
            There is no room; nothing has changed.
        """
        blocks = blocks_of(planes)
        self._check_growth(blocks, num_rows)
        with torch.inference_mode(False), torch.no_grad():
            return self._grow(blocks, num_rows)

    def _check_growth(self, blocks: Sequence[Block], num_rows: int) -> None:
        """Raise unless the memory has room for `num_rows` rows."""
        before, need = (
            sum(block.row_bytes * (block.num_rows if old else num_rows) for block in blocks) for old in (1, 0)
        )
        # Those that are copied are there twice.
        need += sum(block.row_bytes * block.num_rows for block in blocks if not self._can_extend(block, num_rows))
        if self._is_on_host:
            what = (
                f"{num_rows} rows, {blocks[0].num_rows} so far ({format_bytes(before)}), ask for {format_bytes(need)}"
            )
            _check_memory(need, what, "grow to fewer rows, or pass memory='mmap' with a path on a disk with room")

    def _can_extend(self, block: Block, num_rows: int) -> bool:
        """Tell whether the memory of a block can become longer."""
        return False

    def _grow(self, blocks: Sequence[Block], num_rows: int) -> dict[str, Tensor]:
        grown = dict[str, Tensor]()
        for block in blocks:
            grown.update(self._grown(block, num_rows))
        return grown

    def _grown(self, block: Block, num_rows: int) -> dict[str, Tensor]:
        """Return the planes of a block with `num_rows` rows, in other memory."""
        made = block.planes_over(self._allocate(", ".join(block.planes), (num_rows, block.row_bytes), torch.uint8))
        for name, plane in block.planes.items():
            copy_plane(made[name][: len(plane)], plane)
        return made

    def adopt(self, plane: Tensor) -> None:
        """Note that `plane` is memory of somebody else's, which children of fork may share (``share_memory_()``)."""
        if plane.device.type == "cpu" and plane.is_shared() and not self.is_shared_by_forks:
            self.is_shared_by_forks = True
            forks.share(self)

    def refuse_write(self, what: str) -> NoReturn:
        """Raise for a write to memory that `refuses_writes`; `what` has the rows."""
        raise DeviceError(
            f"the rows of {what} are memory={self.name!r} of the process that this one was forked from, and a write here "
            "would change them there; write in that process, make the table after the fork, or use memory='pageable' (not "
            "over a tensor in shared memory), which a child has a copy of"
        )

    @abstractmethod
    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor: ...

    def move_to(self, device: torch.device, planes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make `device` the compute device and return the planes, which stay where they are unless they live on it."""
        self.device = device
        return planes

    def wrap(self, engine: Engine) -> Engine:
        """Return the engine of the table for one that moves rows of this memory."""
        return engine

    def flush(self) -> None:
        """Write what is only in memory to the disk, for memories that live in files."""
        return None

    def anonymous_copy(self) -> Memory:
        """Return a memory of the same kind for a copy of the table."""
        copy = type(self)(self.device)
        copy.layout, copy.max_rows = self.layout, self.max_rows
        return copy


class PageableMemory(Memory):
    """Ordinary memory. A page, of 2 MB where the system has large ones, takes room once it is written."""

    name = "pageable"

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(device, path)
        # Of planes that can become longer, by the address where they begin.
        self._reserved = weakref.WeakValueDictionary[int, Reserved]()

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        num_bytes, what = _check_fits(plane, shape, dtype)
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        try:
            data = self._reserve(num_bytes, num_bytes // shape[0])
            if data is None:
                data = torch.from_numpy(np.frombuffer(buffers.anonymous(num_bytes), dtype=np.uint8))
        except OSError as error:
            raise HostMemoryError(
                f"{what} asks for {format_bytes(num_bytes)}, which the system refused ({error.strerror}); "
                "pass memory='mmap' with a path on a disk with room, or fewer rows"
            ) from error
        return data.view(dtype).view(shape)

    def _reserve(self, num_bytes: int, row_bytes: int) -> Tensor | None:
        """Return `num_bytes` of memory, (num_bytes,) uint8, that can become longer; None where there is none of that kind."""
        # All that a plane can ever have: more rows than fit into the memory are refused.
        most = (self.max_rows or 0) * row_bytes
        # Most tables cannot grow, and are not to read again what this machine has.
        most = most and min(most, physical_bytes())
        if most <= num_bytes:
            return None
        try:
            block = Reserved(most)
        except OSError:
            return None
        block.extend(num_bytes)
        self._reserved[block.address] = block
        return block.tensor(block.address, num_bytes)

    def _can_extend(self, block: Block, num_rows: int) -> bool:
        found = self._reserved.get(block.address)
        return found is not None and num_rows * block.row_bytes <= len(found)

    def _grow(self, blocks: Sequence[Block], num_rows: int) -> dict[str, Tensor]:
        longer, grown = list[tuple[Block, Tensor]](), dict[str, Tensor]()
        for block in blocks:
            found = self._reserved.get(block.address)
            if found is None or not self._can_extend(block, num_rows):
                grown.update(self._grown(block, num_rows))
                continue
            num_bytes = num_rows * block.row_bytes
            try:
                found.extend(num_bytes)
            except OSError as error:
                raise HostMemoryError(
                    f"{num_rows} rows, {block.num_rows} so far, ask for {format_bytes(num_bytes)} for "
                    f"{', '.join(block.planes)}, which the system refused ({error.strerror}); grow to fewer rows, or pass "
                    "memory='mmap' with a path on a disk with room"
                ) from error
            longer.append((block, found.tensor(found.address, num_bytes).view(num_rows, block.row_bytes)))
        for block, records in longer:
            grown.update(block.planes_longer(records))
        return grown


class PinnedMemory(Memory):
    """Page-locked memory at its exact size, which the GPU reads and writes across the bus."""

    name = "pinned"
    is_shared_by_forks = True

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        require_cuda("memory='pinned'")
        super().__init__(device, path)

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        num_bytes, _ = _check_fits(plane, shape, dtype)
        target = self.device if self.device.type == "cuda" else resolve_device("cuda")
        return pinned_empty(num_bytes, target).zero_().view(dtype).view(shape)


class DeviceMemory(Memory):
    """Memory of the GPU, from torch's allocator; without CUDA the compute device is the CPU, and so is this."""

    name = "device"

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            return PageableMemory(self.device)._allocate(plane, shape, dtype)
        try:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise HostMemoryError(
                f"plane {plane!r} asks for {format_bytes(shape[0] * shape[1] * dtype.itemsize)} of {self.device} "
                f"({str(error).splitlines()[0]}); pass memory='pinned', 'pageable' or 'mmap'"
            ) from error

    def move_to(self, device: torch.device, planes: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: D102
        self.device = device
        return {name: plane.to(device) for name, plane in planes.items()}


def check_room(num_bytes: int, what: str) -> None:
    """Raise `HostMemoryError` where a copy of rows of files would exceed the memory of the machine."""
    remedy = (
        "gather the rows that are needed, or copy them to a file, which streams: table.save(path), st.save_checkpoint"
    )
    _check_memory(num_bytes, f"{what} take {format_bytes(num_bytes)} as one tensor", remedy)


def _check_fits(plane: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, str]:
    """Return the bytes of a plane and what to call it.

    HostMemoryError where they exceed the machine's memory: overcommit would succeed and the OOM killer strike later.
    """
    num_bytes, what = shape[0] * shape[1] * dtype.itemsize, f"plane {plane!r} of {shape[0]} x {shape[1]} {dtype}"
    _check_memory(num_bytes, f"{what} asks for {format_bytes(num_bytes)}", _SMALLER)
    return num_bytes, what


def _check_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Raise `HostMemoryError`, which says `what` asks for them, where so many bytes exceed the memory of the machine."""
    have = physical_bytes()
    if have and num_bytes > have:
        raise HostMemoryError(f"{what} but this machine has {format_bytes(have)} of memory; {remedy}")
