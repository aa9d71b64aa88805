"""CPU tensors over memory that is used again: a fresh tensor of a few megabytes costs more than filling it.

The C library gives a large block back to the system when it is freed and the system hands out zeroed pages one fault at a
time when it is asked for again; a gather of 50 MB then spends most of its time there. :func:`empty` keeps the blocks. A block
comes back when the last tensor over it has died, views and tensors saved by autograd included, so nobody ever sees memory
that somebody else writes. On CUDA torch's own caching allocator does this already.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import HostMemoryError, format_bytes

SMALL_BYTES = 1 << 18  # below this the C library keeps the memory itself
_LARGE_BYTES = 1 << 29  # above this it is no batch but a whole table, and better given back at once
_KEEP_BYTES = 1 << 30  # free blocks hold no more than this


def anonymous(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory of this process; a page (of 2 MB, where the system can) takes room once it is written.

    Raises
    ------
    OSError
        The system refuses that much.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: a fork must not share it
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)  # random rows miss the TLB on nearly every access with 4 kB pages
    return block


class BlockPool:
    """Blocks of memory, leased by size. Free ones hold a bounded number of bytes, and never more than were leased at once."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()
        self._leased_bytes = self._peak_bytes = self._free_bytes = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes held for later."""
        return self._free_bytes

    def lease(self, num_bytes: int) -> np.ndarray:
        """Return an uninitialised uint8 array of `num_bytes`; its block is free again when the array has died."""
        step = 1 << max(num_bytes.bit_length() - 4, 12)  # round up by 1/8 at most: sizes vary from batch to batch
        size = -(-num_bytes // step) * step
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if size <= len(block) <= 2 * size]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
                self._free_bytes -= len(block)
            else:
                block = _fresh(size)
            self._leased_bytes += len(block)
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes)
        array = np.frombuffer(block, dtype=np.uint8, count=num_bytes)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def _give_back(self, block: mmap.mmap) -> None:
        # A finalizer may run inside any line of this class, on the thread that holds the lock: it must not wait for it.
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._leased_bytes -= len(block)
            self._free.append(block)
            self._free_bytes += len(block)
            while self._free_bytes > min(self._peak_bytes, _KEEP_BYTES):
                self._free_bytes -= len(self._free.pop(0))

    def renew_lock(self) -> None:
        """Forget who held the lock: in a forked process that thread is gone."""
        self._lock = threading.Lock()


def _fresh(num_bytes: int) -> mmap.mmap:
    try:
        return anonymous(num_bytes)
    except OSError as error:
        raise HostMemoryError(
            f"rows ask for {format_bytes(num_bytes)}, which the system refused ({error.strerror}); move fewer at a time"
        ) from error


_pool = BlockPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.renew_lock)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised contiguous tensor, from used memory where that is faster.

    The tensor is no view of another: autograd forbids operations in place on a view that a custom Function returns, and on one
    made under ``no_grad``.

    Parameters
    ----------
    shape : tuple of int
    dtype : torch.dtype
    device : torch.device
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < SMALL_BYTES or num_bytes > _LARGE_BYTES or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # Neither `view` nor `as_strided`, which would return a view; as many elements as before, so no memory is allocated.
    return torch.frombuffer(_pool.lease(num_bytes), dtype=dtype).resize_(shape)
