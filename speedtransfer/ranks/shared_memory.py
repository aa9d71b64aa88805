"""Memory that the processes of one host share: each maps the same pages, which are gone when the last of them ends."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import HostMemoryError, InvalidValueError, format_bytes
from speedtransfer.ranks.exchange import Exchange
from speedtransfer.tables import Memory

# Of Linux 5.14: makes the page tables at once. Else each process takes a fault for each page that it meets.
_MADV_POPULATE_WRITE = 23


class SharedMemory(Memory):
    """Planes that all processes of a group map, which must be on one host; allocating is collective.

    The pages belong to a file without a name (memfd), so that nothing is left of processes that are killed, and no limit of
    /dev/shm applies, which containers set to 64 MB.
    """

    name = "shared"
    is_shared_by_forks = True

    def __init__(self, device: torch.device, exchange: Exchange) -> None:
        super().__init__(device)
        self.exchange = exchange

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        exchange, num_bytes = self.exchange, max(1, shape[0] * shape[1] * dtype.itemsize)
        handle, error, block = -1, None, None
        about = f"plane {plane!r} of {shape[0]} x {shape[1]} {dtype}"
        try:
            if exchange.rank == 0:
                handle = _new_file(num_bytes, about)
        except Exception as raised:
            error = raised
        try:
            # The process and number of the file, and bytes by which others tell that it is the one.
            told = exchange.agree("makes a table", [os.getpid(), handle, num_bytes], about)[0].tolist()
            if error is None and told[1] >= 0:
                try:
                    block = _mapped(*told)
                except OSError as raised:
                    error = InvalidValueError(
                        f"memory='shared' is for processes of one host, but rank {exchange.rank} cannot open the memory of "
                        f"rank 0 ({raised.strerror}); use memory='pageable', 'pinned' or 'mmap' with process_group, which "
                        "shares the rows out"
                    )
            exchange.agree_on_error("makes a table", error)
        finally:
            if handle >= 0:
                os.close(handle)
        assert block is not None
        data = torch.from_numpy(np.frombuffer(block, dtype=np.uint8))
        return data[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)

    def anonymous_copy(self) -> Memory:
        """Return a memory of the same kind for a copy of the table."""
        copy = SharedMemory(self.device, self.exchange)
        copy.layout = self.layout
        return copy


def _new_file(num_bytes: int, about: str) -> int:
    handle = os.memfd_create("speedtransfer")
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        os.close(handle)
        raise HostMemoryError(
            f"{about} asks for {format_bytes(num_bytes)} of shared memory, which the system refused ({error.strerror}); use "
            "process_group without memory='shared', or fewer rows"
        ) from error
    return handle


def _mapped(process: int, handle: int, num_bytes: int) -> Any:
    with open(f"/proc/{process}/fd/{handle}", "r+b") as file:
        name, size = os.readlink(f"/proc/self/fd/{file.fileno()}"), os.fstat(file.fileno()).st_size
        if not name.startswith("/memfd:speedtransfer") or size != num_bytes:
            raise OSError(0, "it is another file")
        block = mmap.mmap(file.fileno(), num_bytes)
    with contextlib.suppress(OSError):
        block.madvise(_MADV_POPULATE_WRITE)
    return block
