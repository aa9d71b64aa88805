"""What a memory is: the place that a table's planes live in. One class per place; `base.MEMORIES` lists them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from speedtransfer.engines import Engine, make_engine
from speedtransfer.errors import HostMemoryError, InvalidValueError, format_bytes
from speedtransfer.system import physical_bytes


class Memory(ABC):
    """Allocates planes and says which engine moves their rows.

    Parameters
    ----------
    device : torch.device
        The compute device: rows are gathered to it and scattered from it.
    path : path-like, optional
        The file of the weight plane, for memories that live in files.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            raise InvalidValueError(
                f"path is {str(path)!r} but memory={self.name!r} has no file; drop path or pass memory='mmap'"
            )
        self.device = device
        self.path: Path | None = None

    @abstractmethod
    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed contiguous ``(num_rows, width)`` tensor.

        Raises
        ------
        HostMemoryError, StorageError
            There is no room for it.
        """

    def engine(self, name: str | None = None) -> Engine:
        """Return the engine `name` (default: the best one) that moves rows between this memory and the compute device."""
        return make_engine(self.name, self.device, name)

    def move_to(self, device: torch.device, planes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make `device` the compute device and return the planes, which stay where they are unless they live on it."""
        self.device = device
        return planes

    def flush(self) -> None:
        """Write what is only in memory to the disk, for memories that live in files."""
        return None

    def anonymous_copy(self) -> Memory:
        """Return a memory of the same kind for a copy of the table."""
        return type(self)(self.device)


def check_fits(num_bytes: int, what: str) -> None:
    """Raise `HostMemoryError` where `num_bytes` exceed the machine's memory: the system would promise and then kill."""
    have = physical_bytes()
    if have and num_bytes > have:
        raise HostMemoryError(
            f"{what} asks for {format_bytes(num_bytes)} but this machine has {format_bytes(have)} of memory; "
            "pass memory='mmap' with a path on a disk with room, fewer rows or a smaller dtype"
        )
